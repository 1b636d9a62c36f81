"""The scheduler's rules under the real controller and supervisors, in virtual time: who is stopped saves, waits, and goes on where it was."""

import pytest

from phalanx.core.ids import ProjectId, QueueId, UserId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import CordonNode, PutQueue, SubmitJob
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import queue, spec
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

TRAINING = JobBehaviour(run_s=500.0, saves_on_stop=True)
MINUTE = 60.0


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4", lease_s=6.0)


def submit(cluster, name, *, of="default", behaviour=None, **fields):
    """In a queue of one's choice; how it behaves beside it."""
    if behaviour is not None:
        cluster.behaviours[name] = behaviour
    wanted = spec(name, **fields)
    submission = SubmitJob(
        spec=wanted, user=UserId("ada"), project=ProjectId("gpt"), queue=QueueId(of), body_sha256=name
    )
    return cluster.request(submission).id


def training(cluster, name="train", **fields):
    """It runs, and has done so for longer than the guaranteed run."""
    found = submit(cluster, name, **{"gpus": "2x4", "behaviour": TRAINING, "saves_on_stop": True, **fields})
    cluster.runs(found)
    cluster.run(2 * MINUTE)
    return found


def resumed_at(cluster, job_id):
    """The step its live attempt began with."""
    found = cluster.live(job_id).resume_from
    assert found is not None
    return found.step


def urgent(cluster, **fields):
    return submit(cluster, "urgent", **{"gpus": "2x4", "priority": 10, "behaviour": JobBehaviour(run_s=30.0), **fields})


# ---- stop, save, requeue, resume ------------------------------------------------------------------------------------


def test_an_urgent_gang_stops_a_training_job_which_saves_waits_and_goes_on_where_it_was(cluster):
    train = training(cluster)
    first = urgent(cluster)
    assert cluster.until(cluster.attempt_is(first, AttemptState.RUNNING)) < 5.0
    stopped = cluster.job(train)
    assert (stopped.state, stopped.reason, stopped.preemptions) == (JobState.PENDING, WaitReasonCode.PREEMPTED, 1)
    assert stopped.detail == f"preempted by job {first}, which has a higher priority"
    assert cluster.ends(first).state is JobState.SUCCEEDED
    cluster.runs(train)
    resumed = cluster.live(train)
    assert resumed.resume_from is not None
    assert 119 <= resumed.resume_from.step <= 121, "what it saved when it was asked to stop"
    begun_s = cluster.boot_s
    assert cluster.ends(train, 600.0).state is JobState.SUCCEEDED
    assert cluster.boot_s - begun_s < 385.0, "the rest of its 500 s and no more"
    assert cluster.attempts(train)[0].stop_cause is EndCause.PREEMPTED


def test_the_job_that_waits_for_its_room_says_so(cluster):
    train = training(cluster, behaviour=JobBehaviour(run_s=500.0, ignores_sigterm=True), grace_s=20.0)
    first = urgent(cluster)
    cluster.run(1.0)
    wait = cluster.head.controller.waits[first]
    assert wait.reason is WaitReasonCode.CLAIMED
    assert wait.detail == "waits for running jobs on n0, n1 to save and stop"
    assert train not in cluster.head.controller.waits
    assert set(cluster.head.controller.waits) == {first}


def test_who_does_not_heed_the_stop_is_ended_after_its_grace(cluster):
    training(cluster, behaviour=JobBehaviour(run_s=500.0, ignores_sigterm=True), grace_s=20.0)
    first = urgent(cluster)
    assert 20.0 <= cluster.until(cluster.attempt_is(first, AttemptState.RUNNING)) < 30.0


def test_a_stop_from_the_last_checkpoint_when_the_job_does_not_save_by_itself(cluster):
    train = training(cluster, behaviour=JobBehaviour(run_s=500.0, save_every_s=50.0), saves_on_stop=False)
    first = urgent(cluster)
    cluster.ends(first)
    cluster.runs(train)
    assert resumed_at(cluster, train) == 100


def test_a_job_within_its_guaranteed_run_is_stopped_only_after_it(cluster):
    train = submit(cluster, "train", gpus="2x4", behaviour=TRAINING, saves_on_stop=True)
    cluster.runs(train)
    first = urgent(cluster)
    waited_s = cluster.until(cluster.attempt_is(first, AttemptState.RUNNING), 300.0)
    assert 50.0 < waited_s < 125.0, "a minute of its own, and the round after it"


def test_nobody_is_stopped_for_a_job_that_was_cancelled_meanwhile(cluster):
    train = training(cluster, behaviour=JobBehaviour(run_s=500.0, ignores_sigterm=True), grace_s=20.0)
    first = urgent(cluster)
    cluster.run(1.0)
    cluster.cancel(first)
    cluster.runs(train)
    assert cluster.job(train).preemptions == 1
    assert cluster.ends(train, 700.0).state is JobState.SUCCEEDED


# ---- faults in the middle of it -------------------------------------------------------------------------------------


def test_a_head_that_restarts_while_room_is_cleared_stops_nobody_else(cluster):
    """Two that may be stopped, room for one needed: the one that leaves already is the one the new head counts on."""
    slow = JobBehaviour(run_s=900.0, ignores_sigterm=True)
    pair = [training(cluster, f"t{number}", gpus=4, behaviour=slow, grace_s=40.0) for number in range(2)]
    first = urgent(cluster, gpus=4)
    cluster.run(1.0)
    assert sum(cluster.live(one).state is AttemptState.STOPPING for one in pair) == 1
    cluster.kill_head()
    cluster.run(1.0)
    cluster.start_head()
    cluster.until(cluster.attempt_is(first, AttemptState.RUNNING), 120.0)
    assert sorted(cluster.job(one).preemptions for one in pair) == [0, 1]


def test_a_node_that_dies_while_room_is_cleared_leaves_nobody_stuck():
    cluster = Harness("r: n0=4 n1=4 n2=4")
    slow = JobBehaviour(run_s=900.0, ignores_sigterm=True)
    for number in range(3):
        training(cluster, f"t{number}", gpus=4, behaviour=slow, grace_s=40.0)
    first = urgent(cluster, gpus=4)
    cluster.run(1.0)
    claimed = next(
        attempt.allocation.grants[0].node_id
        for attempt in cluster.world.attempts.values()
        if attempt.state is AttemptState.STOPPING
    )
    cluster.kill_node(claimed)
    cluster.until(cluster.attempt_is(first, AttemptState.RUNNING), 200.0)
    assert cluster.live(first).allocation.grants[0].node_id != claimed


def test_a_drained_nodes_gang_gets_its_place_back_before_a_newcomer():
    """A gang on two of three nodes loses one; the other would do for the newcomer, and is kept until the third is free too."""
    cluster = Harness("r: n0=4 n1=4 n2=4")
    gang = training(cluster)
    cluster.runs(submit(cluster, "filler", gpus=4, behaviour=JobBehaviour(run_s=200.0)))
    newcomer = submit(cluster, "new", gpus=4, behaviour=JobBehaviour(run_s=1000.0))
    drained = cluster.live(gang).allocation.grants[0].node_id
    cluster.request(CordonNode(node_id=drained, by=UserId("op"), why="disk", drain=True))
    cluster.until(lambda: cluster.job(gang).state is JobState.PENDING)
    assert cluster.job(gang).reason is WaitReasonCode.DRAINED
    cluster.until(cluster.attempt_is(gang, AttemptState.RUNNING), 400.0)
    assert cluster.job(newcomer).state is JobState.PENDING
    assert 119 <= resumed_at(cluster, gang) <= 125


# ---- moves, queues, policies ----------------------------------------------------------------------------------------


def test_a_small_job_moves_into_a_hole_and_goes_on():
    cluster = Harness("r: n0=4 n1=4")
    three = submit(
        cluster, "three", gpus=3, behaviour=JobBehaviour(run_s=2000.0, saves_on_stop=True), saves_on_stop=True
    )
    brief = submit(
        cluster, "brief", gpus=1, behaviour=JobBehaviour(run_s=6.0)
    )  # beside the three, so that the next goes elsewhere
    one = submit(cluster, "one", gpus=1, behaviour=JobBehaviour(run_s=2000.0, saves_on_stop=True), saves_on_stop=True)
    cluster.ends(brief)
    cluster.run(6 * MINUTE)
    assert cluster.live(three).allocation.grants[0].node_id != cluster.live(one).allocation.grants[0].node_id
    whole = submit(cluster, "whole", gpus=4, behaviour=JobBehaviour(run_s=20.0))
    cluster.ends(whole)
    moved = cluster.job(one)
    assert (moved.moves, moved.preemptions) == (1, 0)
    cluster.runs(one)
    assert cluster.live(one).allocation.grants[0].node_id == cluster.live(three).allocation.grants[0].node_id
    assert resumed_at(cluster, one) > 300
    assert cluster.attempts(one)[0].stop_cause is EndCause.MOVED


def test_a_queue_borrows_and_gives_back(cluster):
    for name in ("own", "loan"):
        cluster.request(PutQueue(queue=queue(name, quota_gpus=4)))
    loans = [training(cluster, f"l{number}", of="loan", gpus=4) for number in range(2)]
    mine = submit(cluster, "mine", of="own", gpus=4, behaviour=JobBehaviour(run_s=30.0))
    cluster.runs(mine)
    assert sorted(cluster.job(one).preemptions for one in loans) == [0, 1]
    back = next(one for one in loans if cluster.job(one).preemptions)
    assert cluster.job(back).detail == f"preempted by job {mine}, whose queue reclaims the GPUs it had lent"
    cluster.ends(mine)
    cluster.runs(back)
    assert resumed_at(cluster, back) >= 119


@pytest.mark.parametrize("name", ["default", "throughput", "fifo", "skip", "backfill", "sjf", "las", "srtf", "fair"])
def test_every_policy_finishes_live_what_it_is_given(name):
    """Clocks here never stand at a round exactly, nor did the head know these jobs before."""
    cluster = Harness("r: n0=4 n1=4", policy=PolicySettings(name=name))
    ids = [
        submit(cluster, f"j{number}", gpus=gpus, time_limit_s=3000.0, behaviour=JobBehaviour(run_s=40.0))
        for number, gpus in enumerate((4, 2, 8, 1, 3, 6))
    ]
    cluster.run(20.0)
    cluster.kill_head()
    cluster.run(0.5)
    cluster.start_head()
    assert all(cluster.ends(one, 900.0).state is JobState.SUCCEEDED for one in ids)
