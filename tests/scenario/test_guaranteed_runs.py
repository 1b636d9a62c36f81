"""When a running job makes way, under the real controller in virtual time: as soon as its guaranteed run is over, not a round later."""

from typing import Any

import pytest

from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, UserId
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import CordonNode, PutQueues, PutReservation
from phalanx.core.work.queue import Queue
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState
from tests.builders import PLAIN
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

SAVING = JobBehaviour(run_s=3000.0, save_every_s=5.0)
LOOK_S = 2.5  # shields that ended are looked at once a second; stopping and starting take the rest


def made(fleet: str, **knobs: Any) -> Harness:
    """A cluster whose rounds are so far apart that nothing can wait for one."""
    return Harness(fleet, policy=PolicySettings(parameters=PolicyParameters(round_s=6000.0, **knobs)))


def ran_s(cluster: Harness, job: str, epoch: int = 1) -> float:
    attempt = cluster.attempts(JobId(job))[epoch - 1]
    return (attempt.ended_s or cluster.now.wall_s) - attempt.placed_s


def test_higher_priority_waits_for_the_guaranteed_run_and_no_longer():
    cluster = made("r: n0=4", run_min_by_right_s=60.0)
    low = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.run(5.0)
    high = cluster.submit(gpus="4", priority=1, behaviour=SAVING)
    cluster.runs(high)
    assert 60.0 <= ran_s(cluster, low) <= 60.0 + LOOK_S
    assert f"preempted by job {high}, which has a higher priority" in cluster.event_lines(low)


def test_owner_waits_for_the_guaranteed_run_of_the_borrower_and_no_longer():
    cluster = made("r: n0=4", run_min_by_right_s=20.0)
    cluster.request(PutQueues(queues=(PLAIN, Queue(id=QueueId("prod"), quota_gpus=4))))
    borrower = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.run(3.0)
    owner = cluster.submit(gpus="3", queue="prod", behaviour=SAVING)
    cluster.runs(owner)
    assert 20.0 <= ran_s(cluster, borrower) <= 20.0 + LOOK_S
    assert f"preempted by job {owner}, whose queue reclaims the GPUs it had lent" in cluster.event_lines(borrower)


def test_borrower_of_lower_priority_past_its_stops_is_told_that_a_loan_is_called_in():
    cluster = made("r: n0=4", run_min_by_right_s=1.0, stops_max=0)
    cluster.request(PutQueues(queues=(PLAIN, Queue(id=QueueId("prod"), quota_gpus=4, priority=9))))
    borrower = cluster.submit(gpus="4", behaviour=SAVING)
    owner = cluster.submit(gpus="4", queue="prod", behaviour=SAVING)
    cluster.runs(owner)
    assert "whose queue reclaims the GPUs it had lent" in cluster.event_lines(borrower)
    assert "higher priority" not in cluster.event_lines(borrower)


def test_gang_of_a_drained_node_takes_its_place_from_a_smaller_job_before_a_newcomer_comes():
    cluster = made("r: n0=4 n1=4 n2=4", run_min_by_right_s=1.0)
    gang = cluster.submit(gpus="2x4", behaviour=SAVING)
    holder = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.run(5.0)
    newcomer = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.request(CordonNode(node_id=NodeId("n0"), by=UserId("op"), why="fan", drain=True))
    cluster.until(lambda: len(cluster.attempts(gang)) == 2, limit_s=10.0)
    cluster.runs(gang)
    assert f"preempted by job {gang}, which lost a node and gets its place back" in cluster.event_lines(holder)
    assert cluster.job(newcomer).state is JobState.PENDING


def test_elastic_job_shrinks_and_grows_when_its_least_stay_is_over():
    cluster = made("r: n0=4 n1=4 n2=4", run_min_by_right_s=1.0, move_min_s=30.0, grow_min_s=40.0)
    elastic = cluster.submit(gpus="1..3x4", behaviour=SAVING)
    cluster.run(6.0)
    other = cluster.submit(gpus="4", behaviour=JobBehaviour(run_s=8.0))
    cluster.until(lambda: len(cluster.attempts(elastic)) == 3)
    widths = [len(attempt.allocation.grants) for attempt in cluster.attempts(elastic)]
    assert widths == [3, 2, 3]
    assert cluster.job(other).state is JobState.SUCCEEDED
    assert ran_s(cluster, elastic, 1) == pytest.approx(30.0, abs=LOOK_S)
    assert ran_s(cluster, elastic, 2) == pytest.approx(40.0, abs=LOOK_S)


def test_head_that_found_the_clock_set_back_does_not_shield_for_as_long():
    cluster = made("r: n0=4", run_min_by_right_s=10.0)
    low = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.run(20.0)
    cluster.kill_head()
    cluster.jump_clock(-86400.0)
    cluster.start_head()
    high = cluster.submit(gpus="4", priority=1, behaviour=SAVING)
    cluster.until(lambda: high in cluster.world.attempts, limit_s=10.0 + LOOK_S)
    assert f"preempted by job {high}" in cluster.event_lines(low)


def test_clock_set_forward_as_the_board_is_made_anew_takes_no_guaranteed_run_away():
    """A reservation makes the board anew in the step after the clock was set; what runs has run no longer for it."""
    cluster = made("r: n0=4", run_min_by_right_s=60.0)
    low = cluster.submit(gpus="4", behaviour=SAVING)
    cluster.run(5.0)
    cluster.jump_clock(86400.0)
    soon_s = cluster.now.wall_s + 90_000.0
    window = Reservation(
        id=ReservationId("fans"), nodes=(NodeId("n0"),), start_s=soon_s, end_s=soon_s + 60.0, users=frozenset()
    )
    cluster.request(PutReservation(reservation=window))
    high = cluster.submit(gpus="4", priority=1, behaviour=SAVING)
    cluster.run(20.0)
    assert cluster.job(high).state is JobState.PENDING
    assert "preempted" not in cluster.event_lines(low)
