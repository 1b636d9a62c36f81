"""Parked jobs: stopped after a save, without GPUs and in no queue, until somebody resumes them; also after the head was killed."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, union-attr, attr-defined, index"

import pytest

from phalanx.core.errors import Conflict
from phalanx.core.ids import ServiceId, UserId
from phalanx.core.lifecycle import job as requests
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.events import StopRequested
from phalanx.core.lifecycle.transitions import AttemptCase
from phalanx.core.state.events import CancelJob, HoldJob, ParkJob, RequeueJob, UpdateJob
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import facts, job, placed
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

ADA, OP = UserId("ada"), UserId("op")
LONG = JobBehaviour(run_s=1e6)
SLOW_TO_STOP = JobBehaviour(run_s=1e6, ignores_sigterm=True)


def park(cluster, job_id, parked=True):
    return cluster.request(ParkJob(job_id=job_id, parked=parked, by=ADA))


def is_parked(cluster, job_id):
    one = cluster.job(job_id)
    return one.state is JobState.PENDING and one.parked_s is not None


def test_a_parked_job_gives_its_gpus_to_the_next_and_runs_again_once_it_is_resumed():
    cluster = Harness("r: n0=4")
    first = cluster.submit(gpus=4, behaviour=LONG)
    cluster.runs(first)
    second = cluster.submit(gpus=4, behaviour=LONG)
    park(cluster, first)
    cluster.runs(second)
    one = cluster.job(first)
    assert (one.held, one.reason, one.detail) == (True, WaitReasonCode.PARKED, "parked by ada")
    assert cluster.attempts(first)[0].causes == (EndCause.PARKED,)
    assert (one.charged_restarts, one.user_retries) == (0, 0)
    cluster.kill_head()
    cluster.start_head()
    cluster.request(CancelJob(job_id=second, by=ADA))
    cluster.run(60.0)
    assert is_parked(cluster, first), "it does not start by itself"
    assert cluster.head.controller.waits[first].reason is WaitReasonCode.PARKED
    park(cluster, first, parked=False)
    cluster.runs(first)
    assert cluster.job(first).parked_s is None
    assert [kind for kind in cluster.kinds(first) if kind in ("stopping", "requeued", "resumed")] == [
        "stopping",
        "requeued",
        "resumed",
    ]


def test_requests_about_parked_jobs():
    cluster = Harness("r: n0=4")
    busy = cluster.submit(gpus=4, behaviour=LONG)
    waits = cluster.submit(gpus=4, behaviour=LONG)
    cluster.runs(busy)
    since_s = park(cluster, waits).parked_s
    cluster.run(5.0)
    assert park(cluster, waits).parked_s == since_s, "a second request changes nothing"
    cluster.request(UpdateJob(job_id=waits, by=ADA, begin_s=cluster.now.wall_s + 10.0))
    cluster.request(HoldJob(job_id=waits, held=True, by=ADA))
    assert cluster.job(waits).reason is WaitReasonCode.PARKED
    assert cluster.request(HoldJob(job_id=waits, held=False, by=OP)).parked_s is None, "a release resumes it"
    assert park(cluster, waits, parked=False).reason is WaitReasonCode.BEGIN_TIME
    cluster.request(HoldJob(job_id=waits, held=True, by=ADA))
    with pytest.raises(Conflict, match="is held, not parked"):
        park(cluster, waits, parked=False)
    park(cluster, waits)
    cancelled = cluster.request(CancelJob(job_id=waits, by=ADA))
    assert (cancelled.state, cancelled.parked_s) == (JobState.CANCELLED, None)
    for parked in (True, False):
        with pytest.raises(Conflict, match="has ended"):
            park(cluster, waits, parked=parked)


@pytest.mark.parametrize("first", ["park", "requeue"])
def test_the_last_of_several_requests_counts_while_a_job_stops(first):
    cluster = Harness("r: n0=4")
    one = cluster.submit(gpus=4, behaviour=SLOW_TO_STOP)
    cluster.runs(one)
    if first == "requeue":
        cluster.request(RequeueJob(job_id=one, by=OP))
    park(cluster, one)
    assert cluster.live(one).state is AttemptState.STOPPING
    if first == "park":
        park(cluster, one, parked=False)
    cluster.run(60.0)
    assert is_parked(cluster, one) == (first == "requeue")
    assert (cluster.job(one).state is JobState.RUNNING) == (first == "park")


@pytest.mark.parametrize(
    ("cause", "counts"), [(EndCause.PREEMPTED, (1, 0)), (EndCause.MOVED, (0, 1)), (EndCause.DRAINED, (0, 0))]
)
def test_parking_does_not_hide_the_stop_that_it_replaces(cause, counts):
    """Else a job could be preempted more often than the policy allows."""
    asked = transition(placed(job("1", gpus="2x2")), StopRequested(cause=cause, why="for job 2", by=OP), facts())
    for _ in range(2):
        asked = requests.park(AttemptCase(job=asked.job, attempt=asked.attempt), ADA, facts())
        assert asked.attempt.stop_cause is EndCause.PARKED
        assert (asked.job.preemptions, asked.job.moves) == counts


def test_a_replica_is_not_parked():
    replica = job("1", gpus="2x2", replica=ReplicaPosition(service=ServiceId("web"), revision=1))
    with pytest.raises(Conflict, match="a replica of service web"):
        requests.park(placed(replica), "ada", facts())
