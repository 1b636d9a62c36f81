"""Jobs over HTTP: submitting once, listing, changing, who may touch whose."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import math
from dataclasses import replace
from urllib.parse import quote

import msgspec
import pytest

from phalanx.api.views import usage_summaries
from phalanx.core.state.events import PutProject
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.queue import Project
from phalanx.ports.store import Batch
from tests.contract.api_head import JOB, ApiHead, Supervisor, code


def keyed(call, body, key="k1", role="user"):
    return call(role, "POST", "/v1/jobs", body, headers={"idempotency-key": key})


def test_submitted_job_comes_back_with_what_will_start(call):
    Supervisor(call).hello()
    tracker = {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "llm"}
    reply = call("user", "POST", "/v1/jobs", {**JOB, "gpus": "1x4", "labels": {"team": "nlp"}, "env": tracker})
    said = reply.json()
    assert reply.status_code == 201
    assert (said["job"]["id"], said["job"]["user"], said["job"]["project"], said["job"]["queue"]) == (
        "1",
        "ada",
        "default",
        "default",
    )
    assert said["job"]["labels"] == {"team": "nlp"}
    [link] = said["job"]["links"]
    assert (link["name"], link["url"]) == ("wandb", "https://wandb.ai/lab/llm/runs/1-k")
    assert call("viewer", "GET", "/v1/jobs/1").json()["job"]["links"] == []
    assert said["notes"] == ["1 node x 4 = 4 GPUs", "4 tasks: 1 node x 4, one per GPU"]


def test_same_key_and_body_give_the_same_job_and_another_body_is_refused(call):
    first, again = keyed(call, JOB), keyed(call, JOB)
    assert first.json()["job"]["id"] == again.json()["job"]["id"]
    assert code(keyed(call, {**JOB, "gpus": 1})) == (409, "conflict")
    assert keyed(call, JOB, role="other").json()["job"]["id"] != first.json()["job"]["id"]  # keys are each user's own
    assert len(call("user", "GET", "/v1/jobs").json()["jobs"]) == 2


def test_same_key_survives_a_restart_of_the_head(tmp_path, head, call):
    first = keyed(call, JOB).json()["job"]["id"]
    head.driver.stop()
    later = ApiHead(str(tmp_path), store=head.store, head_id="head-2")
    with later.calling() as call_later:
        assert keyed(call_later, JOB).json()["job"]["id"] == first
        assert code(keyed(call_later, {**JOB, "name": "x"})) == (409, "conflict")
    later.close()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gpuz": 8}, (422, "bad_file")),
        ({"gpus": "8 of them"}, (422, "bad_file")),
        ({"nodes": 99, "gpus": None, "gpus_per_node": 1}, (422, "never_fits")),
        ({"queue": "none"}, (404, "not_found")),
        ({"project": "none"}, (404, "not_found")),
        ({"project": "closed"}, (403, "not_permitted")),
        ({"workdir": "here"}, (400, "bad_request")),
        ({"time": "30"}, (422, "bad_file")),
    ],
)
def test_job_that_cannot_be_is_refused_and_leaves_nothing(head, call, change, expected):
    Supervisor(call).hello()
    head.ask(PutProject(project=Project(id="closed", members=frozenset({"bob"}))))
    assert code(call("user", "POST", "/v1/jobs", {**JOB, **change})) == expected
    assert call("user", "GET", "/v1/jobs").json()["jobs"] == []


def test_overlong_key_is_refused(call):
    assert code(keyed(call, JOB, key="k" * 201)) == (400, "bad_request")


def test_only_project_of_a_user_is_theirs_without_saying(head, call):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}))))
    assert call("user", "POST", "/v1/jobs", JOB).json()["job"]["project"] == "nlp"
    assert call("other", "POST", "/v1/jobs", JOB).json()["job"]["project"] == "default"


def test_list_pages_newest_first_and_filters(call):
    ids = [call.submit(name=f"job{n}") for n in range(5)]
    call.submit("other")
    page = call("user", "GET", "/v1/jobs?user=ada&limit=2").json()
    assert [job["id"] for job in page["jobs"]] == [ids[4], ids[3]]
    rest = call("user", "GET", f"/v1/jobs?user=ada&before_seq={page['next']}&limit=10").json()
    assert [job["id"] for job in rest["jobs"]] == [ids[2], ids[1], ids[0]]
    assert rest["next"] is None
    assert [job["name"] for job in call("user", "GET", "/v1/jobs?name=job3").json()["jobs"]] == ["job3"]
    assert call("user", "GET", "/v1/jobs?state=running&state=failed").json()["jobs"] == []


def test_others_jobs_are_seen_but_not_their_command(call):
    job_id = call.submit(labels={"secret": "plan"})
    for role in ("other", "viewer"):
        shown = call(role, "GET", f"/v1/jobs/{job_id}").json()["job"]
        assert (shown["user"], shown["state"], shown["command"], shown["workdir"], shown["labels"]) == (
            "ada",
            "pending",
            "",
            "",
            {},
        )
    assert call("operator", "GET", f"/v1/jobs/{job_id}").json()["job"]["command"] == "python train.py"


def test_others_jobs_are_not_touched_but_by_operators_and_admins_of_the_project(head, call):
    job_id = call.submit()
    refused = call("other", "POST", f"/v1/jobs/{job_id}/cancel", {})
    assert code(refused) == (403, "not_permitted")
    assert "ada" in refused.json()["error"]["message"]
    assert call("operator", "POST", f"/v1/jobs/{job_id}/hold").json()["job"]["held"]
    head.ask(PutProject(project=Project(id="default", admins=frozenset({"bob"}))))
    assert call("other", "POST", f"/v1/jobs/{job_id}/cancel", {}).json()["job"]["state"] == "cancelled"


def test_hold_release_update_cancel(call):
    job_id = call.submit()
    path = f"/v1/jobs/{job_id}"
    assert call("user", "POST", f"{path}/hold").json()["job"]["reason"] == "held"
    assert not call("user", "POST", f"{path}/release").json()["job"]["held"]
    changed = call("user", "PATCH", path, {"name": "better", "priority": 7, "time": "2h"}).json()["job"]
    assert (changed["name"], changed["priority"], changed["time_limit_s"]) == ("better", 7, 7200)
    assert code(call("user", "PATCH", path, {})) == (400, "bad_request")
    assert code(call("user", "PATCH", path, {"time": "2"})) == (400, "bad_request")
    assert code(call("user", "PATCH", path, {"state": "failed"})) == (400, "bad_request")
    for _ in range(2):
        ended = call("user", "POST", f"{path}/cancel", {"why": "enough"}).json()["job"]
        assert (ended["state"], ended["cancelled_by"]) == ("cancelled", "ada")
    kinds = [line["kind"] for line in call("user", "GET", f"{path}/story").json()["story"]]
    assert kinds[0] == "submitted"
    assert "cancelled" in " ".join(kinds)


def test_history_goes_on_after_a_line(call):
    job_id = call.submit()
    call("user", "POST", f"/v1/jobs/{job_id}/cancel")
    whole = call("user", "GET", f"/v1/jobs/{job_id}/story").json()
    rest = call("user", "GET", f"/v1/jobs/{job_id}/story?after={whole['story'][0]['seq']}").json()
    assert rest["story"] == whole["story"][1:]
    assert call("user", "GET", f"/v1/jobs/{job_id}/story?after={whole['last']}").json() == {
        "story": [],
        "last": whole["last"],
    }
    everything = call("viewer", "GET", "/v1/story").json()["story"]
    assert {line["seq"] for line in whole["story"]} <= {line["seq"] for line in everything}


def test_waiting_job_says_why(call):
    Supervisor(call).hello()
    call.submit(gpus=4)
    second = call.submit(gpus=4)
    shown = call("user", "GET", f"/v1/jobs/{second}").json()["job"]
    assert (shown["state"], shown["reason"]) == ("pending", "resources")
    assert shown["detail"]


def test_ended_job_has_a_usage_summary(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.end(job_id, code=3)
    detail = call("user", "GET", f"/v1/jobs/{job_id}").json()
    assert (detail["job"]["state"], detail["job"]["exit_code"]) == ("failed", 3)
    assert detail["attempts"][0]["cause"] == "failed"
    assert [task["code"] for task in detail["attempts"][0]["exits"]] == [3, 3]
    usage = call("viewer", "GET", f"/v1/jobs/{job_id}/receipt").json()
    assert usage["attempts"][0]["cause"] == "failed"
    assert usage["gpu_seconds"]["total"] > 0


def test_stop_is_refused_while_jobs_run_and_keeps_or_cancels_them_as_told(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    assert code(call("user", "POST", "/v1/stop", {})) == (403, "not_permitted")
    assert code(call("operator", "POST", "/v1/stop", {})) == (409, "conflict")
    assert code(call("operator", "POST", "/v1/stop", {"keep_jobs": True, "cancel_jobs": True})) == (400, "bad_request")
    assert call("operator", "POST", "/v1/stop", {"cancel_jobs": True}).json() == {
        "stopping": False,
        "running": 1,
        "relieved": False,
    }
    supervisor.end(job_id)
    assert not head.stopped.is_set()
    assert call("operator", "POST", "/v1/stop", {"cancel_jobs": True}).json() == {
        "stopping": True,
        "running": 0,
        "relieved": False,
    }
    assert head.stopped.wait(100)


def test_stop_that_keeps_jobs_grants_long_leases_first(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    supervisor.run(call.submit())
    head.driver.leases.grant_long(600.0, math.inf)  # as PreparePlannedStop will
    assert supervisor.lease([("1", 1)]).json()["lease_s"] == 600.0
    assert call("admin", "POST", "/v1/stop", {"keep_jobs": True}).json() == {
        "stopping": True,
        "running": 1,
        "relieved": False,
    }
    assert head.stopped.wait(100)


@pytest.mark.parametrize("verb", ["hold", "release"])
def test_job_that_is_over_is_neither_held_nor_released(call, verb):
    job_id = call.submit()
    call("user", "POST", f"/v1/jobs/{job_id}/cancel")
    refused = call("user", "POST", f"/v1/jobs/{job_id}/{verb}")
    assert code(refused) == (409, "conflict")
    assert f"job {job_id} is cancelled" in refused.json()["error"]["message"]


def test_release_of_a_running_job_that_is_not_held_is_harmless(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    assert call("user", "POST", f"/v1/jobs/{job_id}/release").json()["job"]["state"] == "running"
    assert code(call("user", "POST", f"/v1/jobs/{job_id}/hold")) == (409, "conflict")


def cancel_many(call, jobs, role="user", **more):
    return call(role, "POST", "/v1/jobs/cancel", {"jobs": jobs, **more})


def test_many_jobs_are_cancelled_in_one_step_and_none_starts_on_what_another_frees(head, call):
    Supervisor(call).hello()
    ids = [call.submit(gpus=4) for _ in range(20)]
    heard = head.driver.stats["events"]
    reply = cancel_many(call, [*ids, ids[0]], why="wrong data")
    assert [job["id"] for job in reply.json()["jobs"]] == ids
    assert {job["state"] for job in reply.json()["jobs"][1:]} == {"cancelled"}
    assert {job["cancelled_by"] for job in reply.json()["jobs"]} == {"ada"}
    assert [job["epoch"] for job in reply.json()["jobs"]] == [1] + [0] * 19
    assert head.driver.stats["events"] - heard == 20, "each once"
    told = [line for line in head.store.history(limit=500) if line.by == "ada" and line.kind != "submitted"]
    assert len(told) == 20
    assert len({line.at_s for line in told}) == 1, "of one step, so of one moment"
    again = cancel_many(call, ids)
    assert again.status_code == 200
    assert {job["cancelled_by"] for job in again.json()["jobs"]} == {"ada"}


def test_cancel_of_many_is_refused_whole_if_one_is_unknown_or_anothers(call):
    mine, theirs = call.submit(), call.submit("other")
    assert code(cancel_many(call, [mine, theirs])) == (403, "not_permitted")
    assert code(cancel_many(call, [mine, "999"])) == (404, "not_found")
    assert code(cancel_many(call, [mine] * 5000)) == (400, "bad_request")
    assert call("user", "GET", f"/v1/jobs/{mine}").json()["job"]["state"] == "pending"
    assert cancel_many(call, []).json() == {"jobs": []}


def test_progress_of_a_resumed_attempt_begins_at_the_step_it_resumed_from(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    head.telemetry.put_steps(job_id, 1, 0, step_line(900, generation=0))
    assert shown_step(call, job_id) == 900
    attempt = head.store.attempts(job_id)[-1]
    resume = PublishedCheckpoint(epoch=1, step=800, path="/c", digest="d")
    restarted = replace(attempt, generation=1, generation_s=5.0, resume_from=resume)
    head.store.commit(Batch(records=[restarted]))
    head.telemetry.put_steps(job_id, 1, 0, b'{"k": "planned", "rank": 0, "generation": 1, "steps_total": 1000}\n')
    assert shown_step(call, job_id) == 800
    head.store.commit(Batch(records=[replace(restarted, resume_from=None)]))
    assert call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["progress"] is None
    head.telemetry.put_steps(job_id, 1, 0, step_line(801, generation=1))
    assert shown_step(call, job_id) == 801


def step_line(step, *, generation):
    return msgspec.json.encode({"k": "step", "rank": 0, "generation": generation, "step": step, "at_s": 1.0}) + b"\n"


def shown_step(call, job_id):
    return call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["progress"]["step"]


# ---- usage summaries -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(head, call):
    """A job with 50 steps of 4 ranks."""
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    lines = [
        {
            "k": "step",
            "rank": rank,
            "epoch": 1,
            "generation": 0,
            "step": step,
            "begin_ns": step * 10**9,
            "end_ns": (step + 1) * 10**9,
            "at_s": head.clock.now_s(),
        }
        for step in range(50)
        for rank in range(4)
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    assert supervisor.ship(job_id, 1, "steps-0", 0, data).status_code == 200
    return job_id, data


def test_a_usage_summary_reads_so_much_of_an_attempt_and_says_what_it_left_unread(call, trained, monkeypatch):
    """Found by reading: a usage summary read whatever an attempt had reported, at once and into memory."""
    job_id, data = trained
    whole = call("viewer", "GET", f"/v1/jobs/{job_id}/receipt").json()
    assert (whole["attempts"][0]["steps"], whole["unread_bytes"]) == (50, 0)
    monkeypatch.setattr(usage_summaries, "READ_BYTES_MAX", len(data) // 2)
    half = call("viewer", "GET", f"/v1/jobs/{job_id}/receipt").json()
    assert half["unread_bytes"] == len(data) - len(data) // 2
    assert half["attempts"][0]["steps"] in (24, 25, 26)


def test_many_usage_summaries_at_once_are_asked_for_again_later(head, call, trained):
    head.app.state.runtime.usage_summaries_pending = usage_summaries.USAGE_SUMMARIES_PENDING_MAX
    assert code(call("viewer", "GET", f"/v1/jobs/{trained[0]}/receipt")) == (503, "try_later")
    head.app.state.runtime.usage_summaries_pending = 0
    assert call("viewer", "GET", f"/v1/jobs/{trained[0]}/receipt").status_code == 200
    assert head.app.state.runtime.usage_summaries_pending == 0


def test_jobs_are_listed_in_any_order_with_a_cursor(call):
    for name, gpus in (("b", 1), ("a:1", 2), ("c", 1), ("a:1", 4)):
        call.submit(name=name, gpus=gpus, allow_never=True, hold=True)
    for query, ids in (
        ("sort=name&ascending=true", ["2", "4", "1", "3"]),
        ("sort=name", ["3", "1", "4", "2"]),
        ("sort=gpus", ["4", "2", "3", "1"]),
        ("sort=state&ascending=true&state=pending", ["1", "2", "3", "4"]),
        ("ascending=true", ["1", "2", "3", "4"]),
    ):
        found, after = [], ""
        while True:
            page = call("user", "GET", f"/v1/jobs?{query}&limit=1&after={quote(after)}").json()
            found += [job["id"] for job in page["jobs"]]
            after = page.get("after", "")
            if not after:
                break
        assert found == ids, query
    for wrong in (
        "after=7",
        "sort=gpus&after=7:many",
        "sort=name&after=%EF%BC%97:a",
        "sort=name&fold=1",
        "after=1:1&fold=1",
    ):
        assert code(call("user", "GET", f"/v1/jobs?{wrong}")) == (400, "bad_request"), wrong
