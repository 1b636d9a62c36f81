"""What one step of a service may do, over all mixtures of replicas: pure, so no head and no time is needed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.ids import JobId, ProjectId, QueueId, ServiceId, UserId
from phalanx.core.lifecycle.service import SURGE, Replica, reconcile
from phalanx.core.work.attempt import Attempt, AttemptState
from phalanx.core.work.job import JobState, WaitReasonCode
from phalanx.core.work.service import NO_REVISION, Revision, Service, ServiceState
from phalanx.core.work.service_terms import ReplicaPosition, ServiceTerms
from tests.builders import allocation, job, spec

WEB = ServiceId("web")
HIGHEST = 5


def revision(number, low, high):
    terms = ServiceTerms(replicas_min=low, replicas_max=high, ready_within_s=60.0)
    return Revision(service=WEB, number=number, spec=spec("web", service=terms), by=UserId("ada"), created_s=0.0)


@st.composite
def replica(draw, number):
    """Waiting for devices, failing, starting, running or serving; for a moment or for long."""
    kind = draw(st.sampled_from(["no room", "failing", "starting", "unready", "serving"]))
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
            ready=kind == "serving",
        )
    return Replica(job=one, attempt=attempt, since_s=draw(st.sampled_from([0.0, 20.0, 100.0])))


@st.composite
def situation(draw):
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
        scale=draw(st.one_of(st.none(), st.integers(0, HIGHEST))),
        state=draw(st.sampled_from([one for one in ServiceState if one is not ServiceState.STOPPED])),
        stopped_by=UserId(draw(st.sampled_from(["", "", "", "ada"]))),
    )
    return service, {1: revision(1, low, high), 2: revision(2, low, high)}, found


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
    still = sum(one.serving for one in left)
    if desired:
        assert still >= min(serving, max(1, desired - 1)), "at most one fewer than wanted, and never the last"
    if step.start:
        assert len(left) + step.start <= desired + SURGE
        assert sum(one.revision == step.service.revision for one in left) + step.start <= desired
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
        if step.service == service and not stopped and not step.start:
            break
        service, found = step.service, [one for one in found if one.job.id not in stopped]
        for _ in range(step.start):
            number += 1
            found.append(_served(number, service.revision))
        found = [_served(one.job.seq, one.revision) for one in found]
    else:
        raise AssertionError(f"no rest at {service}")
    if service.stopped_by:
        assert (found, service.state) == ([], ServiceState.STOPPED)
        return
    assert len(found) == service.desired
    assert all(one.revision == service.revision for one in found)
    assert service.state is (ServiceState.READY if service.desired else ServiceState.SLEEPING)


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
