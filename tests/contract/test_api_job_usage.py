"""The usage of one job over HTTP: what its supervisor measured, its hours by state, and advice that a restart of the head keeps."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.wire.supervisor import DeviceSample, JobSample, SamplesRequest
from tests.contract.api_head import ApiHead, Supervisor

GIB = 1 << 30
BODY = {"run": ["true"], "gpus": 2, "cpus": 2, "memory": "8GiB", "time": "4h", "workdir": "/w"}


@pytest.fixture
def job(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call("user", "POST", "/v1/jobs", BODY).json()["job"]["id"]
    supervisor.run(job_id)
    return supervisor, job_id


def sample(head, supervisor, job_id, *utilizations, minutes, memory=GIB, every_s=60.0):
    """Samples of its devices for so many minutes of the head's time."""
    for number in range(int(minutes * 60 / every_s)):
        head.clock.ahead_s += every_s
        devices = [
            DeviceSample(
                index=index,
                uuid=f"G{index}",
                counter="nvml_gpu",
                utilization=each,
                memory_used_bytes=2 * GIB,
                memory_total_bytes=80 * GIB,
                job_id=job_id,
                processes=1,
            )
            for index, each in enumerate(utilizations)
        ]
        used = JobSample(job_id=job_id, epoch=1, generation=0, cpu_s=(number + 1) * every_s, memory_peak_bytes=memory)
        request = SamplesRequest(
            supervisor_id=supervisor.id,
            node_id=supervisor.node_id,
            at_s=head.clock.now_s(),
            devices=devices,
            jobs=[used],
            every_s=every_s,
        )
        assert supervisor.post("samples", request).status_code == 204


def usage(call, job_id, role="viewer"):
    reply = call(role, "GET", f"/v1/jobs/{job_id}/usage")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_usage_of_a_job_has_what_was_measured_beside_what_it_asked_for(head, call, job):
    supervisor, job_id = job
    sample(head, supervisor, job_id, 0.5, 0.0, minutes=15)
    found = usage(call, job_id)
    assert (found["gpus"], found["cpus"], found["memory_bytes"], found["time_limit_s"]) == ("2", 2, 8 * GIB, 14_400)
    assert found["gpu_hours"] == pytest.approx(sum(found["by_state"].values())) == pytest.approx(0.5, rel=0.02)
    assert found["by_state"]["computing"] == pytest.approx(0.25, rel=0.1)
    measured = found["measured"]
    assert [device["mean"] for device in measured["devices"]] == [0.0, pytest.approx(0.5)], "the least used first"
    assert measured["devices"][1]["memory_peak_bytes"] == 2 * GIB
    (node,) = measured["nodes"]
    assert (node["memory_peak_bytes"], node["busy_cpus"]) == (GIB, pytest.approx(1.0, rel=0.05))
    assert found["summary"]["measured_by"] == "attempts"
    assert {one["check"]: one["settings"] for one in found["advice"]} == {"unused_gpus": [["gpus", "1"]]}
    assert found["advice"][0]["gpu_hours"] == pytest.approx(0.25, rel=0.02)
    assert found["no_advice"] == ""


def test_a_short_run_is_not_judged_and_says_why(head, call, job):
    supervisor, job_id = job
    sample(head, supervisor, job_id, 0.0, 0.0, minutes=9)
    found = usage(call, job_id)
    assert found["advice"] == []
    assert found["no_advice"].endswith("less than 10m00s says too little")
    waits = call("user", "POST", "/v1/jobs", {**BODY, "hold": True}).json()["job"]["id"]
    assert usage(call, waits)["no_advice"] == "it has not run"


def test_without_samples_nothing_is_taken_for_zero(head, call, job):
    _, job_id = job
    head.clock.ahead_s += 1200.0
    found = usage(call, job_id)
    assert (found["measured"], found["advice"], found["energy_kwh"]) == (None, [], None)


def test_samples_of_less_than_half_of_the_run_say_nothing(head, call, job):
    supervisor, job_id = job
    sample(head, supervisor, job_id, 0.0, 0.0, minutes=6)
    head.clock.ahead_s += 600.0
    found = usage(call, job_id)
    assert found["measured"]["mean"] is None
    assert found["advice"] == []


def test_advice_outlives_the_head_that_measured(tmp_path):
    first = ApiHead(str(tmp_path))
    with first.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call("user", "POST", "/v1/jobs", BODY).json()["job"]["id"]
        supervisor.run(job_id)
        first.usage.start(first.driver.report)
        sample(first, supervisor, job_id, 0.06, 0.0, minutes=20)
        before = usage(call, job_id)
        first.usage.stop()
    first.close()
    second = ApiHead(str(tmp_path), store=first.store, head_id="head-2")
    with second.calling() as call:
        second.clock.ahead_s = first.clock.ahead_s
        after = usage(call, job_id)
    second.close()
    assert (
        [one["settings"] for one in before["advice"]]
        == [[["gpus", "1"]]]
        == [one["settings"] for one in after["advice"]]
    )
    assert after["measured"]["devices"] == before["measured"]["devices"]


def test_the_page_of_a_job_names_its_advice(head, call, job):
    supervisor, job_id = job
    assert "<h2>Advice</h2>" not in call("viewer", "GET", f"/jobs/{job_id}").text
    sample(head, supervisor, job_id, 0.5, 0.0, minutes=15)
    assert "<code>--gpus 1</code>" in call("viewer", "GET", f"/jobs/{job_id}").text
