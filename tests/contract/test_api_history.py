"""History over HTTP: columns of a node, of a device and of the fleet, the curves of a job, and the size of an answer."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.core.ids import SupervisorId
from phalanx.core.work.pace import TimedStep
from phalanx.store.history.levels import DAY_S
from phalanx.wire.supervisor import DeviceSample, SamplesRequest
from tests.contract.api_head import Supervisor

GIB = 1 << 30


@pytest.fixture
def node(call):
    made = Supervisor(call, devices=2)
    made.hello()
    return made


def sampled(head, *, devices=2, busy=0.5, name="n0", every_s=10.0, **host):
    """One sample of a node, which stands for ten seconds."""
    head.history.add_samples(
        SamplesRequest(
            supervisor_id=SupervisorId("s1"),
            node_id=name,
            at_s=0.0,
            devices=[
                DeviceSample(
                    index=index,
                    uuid=str(index),
                    counter="gpm_sm",
                    utilization=busy,
                    memory_used_bytes=4 * GIB,
                    throttle=("hw_slowdown",) if busy < 0.3 else (),
                )
                for index in range(devices)
            ],
            every_s=every_s,
            **host,
        )
    )


def asked(call, query, route="devices"):
    reply = call("viewer", "GET", f"/v1/history/{route}?{query}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def column(answer, metric, device=0):
    (found,) = [one for one in answer["columns"] if (one["metric"], one["device"]) == (metric, device)]
    return found


def known(values):
    return [value for value in values if value is not None]


def test_a_slow_hour_shows_in_the_columns_of_its_node(head, call, node):
    head.clock.ahead_s += (
        30 - head.clock.now_s()
    ) % 60  # a sample stands for ten seconds, which here lie in one minute
    for busy in (0.9, 0.2, 0.9):
        sampled(head, busy=busy, cpu_utilization=busy, memory_total_bytes=64 * GIB, memory_available_bytes=16 * GIB)
        head.clock.ahead_s += 3600
    head.history.turn()
    answer = asked(call, f"node=n0&since_s={head.clock.now_s() - 6 * 3600}")
    assert (answer["step_s"], len(answer["columns"])) == (60, 6)
    used = column(answer, "utilization", 1)
    assert known(used["mean"]) == known(used["min"]) == known(used["max"]) == [0.9, 0.2, 0.9]
    assert len(used["mean"]) == answer["points"]
    assert known(column(answer, "memory_used_bytes")["mean"]) == [4 * GIB] * 3
    throttled = column(answer, "throttled")
    assert [used["mean"][point] for point in throttled["reasons"]["hw_slowdown"]] == [0.2]
    assert known(throttled["mean"]) == [0.0, 1.0, 0.0]
    host = asked(call, f"node=n0&since_s={head.clock.now_s() - 6 * 3600}", "nodes")
    assert known(column(host, "cpu_utilization", None)["mean"]) == [0.9, 0.2, 0.9]
    assert known(column(host, "memory_used_bytes", None)["mean"]) == [48 * GIB] * 3


def test_one_device_and_the_mean_of_the_fleet(head, call, node):
    sampled(head, busy=0.2)
    sampled(head, busy=0.8, name="n1")
    head.clock.ahead_s += 20
    since = head.clock.now_s() - 60
    assert {one["device"] for one in asked(call, f"node=n0&device=1&since_s={since}")["columns"]} == {1}
    fleet = asked(call, f"since_s={since}&step_s=60")
    assert fleet["node"] == ""
    assert set(known(column(fleet, "utilization", None)["mean"])) == {0.5}


def test_metrics_that_nobody_reports_are_left_out(head, call, node):
    sampled(head)
    head.clock.ahead_s += 20
    answer = asked(call, "node=n0")
    assert {one["metric"] for one in answer["columns"]} == {"utilization", "memory_used_bytes", "throttled"}
    assert asked(call, "node=n0", "nodes")["columns"] == []


def test_a_node_that_is_forgotten_keeps_its_history(head, call):
    sampled(head, name="gone")
    head.clock.ahead_s += 20
    assert column(asked(call, "node=gone"), "utilization")
    missing = call("viewer", "GET", "/v1/history/devices?node=never")
    assert (missing.status_code, missing.json()["error"]["hint_code"]) == (404, "list-nodes")


@pytest.mark.parametrize(
    "query",
    ["since_s=200&until_s=100", "since_s=-1", "step_s=0", "device=0", "node=n0&device=-1", "since_s=nan", "step_s=x"],
)
def test_nonsense_is_refused(call, query):
    assert call("viewer", "GET", f"/v1/history/devices?{query}").status_code in (400, 422)


@pytest.mark.parametrize("span_s", [3600, DAY_S, 60 * DAY_S, 3 * 365 * DAY_S, 80 * 365 * DAY_S])
def test_an_answer_about_a_large_node_is_below_a_megabyte(head, call, span_s):
    sampled(head, devices=72, busy=0.123, name="rack", cpu_utilization=0.5)
    head.clock.ahead_s += 20
    head.history.turn()
    reply = call(
        "viewer", "GET", f"/v1/history/devices?node=rack&step_s=1&since_s={max(0, head.clock.now_s() - span_s)}"
    )
    assert reply.status_code == 200
    # As if every point were known: each value at its longest.
    values = reply.json()["points"] * 3 * 5 * 72
    assert len(reply.content) + values * (len("1234567890123,") - len("null,")) < 1_000_000


def test_the_curves_of_a_job_are_there_after_its_end(head, call):
    job_id = call.submit()
    assert call("viewer", "GET", f"/v1/jobs/{job_id}/history").json()["step"] == []
    steps = [TimedStep(step, 1e9 + step, 0.5, 9.0 if step == 700 else 1.0) for step in range(1000)]
    head.history.add_steps(job_id, steps)
    found = call("viewer", "GET", f"/v1/jobs/{job_id}/history").json()
    assert (found["steps_per_point"], found["step"][-1], len(found["step"])) == (4, 999, 250)
    assert max(found["loss_max"]) == 9.0
    assert set(found["step_s"]) == {0.5}
    assert found["goodput"][-1] is None  # it never held a device
    assert call("viewer", "GET", "/v1/jobs/77/history").status_code == 404


def test_the_state_of_the_history_is_shown(head, call):
    sampled(head)
    head.clock.ahead_s += 100
    head.history.turn()
    status = call("viewer", "GET", "/v1/history").json()
    assert (status["problem"], status["lost"]) == ("", 0)
    assert status["size_bytes"] > 0


def test_metrics_say_whether_history_is_stored(head, call):
    text = call("viewer", "GET", "/metrics").text
    assert "phalanx_history_stored_age_seconds" in text
    assert "phalanx_history_bytes 0.0" in text
    assert "phalanx_history_failing 0.0" in text
