"""Services over HTTP: made once however often they are sent, shown with their endpoints, changed by their owners."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import time

import pytest

from phalanx.core.state.reports import MemberReady, MemberStarted, ReadinessChanged, SleepHookEnded
from tests.contract.api_head import JOB, Supervisor, code, until

WEB = {**JOB, "gpus": 1, "name": "web", "type": "service", "replicas": "1..3", "port": 8000, "ready": "/health"}


@pytest.fixture
def n0(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    return supervisor


def submit(call, **changes):
    return call("user", "POST", "/v1/services", {**WEB, **changes})


def show(call, role="user"):
    return call(role, "GET", "/v1/services/web").json()


def serve(n0, call):
    """Let the service's first replica run on n0 and become ready."""
    until(lambda: [job for job in show(call)["replicas"] if job["attempt_state"]])
    job_id = show(call)["replicas"][0]["id"]
    place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
    n0.tell(MemberReady(**place, port=29500, service_port=8000))
    n0.tell(MemberStarted(**place, at_s=time.time()), ReadinessChanged(**place, ready=True))
    until(lambda: show(call)["service"]["state"] == "ready")
    return job_id


def test_service_is_shown_with_its_replicas_and_endpoints(n0, call):
    made = submit(call)
    assert made.status_code == 201
    assert (made.json()["service"]["state"], made.json()["service"]["revision"]) == ("starting", 1)
    job_id = serve(n0, call)
    found = show(call)["service"]
    assert found["endpoints"] == [
        {"job_id": job_id, "revision": 1, "node_id": "n0", "address": "127.0.0.1", "port": 8000, "ready": True}
    ]
    assert {name: found[name] for name in ("replicas", "desired", "ready", "port", "ready_check")} == {
        "replicas": "1..3",
        "desired": 1,
        "ready": 1,
        "port": 8000,
        "ready_check": "/health",
    }
    (replica,) = show(call)["replicas"]
    assert {name: replica[name] for name in ("service", "revision", "port", "ready")} == {
        "service": "web",
        "revision": 1,
        "port": 8000,
        "ready": True,
    }
    assert [one["name"] for one in call("viewer", "GET", "/v1/services").json()["services"]] == ["web"]
    refused = call("user", "PATCH", f"/v1/jobs/{job_id}", {"priority": 5})
    assert (refused.status_code, refused.json()["error"]["hint"]) == (
        409,
        "update service web, which makes a new revision",
    )


def test_event_stream_has_each_change_of_an_endpoint(n0, call):
    submit(call)
    job_id = serve(n0, call)
    lines = call("user", "GET", "/v1/story?limit=500").json()["story"]
    (line,) = [one for one in lines if one["kind"] == "endpoint"]
    assert line["job_id"] == job_id
    assert line["facts"] == {"service": "web", "revision": 1, "address": "127.0.0.1", "port": 8000, "ready": 1}


def test_submit_is_idempotent_and_another_spec_is_refused(n0, call):
    assert [submit(call).status_code for _ in range(2)] == [201, 201]
    assert len(show(call)["replicas"]) == 1
    refused = submit(call, gpus=2)
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "service web exists already")


def test_changes(n0, call):
    submit(call)
    path = "/v1/services/web"
    changed = call("user", "PATCH", path, {"spec": {**WEB, "env": {"A": "1"}}})
    assert changed.json()["service"]["revision"] == 2
    assert [one["number"] for one in show(call)["revisions"]] == [2, 1]
    assert call("user", "PATCH", path, {"revision": 1}).json()["service"]["revision"] == 1
    call("user", "PATCH", path, {"replicas": 3})
    until(lambda: show(call)["service"]["desired"] == 3)
    for _ in range(2):
        assert call("user", "POST", f"{path}/stop").json()["service"]["state"] == "stopped"
    assert call("viewer", "GET", "/v1/services").json()["services"] == []
    assert len(call("viewer", "GET", "/v1/services?stopped=1").json()["services"]) == 1
    refused = call("user", "PATCH", path, {"replicas": 1})
    assert code(refused) == (409, "conflict")


def test_sleep_and_wake_are_told_to_the_node_and_shown(n0, call):
    submit(call, sleep="/sleep?level=1", wake="/wake_up")
    job_id = serve(n0, call)
    place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
    path = "/v1/services/web"

    def view(source):
        one = source["service"]
        return one["state"], one["asleep_wanted"], one["asleep"], one["ready"]

    def replica():
        (one,) = show(call)["replicas"]
        return one["sleep"], one["gpu_count"]

    assert call("user", "PATCH", path, {"asleep": 99}).json()["service"]["asleep_wanted"] == 1
    until(lambda: replica() == ("falling asleep", 1))
    assert call("user", "GET", "/v1/nodes/n0").json()["node"]["devices"][0]["job_id"] == job_id
    n0.tell(SleepHookEnded(**place, turn=1, sleep=True))
    until(lambda: replica() == ("asleep", 0))
    assert view(show(call)) == ("sleeping", 1, 1, 0)
    node = call("user", "GET", "/v1/nodes/n0").json()["node"]
    assert (node["devices"][0]["job_id"], node["jobs"]) == (None, [job_id])
    assert call("user", "GET", f"/v1/jobs/{job_id}/why").json()["headline"].startswith("is asleep; has run for ")
    assert call("user", "PATCH", path, {"awake": 1}).json()["service"]["asleep_wanted"] == 0
    until(lambda: replica() == ("waking", 1))
    n0.tell(SleepHookEnded(**place, turn=2, sleep=False))
    until(lambda: view(show(call)) == ("ready", 0, 0, 1))


BAD = [
    ({}, 400, "exactly one of spec, revision, replicas, asleep, awake"),
    ({"revision": 1, "replicas": 2}, 400, "exactly one of spec, revision, replicas, asleep, awake"),
    ({"replicas": 9}, 400, "replicas: 1..3; 9 is outside"),
    ({"replicas": -1}, 400, "is outside"),
    ({"asleep": 1, "awake": 1}, 400, "exactly one of spec, revision, replicas, asleep, awake"),
    ({"asleep": -1}, 400, "asleep"),
    ({"asleep": 1}, 400, "service web has no sleep hook"),
    ({"revision": 7}, 404, "no revision 7"),
    ({"spec": {**WEB, "name": "other"}}, 400, "the file names service other, not web"),
    ({"spec": {**JOB, "name": "web"}}, 400, "the spec is not of a service"),
    ({"spec": {**WEB, "queue": "fast"}}, 400, "is in queue default"),
    ({"spec": {**WEB, "gpus": 400}}, 422, "400"),
    ({"spec": {**WEB, "port": "x"}}, 422, "is not a port"),
    ({"replica": 2}, 400, "replica"),
]


def test_bad_changes_are_refused_and_change_nothing(n0, call):
    submit(call)
    until(lambda: show(call)["replicas"][0]["attempt_state"])
    before = show(call)
    for body, status, said in BAD:
        refused = call("user", "PATCH", "/v1/services/web", body)
        assert refused.status_code == status, (body, refused.text)
        assert said in refused.json()["error"]["message"]
    assert show(call) == before


def test_wrong_route_and_unknown_service_are_told(n0, call):
    refused = call("user", "POST", "/v1/jobs", WEB)
    assert refused.json()["error"]["message"] == "a service is not a job"
    assert call("user", "POST", "/v1/services", JOB).status_code == 400
    assert call("user", "GET", "/v1/services/none").status_code == 404
    assert call("user", "POST", "/v1/services/none/stop").status_code == 404
    assert submit(call, gpus=400).status_code == 422


def test_others_see_that_it_is_there_and_not_what_it_runs(n0, call):
    submit(call)
    assert show(call)["service"]["command"]
    hidden = show(call, "viewer")
    assert (hidden["service"]["command"], hidden["revisions"][0]["command"]) == ("", "")
    assert hidden["service"]["state"] == "starting"


def test_load_is_taken_from_those_who_may_change_the_service(n0, call):
    submit(call, replicas="0..3", scale={"queue": "2s", "in_flight": 4})
    report = {"gateway": "gateway-1", "services": [{"service": "web", "waiting": 1, "first_tokens": {"50": 2}}]}
    report["services"].append({"service": "nosuch"})
    assert show(call)["load"] is None
    assert call("viewer", "POST", "/v1/gateways/load", report).status_code == 403
    other = call("other", "POST", "/v1/gateways/load", report)
    assert other.json() == {"ignored": ["nosuch", "web"]}
    answer = call("operator", "POST", "/v1/gateways/load", report)
    assert (answer.status_code, answer.json()) == (200, {"ignored": ["nosuch"]})
    told = [line["action"] for line in call("admin", "GET", "/v1/audit").json()["lines"]]
    assert "POST /v1/gateways/load" not in told, "one each second would be a commit each second"
    found = show(call)
    assert (found["service"]["desired"], found["service"]["load_why"]) == (1, "a request waits for the first replica")
    assert found["service"]["scale"] == {"queue": "2s", "in_flight": "4", "idle": "10m"}
    assert (found["load"]["waiting"], found["load"]["gateways"]) == (1, 1)
    was = call("viewer", "GET", "/v1/services/web/load?span_s=86400").json()
    assert (was["service"], was["step_s"], was["wanted"]) == ("web", 300, []), "no point has ended"
    assert call("viewer", "GET", "/v1/services/none/load").status_code == 404
    assert call("viewer", "GET", "/v1/services/web/load?span_s=1").status_code == 400
    least = call("user", "PATCH", "/v1/services/web", {"replicas": 2}).json()["service"]["least"]
    found = show(call)["service"]
    assert (found["desired"], found["load_why"], found["load_s"]) == (2, "", None), "the number is set by hand"
    assert (least, call("user", "PATCH", "/v1/services/web", {"replicas": "auto"}).json()["service"]["least"]) == (2, 0)
    for body in (
        {**report, "gateway": "../x"},
        {**report, "services": [{"service": "web", "waiting": -1}]},
        {**report, "services": [{"service": "web", "first_tokens": {"999": 1}}]},
        {**report, "services": [{"service": "web", "kv": 2.0}]},
        {**report, "more": 1},
    ):
        assert call("operator", "POST", "/v1/gateways/load", body).status_code == 400
