"""Labels of jobs: given by the command line, found by `ps -l`, added up in reports; only those who see all of a job find it by them."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import json

import pytest

from phalanx.core.state.events import PutProject
from phalanx.core.work.queue import Project
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from tests.contract.api_head import code
from tests.contract.test_api_job_keys import phalanx

__all__ = ["phalanx"]  # a fixture
HOUR_US = 3_600_000_000


def listed(call, query, role="user"):
    reply = call(role, "GET", f"/v1/jobs?{query}")
    assert reply.status_code == 200, reply.text
    return [one["id"] for one in reply.json()["jobs"]]


def test_jobs_are_listed_by_labels(call):
    for number in range(6):
        call.submit(labels={"exp": str(number % 2), "team": "nlp"} if number else None)
    assert listed(call, "label=exp=1") == ["6", "4", "2"]
    assert listed(call, "label=exp") == ["6", "5", "4", "3", "2"]
    assert listed(call, "label=exp=0&label=team=nlp&fold=1&limit=1") == ["5"]
    assert listed(call, "label=exp=1&label=team=cv") == []
    assert listed(call, "label=exp=") == []
    assert code(call("user", "GET", "/v1/jobs?label=%3D7")) == (400, "bad_request")
    assert code(call("user", "GET", "/v1/jobs?" + "&".join(["label=a"] * 9))) == (400, "bad_request")


@pytest.mark.parametrize("fold", ["", "&fold=1"])
def test_others_do_not_find_a_job_by_its_labels(head, call, fold):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada", "vic"}))))
    job_id = call.submit(labels={"exp": "secret"}, project="nlp")
    found = {role: listed(call, "label=exp=secret" + fold, role) for role in ("user", "other", "viewer", "operator")}
    assert found == {"user": [job_id], "other": [], "viewer": [job_id], "operator": [job_id]}
    assert listed(call, "", "other") == [job_id]


def hour_of(head, *job_ids):
    """An hour in which each job held one GPU, and one was free."""
    rows = [
        UsageRow(
            model="h100",
            pool="",
            project="default" if job else "",
            user="ada" if job else "",
            queue="default" if job else "",
            job=job,
            amounts=(("computing" if job else "free", "", HOUR_US),),
        )
        for job in (*job_ids, "")
    ]
    return UsageHour(id="3600", fleet=HOUR_US * len(rows), rows=tuple(rows))


def test_reports_add_up_by_the_values_of_a_label(head, call):
    one, two, three = (call.submit(labels={"exp": text} if text else None) for text in ("a", "a", ""))
    hidden = call.submit("other", labels={"exp": "b"})
    hour = hour_of(head, one, two, three, hidden)
    reports = {}
    # An hour of the ledger takes an hour to count.
    object.__setattr__(head.parts, "usage_hours", lambda *period: iter([hour]))
    for role in ("admin", "viewer"):
        for report in ("usage", "cost"):
            reply = call(role, "GET", f"/v1/{report}?since_s=0&label=exp").json()
            assert reply["by"] == "label:exp"
            reports[role, report] = {row["key"]: round(row["gpu_hours"]) for row in reply["rows"]}
    assert reports["admin", "usage"] == {"a": 2, "b": 1, "": 2}
    assert reports["viewer", "usage"] == {"": 5}
    assert reports["admin", "cost"]["a"] == 2


def test_the_command_line_gives_and_finds_labels(call, phalanx, tmp_path):
    (tmp_path / "job.yaml").write_text("run: 'true'\nlabels: {exp: '6', team: nlp}\n")
    assert phalanx("submit", "--quiet", "--label", "exp=7", "job.yaml")[:2] == (0, "1\n")
    phalanx("submit", "--quiet", "--label", "exp=8", "--", "true")
    exit_code, out, _ = phalanx("ps", "--json", "-l", "exp=7", "-l", "team")
    assert [(one["id"], one["labels"]) for one in json.loads(out)] == [("1", {"exp": "7", "team": "nlp"})]
    assert "labels" in phalanx("show", "1")[1]
    exit_code, again, _ = phalanx("rerun", "1", "--quiet", "--label", "exp=9")
    assert (exit_code, listed(call, "label=exp=9&label=team=nlp")) == (0, [again.strip()])
    assert phalanx("submit", "--label", "exp", "--", "true")[0] == 64
    assert phalanx("report", "usage", "--by", "label:exp")[0] == 0
    assert phalanx("report", "usage", "--by", "label:")[0] == 64
