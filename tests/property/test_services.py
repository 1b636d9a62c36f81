"""What one step of a service may do, over all mixtures of replicas: pure, so no head and no time is needed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.ids import JobId, ProjectId, QueueId, ServiceId, UserId
from phalanx.core.lifecycle.service import ROOM_WAIT_S, SURGE, Replica, ReplicaCondition, reconcile
from phalanx.core.work.attempt import Attempt, Sleep, SleepPhase
from phalanx.core.work.services.service import NO_REVISION, Revision, Service, ServiceState
from phalanx.core.work.services.service_terms import ReplicaPosition, ServiceTerms
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import allocation, job, spec

WEB = ServiceId("web")
HIGHEST = 5


def _sleep(phase):
    gave_back = phase in (SleepPhase.ASLEEP, SleepPhase.WAITING)
    return Sleep(phase=phase, devices=((0,),) if gave_back else (), since_s=1.0)


def revision(number, low, high, hooks):
    terms = ServiceTerms(
        replicas_min=low,
        replicas_max=high,
        ready_within_s=60.0,
        sleep="/sleep" if hooks else "",
        wake="/wake" if hooks else "",
    )
    return Revision(service=WEB, number=number, spec=spec("web", service=terms), by=UserId("ada"), created_s=0.0)


@st.composite
def replica(draw, number):
    """Waiting for devices, failing, starting, running, serving or somewhere between sleep and wakefulness; for a moment or for long."""
    kind = draw(st.sampled_from(["no room", "failing", "starting", "unready", "serving", "serving", *SleepPhase]))
    phase = SleepPhase(kind) if kind in list(SleepPhase) else None
    one = job(
        str(number),
        seq=number,
        state=JobState.PENDING if kind in ("no room", "failing") else JobState.RUNNING,
        reason=WaitReasonCode.CRASH if kind == "failing" else WaitReasonCode.RESOURCES,
        charged_restarts=draw(st.integers(0, 4)) if kind == "failing" else 0,
        replica=ReplicaPosition(service=WEB, revision=draw(st.integers(1, 2))),
    )
    attempt = None
    if one.state is JobState.RUNNING:
        attempt = Attempt(
            job_id=JobId(str(number)),
            epoch=1,  # type: ignore[arg-type]
            folder="f",
            allocation=allocation("n0:0"),
            placed_s=0.0,
            state=AttemptState.STARTING if kind == "starting" else AttemptState.RUNNING,
            ready=kind == "serving" or phase is not None,
            sleep=None if phase is None else _sleep(phase),
            sleep_refusal=draw(st.sampled_from(["", "", "no"])),
        )
    return Replica(job=one, attempt=attempt, since_s=draw(st.sampled_from([0.0, 20.0, 100.0])))


@st.composite
def situation(draw):
    hooks = draw(st.booleans())
    low = draw(st.integers(0, HIGHEST))
    high = draw(st.integers(max(1, low), HIGHEST))
    found = [draw(replica(number)) for number in range(draw(st.integers(0, 7)))]
    current = draw(st.integers(1, 2))
    service = Service(
        id=WEB,
        user=UserId("ada"),
        project=ProjectId("gpt"),
        queue=QueueId("default"),
        created_s=0.0,
        revision=current,
        last_revision=2,
        served_revision=draw(st.sampled_from([NO_REVISION, 1, 2])),
        asleep=draw(st.integers(0, HIGHEST)),
        scale=draw(st.one_of(st.none(), st.integers(0, HIGHEST))),
        state=draw(st.sampled_from([one for one in ServiceState if one is not ServiceState.STOPPED])),
        stopped_by=UserId(draw(st.sampled_from(["", "", "", "ada"]))),
    )
    return service, {1: revision(1, low, high, hooks), 2: revision(2, low, high, hooks)}, found


@given(situation())
def test_a_step_keeps_what_serves_and_starts_no_more_than_it_may(drawn):
    service, revisions, found = drawn
    step = reconcile(service, revisions, found, 1000.0)
    stopped = {job_id for job_id, _ in step.stop}
    left = [one for one in found if one.job.id not in stopped]
    assert stopped <= {one.job.id for one in found}
    assert len(stopped) == len(step.stop), "each once"
    if service.stopped_by:
        assert not left
        assert step.start == 0
        return
    desired, serving = step.service.desired, sum(one.serving for one in found)
    awake = desired - _asleep_wanted(step.service, revisions)
    still = sum(one.serving and one.job.id not in step.sleep for one in left)
    if awake:
        assert still >= min(serving, max(1, awake - 1)), "at most one fewer than wanted, and never the last"
    current = [one for one in left if one.revision == step.service.revision]
    stuck = sum(one.condition is ReplicaCondition.WAITING and one.since_s >= ROOM_WAIT_S for one in current)
    if step.start:
        assert len(left) + step.start <= desired + stuck + SURGE
        assert len(current) + step.start <= desired + stuck
    assert {*step.sleep, *step.wake} <= {one.job.id for one in current}, "the others end soon"
    assert not (step.sleep and step.wake)
    if step.sleep:
        assert sum(one.condition is ReplicaCondition.ASLEEP for one in current) + len(step.sleep) <= desired - awake
    assert step.due_in_s > 0.0, "no step without a wait in between"
    assert step.service.revision in (service.revision, service.served_revision)


@given(situation())
def test_repeated_steps_end_at_the_wanted_replicas_of_one_revision(drawn):
    """Where each new replica becomes ready and each stopped one is gone before the next step."""
    service, revisions, found = drawn
    number = 100
    for _ in range(4 * HIGHEST + 8):
        step = reconcile(service, revisions, found, 1000.0)
        stopped = {job_id for job_id, _ in step.stop}
        if step.service == service and not stopped and not step.start and not step.sleep and not step.wake:
            break
        service, found = step.service, [one for one in found if one.job.id not in stopped]
        for _ in range(step.start):
            number += 1
            found.append(_served(number, service.revision))
        found = [_after(one, step) for one in found]
    else:
        raise AssertionError(f"no rest at {service}")
    if service.stopped_by:
        assert (found, service.state) == ([], ServiceState.STOPPED)
        return
    assert len(found) == service.desired
    assert all(one.revision == service.revision for one in found)
    asleep = _asleep_wanted(service, revisions)
    assert sum(one.condition is ReplicaCondition.ASLEEP for one in found) == asleep
    assert service.state is (ServiceState.READY if service.desired > asleep else ServiceState.SLEEPING)


def _asleep_wanted(service, revisions):
    return min(service.asleep, service.desired) if revisions[service.revision].terms.sleep else 0


def _after(one, step):
    """It does what it was asked, and is ready or sleeps."""
    fresh = _served(one.job.seq, one.revision)
    falls = one.job.id in step.sleep or (one.condition is ReplicaCondition.ASLEEP and one.job.id not in step.wake)
    return replace(fresh, attempt=replace(fresh.attempt, sleep=_sleep(SleepPhase.ASLEEP))) if falls else fresh


def _served(number, revision):
    one = job(str(number), seq=number, state=JobState.RUNNING, replica=ReplicaPosition(service=WEB, revision=revision))
    attempt = Attempt(
        job_id=one.id,
        epoch=1,  # type: ignore[arg-type]
        folder="f",
        allocation=allocation("n0:0"),
        placed_s=0.0,
        state=AttemptState.RUNNING,
    )
    return Replica(job=one, attempt=replace(attempt, ready=True))
