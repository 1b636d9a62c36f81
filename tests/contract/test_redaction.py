"""What others see of a job: that it is there and how it stands; not its command, its paths, or what its programs said."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import logging
import math
import threading

import httpx
import pytest

from phalanx.core.lifecycle import settle
from phalanx.core.state.events import PutProject
from phalanx.core.state.reports import MemberRefused
from phalanx.core.work.job import BACKOFF_MAX_S
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.queue import Project
from tests.contract.api_head import Supervisor, bearer, until

SECRETS = ("canary-argv", "/home/ada/canary-path", "canary-label", "canary-why", "canary-env")


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


@pytest.fixture
def job_id(head, call):
    """A job of ada's in a project of her own that a node refused, naming a path."""
    job_id, supervisor = refused(head, call, charge=True)
    supervisor.end(job_id, ranks=0)
    until(lambda: head.store.job(job_id).state.terminal)
    return job_id


def refused(head, call, *, charge):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}))))
    supervisor = Supervisor(call)
    supervisor.hello()
    head.driver.leases.grant_long(3600.0, math.inf)  # nobody renews here
    supervisor.lease()
    job_id = call.submit(
        run=["train", "--key", "canary-argv"],
        workdir="/home/ada/canary-path",
        env={"KEY": "canary-env"},
        project="nlp",
        retry=0,
        labels={"note": "canary-label"},
    )
    until(lambda: head.store.attempts(job_id))
    why = "no folder /home/ada/canary-path (canary-why)"
    supervisor.tell(
        MemberRefused(job_id=job_id, epoch=1, generation=0, node_id="n0", why=why, job_at_fault=charge, exit_code=1)
    )
    return job_id, supervisor


def told(call, role, job_id, *, over=True):
    """Every reading route that may tell of the job, and its stream, which ends where the job is over."""
    nouns = ("", "/why", "/story", "/receipt", "/usage", "/steps", *(("/events",) if over else ()))
    paths = [f"/v1/jobs/{job_id}{noun}" for noun in nouns] + [
        "/v1/jobs",
        "/v1/story",
        "/v1/overview",
        "/v1/nodes",
        "/v1/queues",
        "/metrics",
    ]
    return {path: call(role, "GET", path).text for path in paths}


@pytest.mark.parametrize("role", ["other", "viewer"])
def test_others_see_no_words_of_a_job(call, job_id, role):
    seen = told(call, role, job_id)
    assert {path: [word for word in SECRETS if word in text] for path, text in seen.items()} == {
        path: [] for path in seen
    }


@pytest.mark.parametrize("role", ["other", "viewer"])
def test_others_see_no_words_of_a_job_that_waits_to_be_started_again(head, call, role, monkeypatch):
    monkeypatch.setattr(settle, "BACKOFF_FIRST_S", BACKOFF_MAX_S)  # it still waits when the last route is asked
    job_id, supervisor = refused(head, call, charge=False)
    supervisor.end(job_id, ranks=0)
    until(lambda: "canary-why" in call("user", "GET", f"/v1/jobs/{job_id}/why").json()["headline"])
    mine = call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]
    assert (mine["state"], mine["reason"]) == ("pending", "backoff")
    assert mine["detail"].startswith("waits shortly after a failed start; its last attempt ended: ")
    assert "canary-why" in mine["detail"]
    seen = told(call, role, job_id, over=False)
    assert {path: [word for word in SECRETS if word in text] for path, text in seen.items()} == {
        path: [] for path in seen
    }


def test_others_see_that_it_is_there_and_how_it_stands(call, job_id):
    job = call("other", "GET", f"/v1/jobs/{job_id}").json()["job"]
    assert (job["user"], job["state"], job["name"], job["gpu_count"]) == ("ada", "failed", "train", 2)
    kinds = [line["kind"] for line in call("other", "GET", f"/v1/jobs/{job_id}/story").json()["story"]]
    own = [line["kind"] for line in call("user", "GET", f"/v1/jobs/{job_id}/story").json()["story"]]
    assert kinds == own
    assert "submitted" in kinds


@pytest.mark.parametrize("role", ["user", "operator", "admin"])
def test_its_owner_and_operators_see_why(call, job_id, role):
    assert "canary-why" in call(role, "GET", f"/v1/jobs/{job_id}/story").text
    assert "canary-argv" in call(role, "GET", f"/v1/jobs/{job_id}").text
    assert "canary-why" in call(role, "GET", f"/v1/jobs/{job_id}/receipt").text
    assert "canary-why" in call(role, "GET", f"/v1/jobs/{job_id}/usage").text


@pytest.mark.parametrize("role", ["user", "operator", "admin", "other", "viewer"])
def test_variables_are_shown_to_nobody(call, job_id, role):
    assert not [path for path, text in told(call, role, job_id).items() if "canary-env" in text]


def test_who_follows_everything_is_told_no_words_of_others_jobs(call, job_id):
    heard = {}

    def follow(role):
        with httpx.stream(
            "GET", f"{call.url}/v1/events?after=0", headers=bearer(role), timeout=20, trust_env=False
        ) as reply:
            text = ""
            for piece in reply.iter_text():
                text += piece
                heard[role] = text
                if '"state":"failed"' in text:
                    return

    following = [threading.Thread(target=follow, args=(role,), daemon=True) for role in ("other", "user")]
    for one in following:
        one.start()
    for one in following:
        one.join(timeout=100)
    assert "canary-why" in heard["user"]
    assert not [word for word in SECRETS if word in heard["other"]]


@pytest.mark.parametrize(
    "env", [{"KEY": ["canary"]}, {"KEY": {"a": "canary"}}, ["canary"], ["KEY", "canary"], {"KEY": "canary\0"}, "canary"]
)
def test_a_variable_that_is_refused_is_not_said_again(env):
    with pytest.raises(InvalidKey) as refused:
        spec_from_mapping({"run": "true", "env": env}, workdir="/", now_s=0.0)
    assert "canary" not in f"{refused.value.message} {refused.value.hint}"


def test_a_token_in_a_log_would_be_heard(canaries, call):
    made = call("admin", "POST", "/v1/tokens", {"note": "canary"}).json()["secret"]
    logging.getLogger("phalanx.test").debug("who asks is %s", made)
    assert [one.partition(":")[0] for one in canaries.sung] == ["phalanx.test"]
    canaries.sung.clear()
