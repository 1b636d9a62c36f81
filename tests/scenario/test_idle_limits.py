"""The idle limit of a job, in virtual time: warned, parked without its GPUs and resumed; and what counts as work."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, union-attr, attr-defined, index"

import pytest

from phalanx.controller.idle_jobs import ENDED, IDLE_POLICY, NOTIFY_FACT, WARNING
from phalanx.core.ids import UserId
from phalanx.core.state.events import ParkJob
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import JobState
from phalanx.core.work.usage.waste_terms import IdleAction
from tests.scenario.test_waste import BUSY, LONG, Watched

ADA = UserId("ada")


def idle_job(one, idle_s, gpus=2):
    job = one.cluster.submit(gpus=gpus, behaviour=LONG, idle_s=idle_s, preemptible=False)
    one.cluster.runs(job)
    one.run(60.0)
    one.use[job] = 0.0
    return job


def parked(one, job):
    return one.cluster.job(job).parked_s is not None


def test_a_job_that_nobody_uses_is_warned_parked_and_resumed():
    one = Watched("r: n0=2")
    idle = idle_job(one, 3600.0)
    waits = one.cluster.submit(gpus=2, behaviour=LONG)
    one.run(2900.0)
    assert one.lines(idle, WARNING) == []
    one.run(180.0)
    (warning,) = one.lines(idle, WARNING)
    assert warning.text.startswith("no GPU work, no CPU above noise and no input for 50m")
    assert warning.text.endswith("m59s it is parked: its GPUs are taken back until it is resumed")
    assert (warning.facts[NOTIFY_FACT], warning.by) == ("owner", IDLE_POLICY)
    assert one.cluster.job(idle).state is JobState.RUNNING
    one.run(620.0)
    assert parked(one, idle)
    assert one.cluster.job(idle).detail.startswith("no GPU work, no CPU above noise and no input for 59m59s")
    assert one.cluster.attempts(idle)[0].causes == (EndCause.PARKED,)
    one.cluster.runs(waits)
    assert [(call.user, call.detail.split(":")[0]) for call in one.audits] == [(IDLE_POLICY, "park")]
    one.cluster.cancel(waits)
    one.cluster.request(ParkJob(job_id=idle, parked=False, by=ADA))
    one.cluster.runs(idle)


@pytest.mark.parametrize("what", ["GPU", "CPU", "input", "no samples"])
def test_work_input_and_missing_samples_keep_a_job(what):
    one = Watched("r: n0=2")
    job = idle_job(one, 600.0)
    for _ in range(30):
        one.run(60.0)
        match what:
            case "GPU":
                one.use[job] = BUSY
            case "CPU":
                one.cpus[job] = 0.5
            case "input":
                one.hosts.add_input(job, one.now_ms)
            case _:
                one.unsampled.add(job)
    assert one.cluster.job(job).state is JobState.RUNNING
    assert one.lines(job, WARNING) == []


def test_a_key_after_the_warning_withdraws_it_and_begins_the_time_again():
    one = Watched("r: n0=2")
    job = idle_job(one, 600.0)
    one.run(420.0)
    assert len(one.lines(job, WARNING)) == 1
    one.hosts.add_input(job, one.now_ms)
    one.run(60.0)
    (line,) = one.lines(job, ENDED)
    assert line.text.endswith("the warning of the idle limit is withdrawn")
    one.run(180.0)
    assert one.cluster.job(job).state is JobState.RUNNING
    one.run(420.0)
    assert parked(one, job)
    assert len(one.lines(job, WARNING)) == 2


def test_a_job_without_gpus_is_parked_too_and_noise_is_no_work():
    one = Watched("r: n0=2")
    job = idle_job(one, 600.0, gpus=0)
    one.cpus[job] = 0.05
    one.run(720.0)
    assert parked(one, job)


def test_the_policy_of_the_queue_holds_beside_the_limit():
    one = Watched("r: n0=2", action=IdleAction.RELEASE, after_s=200.0, grace_s=60.0)
    job = idle_job(one, 3600.0)
    one.hosts.add_input(job, one.now_ms)
    one.run(300.0)
    assert one.cluster.job(job).held
    assert not parked(one, job)
