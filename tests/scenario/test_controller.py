"""The life of jobs under the real controller and supervisors, in virtual time, and what users may ask meanwhile."""

import heapq
from dataclasses import replace
from typing import Any

import pytest

from phalanx.controller import controller as controller_module
from phalanx.core.errors import Conflict, NeverFits, NotFound, NotPermitted
from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, SupervisorId, TokenId, UserId
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.commands import (
    CleanUpAttempt,
    DeleteCheckpoints,
    PrepareTasks,
    StartTasks,
)
from phalanx.core.state.events import (
    CancelAllJobs,
    CancelJob,
    CordonNode,
    HoldJob,
    PreparePlannedStop,
    PutProject,
    PutQueue,
    PutToken,
    PutUser,
    RemoveNode,
    RequeueJob,
    RevokeToken,
    SubmitJob,
    UncordonNode,
    UpdateJob,
)
from phalanx.core.state.records import IDEMPOTENCY
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.core.work.users import Token, User, UserRole
from tests.builders import T, make_fleet, spec
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

ADA, OP = UserId("ada"), UserId("op")
LONG = JobBehaviour(run_s=1000.0)
SAVING = JobBehaviour(run_s=60.0, save_every_s=2.0)


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4 n2=4")


def drain(cluster, name, *, drain=True):
    return cluster.request(CordonNode(node_id=NodeId(name), by=OP, why="disk", drain=drain))


# ---- a life ---------------------------------------------------------------------------------------------------------


def test_life_of_a_job_told_line_by_line(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=5.0, save_every_s=2.0))
    ended = cluster.ends(job)
    assert cluster.kinds(job) == ["submitted", "placed", "starting", "running", "checkpoint", "checkpoint", "succeeded"]
    assert (ended.state, ended.exit_code, ended.epoch) == (JobState.SUCCEEDED, 0, 1)
    (attempt,) = cluster.attempts(job)
    assert attempt.placed_s < attempt.running_s < attempt.ended_s
    assert attempt.causes == (EndCause.SUCCEEDED,)
    assert cluster.world.attempts == {}
    cluster.run(1.0)
    assert all(not node.logic.members() for node in cluster.nodes.values()), "scratch folders are gone"


def test_history_has_no_gap_over_all_jobs_and_nodes(cluster):
    for _ in range(4):
        cluster.submit(gpus=4)
    cluster.run(30.0)
    assert [line.seq for line in cluster.store.history()] == list(range(1, len(cluster.store.history()) + 1))


def test_ranks_start_everywhere_or_nowhere(cluster):
    cluster.behaviours["slow"] = JobBehaviour(prepare_s=3.0)
    cluster.nodes[NodeId("n1")].latency_s = 1.0
    job = cluster.submit(spec("slow", gpus="2x4"))
    for _ in cluster.events(lambda: cluster.job(job).started_s is None):
        assert sum(isinstance(command, StartTasks) for command in cluster.commands) in (0, 2)


def test_waiting_job_starts_when_room_is_freed(cluster):
    first = cluster.submit(gpus=12)
    second = cluster.submit(gpus=12)
    assert cluster.head.controller.waits[second].reason is WaitReasonCode.RESOURCES
    cluster.ends(first)
    cluster.run(0.5)
    assert cluster.job(second).state is JobState.RUNNING
    assert second not in cluster.head.controller.waits


def test_jobs_beyond_one_cycles_share_start_in_the_next():
    cluster = Harness("r: n0=8", policy=PolicySettings(placements_max=2))
    jobs = [cluster.submit(gpus=1) for _ in range(6)]
    cluster.run(0.5)
    assert [cluster.job(job).state for job in jobs] == [JobState.RUNNING] * 6


def test_gpu_seconds_billed_are_what_was_held(cluster):
    """18: the sum of attempt spans is the time in which devices were held."""
    held_s, held, last_s = 0.0, 0, cluster.boot_s
    job = cluster.submit(gpus="2x4", behaviour=SAVING)
    cluster.call_after(7.0, lambda: cluster.kill_node("n1"))
    for _ in cluster.events(lambda: bool(cluster.world.attempts) or cluster.job(job).state is JobState.PENDING):
        held_s += held * (cluster.boot_s - last_s)
        held, last_s = sum(len(usage.devices) for usage in cluster.world.usage.values()), cluster.boot_s
    held_s += held * (cluster.boot_s - last_s)
    spans_s = [(one.ended_s - one.placed_s) * one.allocation.gpus for one in cluster.attempts(job)]
    assert len(spans_s) == 2
    assert sum(spans_s) == pytest.approx(held_s, abs=0.01)


# ---- submit ---------------------------------------------------------------------------------------------------------


def test_same_key_and_body_give_the_same_job(cluster):
    first = cluster.submit(spec("a"), key="k1")
    assert cluster.submit(spec("a"), key="k1") == first
    assert cluster.submit(spec("a"), key="k2") != first
    assert cluster.submit(spec("a")) != cluster.submit(spec("a")), "without a key each is new"
    with pytest.raises(Conflict, match="was used for another job"):
        cluster.submit(spec("b"), key="k1")


def test_same_key_holds_within_one_step_and_over_a_restart(cluster):
    event = SubmitJob(
        spec=spec("a"), user=ADA, project=ProjectId("gpt"), queue=QueueId("default"), key="k", body_sha256="x"
    )
    one, two = cluster.turn([event, event])
    assert one.id == two.id
    cluster.kill_head()
    cluster.start_head()
    assert cluster.request(event).id == one.id


def test_numbers_of_the_components_of_a_job_are_given_to_no_other_job(cluster):
    role = spec("a", gpus="1x1").role
    several = replace(spec("a"), role=replace(role, others=(role, role)))
    event = SubmitJob(spec=several, user=ADA, project=ProjectId("gpt"), queue=QueueId("default"))
    first = int(cluster.request(event).id)
    assert int(cluster.submit()) == first + 3
    second = int(cluster.request(event).id)
    cluster.kill_head()
    cluster.start_head()
    assert int(cluster.submit()) == second + 3


def test_key_of_one_user_is_not_anothers(cluster):
    event = SubmitJob(spec=spec("a"), user=ADA, project=ProjectId("gpt"), queue=QueueId("default"), key="k")
    other = SubmitJob(spec=spec("a"), user=OP, project=ProjectId("gpt"), queue=QueueId("default"), key="k")
    assert cluster.request(event).id != cluster.request(other).id


def test_what_cannot_be_submitted_makes_nothing(cluster):
    seq, lines = cluster.world.next_job_seq, len(cluster.store.history())
    cluster.request(PutProject(project=Project(id=ProjectId("closed"), members=frozenset({UserId("bob")}))))
    good: dict[str, Any] = {
        "spec": spec("a"),
        "user": ADA,
        "project": ProjectId("gpt"),
        "queue": QueueId("default"),
        "key": "k",
    }
    for change, refusal in (
        ({"spec": spec("a", gpus="99x1")}, NeverFits),
        ({"project": ProjectId("none")}, NotFound),
        ({"project": ProjectId("closed")}, NotPermitted),
        ({"queue": QueueId("none")}, NotFound),
    ):
        with pytest.raises(refusal) as refused:
            cluster.request(SubmitJob(**{**good, **change}))
        assert refused.value.hint
    assert (cluster.world.next_job_seq, len(cluster.store.history())) == (seq, lines)
    assert cluster.request(SubmitJob(**good)).id == str(seq), "a refused key is not used up"
    assert cluster.request(SubmitJob(**{**good, "user": OP, "project": ProjectId("closed")})), (
        "operators submit anywhere"
    )


def test_what_never_fits_is_told_apart_from_what_waits_for_a_node(cluster):
    cluster.kill_node("n2")
    cluster.run(1.0)
    waits = cluster.submit(gpus=12)
    assert cluster.head.controller.waits[waits].reason is WaitReasonCode.NODES_DOWN
    with pytest.raises(NeverFits):
        cluster.submit(gpus=16)
    cluster.revive_node("n2")
    cluster.runs(waits)


# ---- cancel, hold, requeue, update ----------------------------------------------------------------------------------


def test_cancel_of_a_waiting_job_is_final_at_once(cluster):
    job = cluster.submit(gpus=12, hold=True)
    assert cluster.cancel(job).state is JobState.CANCELLED
    assert cluster.cancel(job).state is JobState.CANCELLED
    cluster.run(10.0)
    assert cluster.job(job).epoch == 0


@pytest.mark.parametrize("at_s", [0.0, 0.02, 0.06, 0.075, 0.1, 1.0, 4.99])
def test_cancelled_job_never_runs_again_whenever_it_was(cluster, at_s):
    job = cluster.submit(gpus="2x4")
    cluster.run(at_s)
    assert cluster.cancel(job).cancelled_by == "ada"
    ended = cluster.ends(job)
    assert (ended.state, ended.exit_code) == (JobState.CANCELLED, 143)
    cluster.run(20.0)
    assert cluster.job(job).epoch == 1
    cluster.invariants.check_settled()


def test_cancel_outlives_head_and_node(cluster):
    job = cluster.submit(gpus="2x4", behaviour=LONG)
    cluster.runs(job)
    cluster.cancel(job)
    cluster.kill_head()
    cluster.kill_node("n1", silent=True)
    cluster.run(1.0)
    cluster.start_head()
    assert cluster.ends(job).state is JobState.CANCELLED
    assert len(cluster.attempts(job)) == 1


def test_task_that_ignores_sigterm_is_killed_after_the_grace(cluster):
    job = cluster.submit(gpus=4, grace_s=5.0, behaviour=JobBehaviour(run_s=1000.0, ignores_sigterm=True))
    cluster.runs(job)
    cluster.cancel(job)
    assert 5.0 <= cluster.until(lambda: cluster.job(job).state.terminal) < 5.5


def test_cancel_all_ends_every_job(cluster):
    jobs = [cluster.submit(gpus=8, behaviour=LONG) for _ in range(3)]
    cluster.run(2.0)
    answer = cluster.request(CancelAllJobs(by=OP))
    assert [job.id for job in answer] == jobs
    cluster.run(5.0)
    assert {cluster.job(job).state for job in jobs} == {JobState.CANCELLED}


def test_held_job_starts_once_released(cluster):
    job = cluster.submit(gpus=4, hold=True)
    cluster.run(5.0)
    assert cluster.head.controller.waits[job].reason is WaitReasonCode.HELD
    assert not cluster.request(HoldJob(job_id=job, held=False, by=ADA)).held
    cluster.runs(job)
    with pytest.raises(Conflict):
        cluster.request(HoldJob(job_id=job, held=True, by=ADA))


def test_requeue_saves_stops_and_waits_again(cluster):
    job = cluster.submit(gpus="2x4", behaviour=SAVING)
    cluster.runs(job)
    cluster.run(5.0)
    cluster.request(RequeueJob(job_id=job, by=ADA))
    cluster.request(RequeueJob(job_id=job, by=ADA))
    cluster.until(cluster.attempt_is(job, AttemptState.RUNNING))
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    assert cluster.live(job).resume_from.step == 4
    assert (cluster.job(job).charged_restarts, cluster.job(job).preemptions) == (0, 0)
    assert cluster.attempts(job)[0].causes == (EndCause.REQUEUED,)


def test_update_moves_a_waiting_job_and_not_a_running_one(cluster):
    cluster.request(PutQueue(queue=Queue(id=QueueId("night"), open=False)))
    job = cluster.submit(gpus=4, hold=True)
    cluster.request(UpdateJob(job_id=job, by=ADA, queue=QueueId("night"), name="new", priority=7))
    assert (cluster.job(job).queue, cluster.job(job).name, cluster.job(job).spec.priority) == ("night", "new", 7)
    cluster.request(HoldJob(job_id=job, held=False, by=ADA))
    cluster.run(1.0)
    assert cluster.head.controller.waits[job].reason is WaitReasonCode.QUEUE_CLOSED
    cluster.request(PutQueue(queue=Queue(id=QueueId("night"))))
    cluster.runs(job)
    with pytest.raises(Conflict):
        cluster.request(UpdateJob(job_id=job, by=ADA, queue=QueueId("default")))
    with pytest.raises(NotFound):
        cluster.request(UpdateJob(job_id=job, by=ADA, queue=QueueId("none")))
    cluster.cancel(job)
    cluster.ends(job)
    with pytest.raises(Conflict):
        cluster.request(UpdateJob(job_id=job, by=ADA, name="late"))


@pytest.mark.parametrize("event", [CancelJob, RequeueJob])
def test_unknown_job_is_not_found(cluster, event):
    with pytest.raises(NotFound):
        cluster.request(event(job_id=JobId("99"), by=ADA))


def test_refused_request_in_a_full_step_leaves_the_others_alone(cluster):
    answers = cluster.turn(
        [
            CancelJob(job_id=JobId("99"), by=ADA),
            SubmitJob(spec=spec("a"), user=ADA, project=ProjectId("gpt"), queue=QueueId("default")),
        ]
    )
    assert isinstance(answers[0], NotFound)
    assert answers[1].id == "1"


# ---- time limit -----------------------------------------------------------------------------------------------------


def test_time_limit_ends_the_job(cluster):
    job = cluster.submit(gpus=4, time_limit_s=10.0, behaviour=LONG)
    took_s = cluster.until(lambda: cluster.job(job).state.terminal)
    assert cluster.job(job).state is JobState.TIMEOUT
    assert 10.0 <= took_s < 10.5


def test_time_limit_given_while_it_runs_counts_from_its_start(cluster):
    """Found by reading: only a limit that was there before was armed again."""
    job = cluster.submit(gpus=4, behaviour=LONG)
    cluster.runs(job)
    began_s = cluster.boot_s
    cluster.run(4.0)
    cluster.request(UpdateJob(job_id=job, by=ADA, time_limit_s=10.0))
    cluster.until(lambda: cluster.job(job).state.terminal)
    assert cluster.job(job).state is JobState.TIMEOUT
    assert 9.0 <= cluster.boot_s - began_s < 10.5


def test_time_limit_goes_on_while_there_is_no_head(cluster):
    job = cluster.submit(gpus=4, time_limit_s=10.0, behaviour=LONG)
    cluster.run(4.0)
    cluster.kill_head()
    cluster.run(3.0)
    cluster.start_head()
    cluster.until(lambda: cluster.job(job).state.terminal)
    assert cluster.boot_s == pytest.approx(1010.2, abs=0.5)


def test_limit_told_once_however_long_the_grace(cluster):
    job = cluster.submit(
        gpus=4, time_limit_s=3.0, grace_s=20.0, behaviour=JobBehaviour(run_s=1000.0, ignores_sigterm=True)
    )
    cluster.run(1.0)
    cluster.request(RequeueJob(job_id=job, by=ADA))
    cluster.run(15.0)
    assert cluster.kinds(job).count("stopping") == 1


# ---- what a job asks for when it falls -------------------------------------------------------------------------------


def test_job_whose_node_died_takes_another_shape_where_its_own_fits_no_more():
    """Found by reading: it kept the class that it had begun with, and waited beside two nodes that could have taken it."""
    cluster = Harness("r: n0=8 n1=4 n2=4")
    job = cluster.submit(gpus=8, behaviour=LONG)
    cluster.runs(job)
    assert [grant.node_id for grant in cluster.live(job).allocation.grants] == ["n0"]
    cluster.kill_node("n0", silent=True)
    cluster.until(lambda: cluster.attempt_is(job, AttemptState.RUNNING)() and cluster.live(job).epoch == 2, 30.0)
    assert sorted(grant.node_id for grant in cluster.live(job).allocation.grants) == ["n1", "n2"]


def test_priority_that_was_changed_while_it_ran_counts_once_it_waits(cluster):
    job = cluster.submit(gpus=12, behaviour=LONG)
    cluster.runs(job)
    cluster.request(UpdateJob(job_id=job, by=ADA, priority=-5))
    other = cluster.submit(gpus=12, behaviour=LONG)
    cluster.request(RequeueJob(job_id=job, by=ADA))
    cluster.runs(other)
    assert cluster.job(job).state is JobState.PENDING


# ---- nodes ----------------------------------------------------------------------------------------------------------


def test_drain_moves_the_job_after_its_stop_and_nothing_new_comes(cluster):
    job = cluster.submit(gpus=4, behaviour=SAVING)
    cluster.runs(job)
    cluster.run(5.0)
    (home,) = (grant.node_id for grant in cluster.live(job).allocation.grants)
    drain(cluster, home)
    drain(cluster, home)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    first, second = cluster.attempts(job)
    assert first.causes == (EndCause.DRAINED,)
    assert second.placed_s >= first.ended_s
    assert second.allocation.grants[0].node_id != home
    assert cluster.job(job).charged_restarts == 0
    assert [line.kind for line in cluster.store.history(node_id=home)].count("drained") == 1


def test_cordon_lets_the_running_job_be(cluster):
    job = cluster.submit(gpus=4)
    cluster.runs(job)
    drain(cluster, cluster.live(job).allocation.grants[0].node_id, drain=False)
    assert cluster.ends(job).epoch == 1


def test_cordon_becomes_drain_and_undrain_undoes_both(cluster):
    assert not drain(cluster, "n0", drain=False).cordon.drain
    assert drain(cluster, "n0").cordon.drain
    assert drain(cluster, "n0", drain=False).cordon.drain, "a cordon does not weaken a drain"
    waits = cluster.submit(gpus=12)
    cluster.run(2.0)
    assert cluster.head.controller.waits[waits].reason is WaitReasonCode.NODES_DOWN
    for _ in range(2):
        assert cluster.request(UncordonNode(node_id=NodeId("n0"), by=OP)).cordon is None
    cluster.runs(waits)


def test_cordon_outlives_the_nodes_restart(cluster):
    drain(cluster, "n0")
    cluster.kill_node("n0")
    cluster.run(1.0)
    cluster.revive_node("n0")
    cluster.run(1.0)
    assert cluster.world.nodes[NodeId("n0")].state == "up"
    assert cluster.world.nodes[NodeId("n0")].cordon is not None


def test_only_a_dead_empty_node_can_be_forgotten(cluster):
    with pytest.raises(Conflict):
        cluster.request(RemoveNode(node_id=NodeId("n0"), by=OP))
    with pytest.raises(NotFound):
        cluster.request(RemoveNode(node_id=NodeId("n9"), by=OP))
    cluster.kill_node("n0")
    cluster.run(1.0)
    cluster.request(RemoveNode(node_id=NodeId("n0"), by=OP))
    assert [node.id for node in cluster.store.nodes()] == ["n1", "n2"]
    cluster.revive_node("n0")
    cluster.run(1.0)
    assert [node.id for node in cluster.store.nodes()] == ["n0", "n1", "n2"]


# ---- people ---------------------------------------------------------------------------------------------------------


def test_people_and_tokens_are_kept(cluster):
    cluster.request(PutUser(user=User(id=UserId("bob"), role=UserRole.VIEWER)))
    cluster.request(PutToken(token=Token(id=TokenId("t1"), user=UserId("bob"), sha256="h", created_s=T)))
    first = cluster.request(RevokeToken(token_id=TokenId("t1")))
    cluster.run(5.0)
    assert cluster.request(RevokeToken(token_id=TokenId("t1"))) == first
    assert cluster.store.token("h").revoked_s == first.revoked_s
    with pytest.raises(NotFound):
        cluster.request(RevokeToken(token_id=TokenId("t2")))


# ---- the loop -------------------------------------------------------------------------------------------------------


def test_rejected_placement_is_counted_and_judged_again(cluster, monkeypatch):
    """Nomad's harness: every plan is rejected for a while."""
    rejects = iter([True] * 3)
    monkeypatch.setattr(
        controller_module,
        "rejection_reason",
        lambda *wanted: "no" if next(rejects, False) else rejection_reason(*wanted),
    )
    job = cluster.submit(gpus="2x4")
    assert cluster.job(job).state is JobState.PENDING
    assert not any(isinstance(command, PrepareTasks) for command in cluster.commands)
    cluster.ends(job)
    assert cluster.head.controller.stats["rejected_placements"] == 3


def test_step_that_breaks_off_leaves_the_world_as_it_was(cluster, monkeypatch):
    """Found by reading: an error in mid-step left the world changed by half, and the thread dead."""
    version, jobs = cluster.world.next_job_seq, dict(cluster.world.jobs)

    def broken(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cluster.head.controller.scheduler, "plan", broken)
    with pytest.raises(RuntimeError):
        cluster.submit(gpus=4)
    assert (cluster.world.next_job_seq, cluster.world.jobs) == (version, jobs)
    monkeypatch.undo()
    assert cluster.ends(cluster.submit(gpus=4)).state is JobState.SUCCEEDED


def test_ended_jobs_leave_the_world_and_stay_in_the_store(cluster, monkeypatch):
    monkeypatch.setattr(controller_module, "ENDED_JOBS_KEPT", 3)
    jobs = [cluster.submit(gpus=1, hold=True) for _ in range(6)]
    for job in jobs:
        cluster.cancel(job)
    assert set(cluster.world.jobs) == set(jobs[3:])
    assert cluster.job(jobs[0]).state is JobState.CANCELLED


def test_old_keys_are_forgotten_oldest_first(cluster, monkeypatch):
    monkeypatch.setattr(controller_module, "KEYS_KEPT", 2)
    for number in range(4):
        cluster.submit(spec("a", hold=True), key=f"k{number}")
    assert [key for _, key in cluster.world.table(IDEMPOTENCY)] == ["k2", "k3"]


def test_checkpoints_that_retention_drops_are_deleted_on_node_rank_zero(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=9.0, save_every_s=2.0))
    assert [one.step for one in cluster.ends(job).checkpoints] == [6, 8]
    deletes = [command for command in cluster.commands if isinstance(command, DeleteCheckpoints)]
    assert [(one.node_id, one.paths[0][-1]) for one in deletes] == [("n0", "2"), ("n0", "4")]
    assert sum(isinstance(command, CleanUpAttempt) for command in cluster.commands) == 2


def test_large_fleet_is_presumed_live_for_its_own_long_lease():
    """Found by reading: a new head judged the first nodes of a large fleet by the lease of a small one, and lost them after 7 s."""
    cluster = Harness("r: n0=1")
    names = " ".join(f"m{number}=1" for number in range(1200))
    fleet = make_fleet(f"r: {names}").nodes.values()
    cluster.turn([SupervisorRegistered(node=node, supervisor_id=SupervisorId(f"{node.id}-life1")) for node in fleet])
    cluster.kill_head()
    leases = cluster.start_head().controller.leases
    assert leases.terms[0] > 12.0
    assert leases.expire(cluster.boot_s + 12.0) == []


def test_planned_stop_lengthens_the_leases_and_a_late_head_believes_them(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=90.0))
    cluster.runs(job)
    cluster.request(PreparePlannedStop(lease_s=600.0, grants_until_s=cluster.boot_s + 10.0))
    cluster.run(2.0)
    assert cluster.head.controller.leases.all_long()
    until_s = cluster.boot_s + 600.0 + 1.0
    cluster.kill_head()
    cluster.run(60.0)
    assert len([task for node in cluster.nodes.values() for task in node.executing_tasks()]) == 8, "no rank noticed"
    cluster.start_head(leases_until_s=until_s)
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 0)
    assert "froze" not in cluster.kinds(job)
    assert "thawed" not in cluster.kinds(job)


def test_leases_are_normal_again_if_a_planned_stop_does_not_follow(cluster):
    """Else a head that went on granted long ones past the end that it had recorded for the next head (found by drill seed 807538811120)."""
    cluster.request(PreparePlannedStop(lease_s=600.0, grants_until_s=cluster.boot_s + 10.0))
    cluster.run(5.0)
    leases = cluster.head.controller.leases
    assert leases.terms[0] == 600.0
    cluster.run(20.0)
    assert leases.terms[0] < 60.0


# ---- many at once ---------------------------------------------------------------------------------------------------


LINE_CHANGES = {  # the question, why all wait then, and the question that undoes it
    "held": (
        lambda array: HoldJob(job_id=array, held=True, by=ADA),
        WaitReasonCode.HELD,
        lambda array: HoldJob(job_id=array, held=False, by=ADA),
    ),
    "the only node is cordoned": (
        lambda _: CordonNode(node_id=NodeId("n0"), by=OP, why="disk", drain=False),
        WaitReasonCode.NO_NODES,
        lambda _: UncordonNode(node_id=NodeId("n0"), by=OP),
    ),
    "another priority": (
        lambda array: UpdateJob(job_id=array, priority=5, by=ADA),
        WaitReasonCode.RESOURCES,
        lambda array: UpdateJob(job_id=array, priority=0, by=ADA),
    ),
}


@pytest.mark.parametrize("policy", ["default", "fifo", "skip", "fair", "backfill"])
@pytest.mark.parametrize(("change", "reason", "undo"), LINE_CHANGES.values(), ids=LINE_CHANGES)
def test_many_that_leave_a_line_at_once_are_taken_out_together(policy, change, reason, undo, monkeypatch):
    """Found by reading: holding an array of ten thousand took 9 s in one step, each element going through all the others."""
    cluster = Harness("r: n0=4", policy=PolicySettings(name=policy))
    sweeps = []  # lengths of lines gone through, and how many were taken out together
    heapify, withdraw = heapq.heapify, Board.withdraw

    def counted(line):
        sweeps.append(len(line))
        heapify(line)

    def taken_out(board, entries):
        sweeps.append(len(entries))
        withdraw(board, entries)

    runs = cluster.submit(gpus=4, behaviour=LONG)
    submission = spec("many", gpus=1, array="0-99")
    elements = cluster.request(SubmitJob(spec=submission, user=ADA, project=ProjectId("gpt"), queue=QueueId("default")))
    assert cluster.head is not None
    controller = cluster.head.controller
    array, waits, board = elements[0].array.array_id, controller.waits, controller.scheduler.board
    monkeypatch.setattr(heapq, "heapify", counted)
    monkeypatch.setattr(Board, "withdraw", taken_out)
    for question, why in (
        (change, reason),
        (undo, WaitReasonCode.RESOURCES),
        (lambda array: CancelJob(job_id=array, by=ADA), None),
    ):
        sweeps.clear()
        cluster.request(question(array))
        assert len([length for length in sweeps if length]) < 10
        if why is not None:
            assert {waits[one.id].reason for one in elements} == {why}
    assert list(cluster.world.pending) == []
    assert controller.scheduler.board is board, "what was being cleared for others stays theirs"
    assert cluster.live(runs).epoch == 1
