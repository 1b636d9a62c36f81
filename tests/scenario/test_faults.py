"""Nodes that die, freeze and come back; networks that lose and double; heads that are killed at every point of a job's life."""

from dataclasses import replace

import pytest

from phalanx.controller import controller as controller_module
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import JobId, NodeId, QueueId, SupervisorId, UserId
from phalanx.core.state.commands import (
    DeleteCheckpoints,
    PrepareTasks,
    StartTasks,
    StopTasks,
)
from phalanx.core.state.events import CordonNode, PreparePlannedStop, PutQueue, RemoveNode, RequeueJob
from phalanx.core.state.reports import MemberReady, NodeDied, SupervisorRegistered
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.queue import Queue
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from phalanx.node.logic.events import TerminationRequested
from phalanx.ports.store import StoreRefused
from tests.builders import make_node, spec
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
ADA, OP = UserId("ada"), UserId("op")
SAVING = JobBehaviour(run_s=40.0, save_every_s=2.0)
LONG = JobBehaviour(run_s=1000.0)


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4 n2=4")


def running(cluster, behaviour=SAVING, **fields):
    job = cluster.submit(**{"gpus": "2x4", **fields}, behaviour=behaviour)
    cluster.runs(job)
    return job


def nodes_of(attempt):
    return [grant.node_id for grant in attempt.allocation.grants]


# ---- death of a node ------------------------------------------------------------------------------------------------


def test_confirmed_death_moves_the_job_at_once_and_it_resumes(cluster):
    job = running(cluster)
    cluster.run(5.0)
    cluster.kill_node("n1")
    took_s = cluster.until(lambda: cluster.job(job).epoch == 2 and cluster.live(job).state is AttemptState.RUNNING)
    assert took_s < 2.0, "in virtual time: the death told, the peers stopped, the gang prepared and started"
    first, second = cluster.attempts(job)
    assert (nodes_of(first), nodes_of(second)) == ([N0, N1], [N0, N2])
    assert (first.causes, second.resume_from.step) == ((EndCause.NODE_FAIL,), 4)
    ended = cluster.ends(job)
    assert (ended.state, ended.charged_restarts) == (JobState.SUCCEEDED, 0)


def test_silent_death_is_told_by_the_lease_alone(cluster):
    job = running(cluster)
    cluster.kill_node("n1", silent=True)
    took_s = cluster.until(lambda: cluster.world.nodes[N1].state is NodeState.DOWN)
    assert 5.4 <= took_s <= 7.1, "a lease of 6 s and its margin, counted from the last renewal"
    assert "its lease expired" in cluster.world.nodes[N1].down_cause
    assert cluster.ends(job).state is JobState.SUCCEEDED


@pytest.mark.parametrize("silent", [False, True])
def test_replacement_waits_for_every_member(cluster, silent):
    """The peer's tasks ignore SIGTERM: until the supervisor says that nothing is left, nothing new is placed."""
    job = running(cluster, JobBehaviour(run_s=20.0, save_every_s=2.0, ignores_sigterm=True))
    cluster.kill_node("n1", silent=silent)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    first = cluster.attempts(job)[0]
    assert {member.node_id: member.state for member in first.members} == {N0: "stopped", N1: "lost"}
    assert not cluster.nodes[N0].tasks
    lost = next(line for line in cluster.store.history(job_id=job) if line.kind == "node_lost")
    assert first.ended_s >= lost.at_s


def test_unconfirmed_death_is_the_leases_to_judge(cluster):
    job = running(cluster)
    cluster.turn([NodeDied(node_id=N1, supervisor_id=None, why="its pod is gone from the list", confirmed=False)])
    assert cluster.world.nodes[N1].state is NodeState.UP
    cluster.run(20.0)
    assert cluster.job(job).epoch == 1


@pytest.mark.parametrize(("planned", "counted"), [(False, 1), (True, 0)])
def test_node_that_was_stopped_with_a_part_of_a_gang_has_not_failed(cluster, planned, counted):
    job = running(cluster)
    who = cluster.world.nodes[N1].supervisor_id
    cluster.nodes[N1].power_off()
    cluster.turn([NodeDied(node_id=N1, supervisor_id=who, why="it left", confirmed=True, planned=planned)])
    node = cluster.world.nodes[N1]
    assert (node.state, node.failure_count, node.fault_score > 0.5) == (NodeState.DOWN, counted, not planned)
    cluster.until(lambda: cluster.job(job).epoch == 2)


def test_death_of_an_earlier_life_is_nobodys(cluster):
    cluster.turn([NodeDied(node_id=N1, supervisor_id=SupervisorId("n1-life0"), why="old news", confirmed=True)])
    assert cluster.world.nodes[N1].state is NodeState.UP
    cluster.turn([NodeDied(node_id=NodeId("n9"), supervisor_id=None, why="who?", confirmed=True)])


def test_node_declared_dead_while_it_lives_comes_back_by_itself(cluster):
    """Found by reading: it went on renewing a lease that nobody had ended, and stayed DOWN for ever."""
    cluster.turn([NodeDied(node_id=N1, supervisor_id=None, why="a late word", confirmed=True)])
    assert cluster.world.nodes[N1].state is NodeState.DOWN
    cluster.run(3.0)
    assert cluster.world.nodes[N1].state is NodeState.UP


def test_death_and_next_life_heard_in_one_step_leave_the_node_up(cluster):
    record = replace(cluster.nodes[N1].record, supervisor_id=SupervisorId("n1-life2"))
    cluster.nodes[N1].power_off()
    dead = NodeDied(node_id=N1, supervisor_id=None, why="it died", confirmed=True)
    cluster.turn([dead, SupervisorRegistered(node=record, supervisor_id=SupervisorId("n1-life2"))])
    assert cluster.world.nodes[N1].state is NodeState.UP
    assert cluster.head.controller.leases.renew(N1, SupervisorId("n1-life2"), [], cluster.boot_s)


def test_node_forgotten_and_back_in_one_step_is_kept(cluster):
    """Found by reading: the store wrote it and then removed it."""
    cluster.kill_node("n1")
    cluster.run(1.0)
    record = make_node("n1")
    cluster.turn(
        [RemoveNode(node_id=N1, by=OP), SupervisorRegistered(node=record, supervisor_id=SupervisorId("n1-life2"))]
    )
    assert [node.id for node in cluster.store.nodes()] == [N0, N1, N2]


def test_all_nodes_die_and_the_job_waits_until_they_are_back(cluster):
    job = running(cluster)
    cluster.run(5.0)
    for name in ("n0", "n1", "n2"):
        cluster.kill_node(name)
    cluster.run(2.0)
    assert cluster.job(job).state is JobState.PENDING
    assert cluster.head.controller.waits[job].reason is WaitReasonCode.NO_NODES
    for name in ("n0", "n1", "n2"):
        cluster.revive_node(name)
    assert cluster.ends(job).state is JobState.SUCCEEDED


def test_peers_exit_code_1_before_the_loss_is_known_is_not_the_users_fault(cluster):
    def peers_fail(key, rank):
        return (4.0, 1, None) if key.epoch == 1 and rank == 0 else None

    job = running(cluster, replace(SAVING, ends=peers_fail))
    cluster.run(3.5)
    cluster.kill_node("n1", silent=True)
    ended = cluster.ends(job)
    assert cluster.attempts(job)[0].causes == (EndCause.NODE_FAIL,)
    assert (ended.state, ended.user_retries) == (JobState.SUCCEEDED, 0)


def test_supervisor_that_shuts_down_hands_its_jobs_over(cluster):
    job = running(cluster)
    cluster.run(5.0)
    cluster.nodes[N1].deliver(TerminationRequested())
    cluster.until(lambda: cluster.job(job).epoch == 2)
    first, second = cluster.attempts(job)
    assert (first.causes, N1 in nodes_of(second)) == ((EndCause.NODE_FAIL,), False)
    assert cluster.ends(job).state is JobState.SUCCEEDED


def test_node_that_refuses_is_avoided(cluster):
    job = cluster.submit(gpus="2x4", behaviour=replace(SAVING, refuses={"n1": "device 2 is sick"}))
    assert cluster.ends(job).state is JobState.SUCCEEDED
    first, second = cluster.attempts(job)
    assert (first.causes, nodes_of(second)) == ((EndCause.START_FAIL,), [N0, N2])


def test_missing_script_fails_the_job_at_once(cluster):
    job = cluster.submit(gpus="2x4", retry=3, behaviour=JobBehaviour(refuses={"n0": "!train.py: no such file"}))
    ended = cluster.ends(job)
    assert (ended.state, ended.exit_code, ended.epoch) == (JobState.FAILED, 1, 1)
    assert "train.py: no such file" in ended.detail


def test_node_that_never_gets_ready_is_given_up(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(prepare_s=10_000.0))
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert cluster.attempts(job)[0].causes == (EndCause.START_FAIL,)
    assert "not ready after 60 s" in cluster.attempts(job)[0].why


def test_setup_script_may_take_its_time(cluster):
    job = cluster.submit(gpus="2x4", setup="pip install .", behaviour=JobBehaviour(prepare_s=600.0))
    assert cluster.ends(job, 700.0).epoch == 1


# ---- crashes --------------------------------------------------------------------------------------------------------


def test_crash_restarts_in_place_from_the_newest_checkpoint(cluster):
    def crash(key, rank):
        return (7.0, None, 11) if rank == 5 and key.generation == 0 else None

    job = running(cluster, replace(SAVING, ends=crash))
    ended = cluster.ends(job)
    (attempt,) = cluster.attempts(job)
    assert (ended.state, attempt.generation, attempt.causes) == (
        JobState.SUCCEEDED,
        1,
        (EndCause.CRASH, EndCause.SUCCEEDED),
    )
    assert attempt.resume_from.step == 6


def test_crashes_without_progress_end_within_the_budget(cluster):
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(ends=lambda _key, rank: (0.5, None, 6) if rank == 0 else None))
    ended = cluster.ends(job)
    assert (ended.state, ended.exit_code, len(cluster.attempts(job)[0].causes)) == (JobState.FAILED, 134, 6)


def test_crashes_with_progress_go_on(cluster):
    def crash(key, rank):
        return (3.0, None, 6) if rank == 0 and key.generation < 12 else None

    job = cluster.submit(gpus=4, behaviour=replace(SAVING, ends=crash))
    ended = cluster.ends(job)
    assert (ended.state, ended.charged_restarts) == (JobState.SUCCEEDED, 0)


def test_corrupt_checkpoint_is_passed_over(cluster):
    job = running(cluster)
    cluster.run(5.0)
    newest = cluster.job(job).checkpoints[-1]
    cluster.corrupt_checkpoints.add(newest.digest)
    cluster.kill_node("n1")
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    assert cluster.live(job).resume_from.step == newest.step - 2
    assert cluster.ends(job).state is JobState.SUCCEEDED


def test_port_in_use_is_tried_again_uncharged(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(port_taken_generations=3))
    ended = cluster.ends(job)
    assert (ended.state, ended.charged_restarts, cluster.attempts(job)[0].causes[:3]) == (
        JobState.SUCCEEDED,
        0,
        (EndCause.PORT_TAKEN,) * 3,
    )


def test_job_that_binds_a_taken_port_of_its_own_ends(cluster):
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(port_taken_generations=10_000))
    assert cluster.ends(job).state is JobState.FAILED


# ---- freezes --------------------------------------------------------------------------------------------------------


def test_short_partition_freezes_and_thaws_nobody_notices(cluster):
    job = running(cluster)
    cluster.nodes[N1].cut = True
    cluster.run(5.0)
    cluster.nodes[N1].cut = False
    assert cluster.ends(job).epoch == 1
    assert cluster.attempts(job)[0].causes == (EndCause.SUCCEEDED,)


def test_head_away_longer_than_the_lease_freezes_everything_then_thaws(cluster):
    job = running(cluster)
    cluster.kill_head()
    cluster.run(20.0)
    assert not [task for node in cluster.nodes.values() for task in node.executing_tasks()]
    cluster.start_head()
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 0)
    assert "thawed" in cluster.kinds(job)


def test_head_away_for_longer_than_collectives_bear_restarts_in_place_uncharged(cluster):
    job = running(cluster, collective_timeout_s=30.0)
    cluster.run(5.0)
    cluster.kill_head()
    cluster.run(40.0)
    cluster.start_head()
    ended = cluster.ends(job)
    (attempt,) = cluster.attempts(job)
    assert (ended.state, ended.charged_restarts, attempt.causes) == (
        JobState.SUCCEEDED,
        0,
        (EndCause.FREEZE, EndCause.SUCCEEDED),
    )
    assert attempt.resume_from.step == 10, (
        "what was saved before the lease ended is published late, and counts: the epoch is current"
    )


@pytest.mark.slow
def test_node_stopped_and_continued_fifty_times_never_runs_an_old_epoch(cluster):
    """SIGSTOP for longer than the lease, then SIGCONT. The harness fails if two epochs ever execute at once."""
    job = running(cluster, JobBehaviour(run_s=900.0, save_every_s=1.0))
    for _ in range(50):
        cluster.runs(job)
        node = cluster.nodes[nodes_of(cluster.live(job))[-1]]
        cluster.run(2.0)
        node.pause()
        cluster.run(9.0)
        node.resume()
        cluster.run(3.0)
    assert cluster.job(job).charged_restarts == 0
    assert not cluster.job(job).state.terminal
    assert cluster.job(job).epoch == 51


def test_partitioned_node_kills_what_was_superseded(cluster):
    job = running(cluster)
    cluster.nodes[N1].cut = True
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert cluster.nodes[N1].tasks, "frozen, not dead: nobody can tell it"
    cluster.nodes[N1].cut = False
    cluster.run(3.0)
    assert not cluster.nodes[N1].tasks
    assert cluster.world.nodes[N1].state is NodeState.UP


def test_two_lives_of_one_node_are_told_apart(cluster):
    """The same supervisor id does not renew after its node was replaced."""
    job = running(cluster)
    old = cluster.nodes[N1]
    old.power_off()
    cluster.turn([SupervisorRegistered(node=old.record, supervisor_id=SupervisorId("n1-life2"))])
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert cluster.attempts(job)[0].why == "n1: its supervisor was replaced"


# ---- lost, doubled and late messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrepareTasks, StartTasks, StopTasks])
def test_lost_command_is_said_again(cluster, kind):
    """Found by the drawing: a lost StartTasks left the gang at the barrier for ever."""
    lost: list[object] = []

    def drop(command):
        if isinstance(command, kind) and not lost:
            lost.append(command)
            return True
        return False

    cluster.drop_command = drop
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=5.0))
    cluster.run(3.0)
    if kind is StopTasks:
        cluster.request(RequeueJob(job_id=job, by=ADA))
    ended = cluster.ends(job)
    assert lost
    assert (ended.state, ended.charged_restarts) == (JobState.SUCCEEDED, 0)
    assert cluster.boot_s < 1030.0


def test_stop_is_said_again_also_past_the_time_limit(cluster):
    """Found by the machine: past its limit a job being cancelled was reminded no more, and a lost StopTasks stopped nothing for ever."""
    job = running(cluster, LONG, time_limit_s=3.0)
    cluster.drop_command = lambda command: isinstance(command, StopTasks)
    cluster.cancel(job)
    cluster.run(10.0)
    cluster.drop_command = lambda _: False
    assert cluster.ends(job).state is JobState.CANCELLED


def test_every_report_again_after_the_end_changes_nothing(cluster):
    job = running(cluster)
    cluster.run(5.0)
    cluster.kill_node("n1")
    ended = cluster.ends(job)
    before, lines = cluster.attempts(job), len(cluster.store.history())
    reports = [event for event in cluster.committed_events if hasattr(event, "generation")]
    assert len(reports) > 20
    cluster.turn(reports)
    cluster.turn(list(reversed(reports)))
    assert (cluster.job(job), cluster.attempts(job), len(cluster.store.history())) == (ended, before, lines)


def test_every_report_heard_twice_on_its_way_makes_the_same_history(monkeypatch):
    def told():
        again = Harness("r: n0=4 n1=4 n2=4")
        job = again.submit(spec("a", gpus="2x4"), behaviour=replace(SAVING, run_s=7.0))
        again.ends(job)
        return [line.text for line in again.store.history(job_id=job)]

    once, hear = told(), Harness.turn

    def twice(self, events):
        return hear(self, [one for event in events for one in [event] * (2 if hasattr(event, "generation") else 1)])

    monkeypatch.setattr(Harness, "turn", twice)
    assert told() == once


def test_report_of_a_node_outside_the_gang_does_not_open_the_barrier(cluster):
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(prepare_s=5.0))
    attempt = cluster.live(job)
    key = {"job_id": job, "epoch": attempt.epoch, "generation": attempt.generation}
    cluster.turn([MemberReady(**key, node_id=N2, port=1), MemberReady(**key, node_id=N2, port=1)])
    assert cluster.live(job).state is AttemptState.PLACED
    assert not any(isinstance(command, StartTasks) for command in cluster.commands)


# ---- the head dies --------------------------------------------------------------------------------------------------

MOMENTS = [
    0.0,
    0.005,
    0.015,
    0.05,
    0.065,
    0.075,
    0.085,
    0.1,
    0.115,
    0.13,
    0.5,
    1.995,
    2.005,
    2.015,
    4.9,
    5.06,
    5.08,
    5.1,
    5.12,
    5.2,
]


@pytest.mark.parametrize("away_s", [0.0, 3.0, 15.0])
@pytest.mark.parametrize("moment_s", MOMENTS)
def test_head_killed_at_every_point_of_a_jobs_life(moment_s, away_s):
    """Supervisors carry the job on; nothing is charged, nothing runs twice, no line is missing."""
    cluster = Harness("r: n0=4 n1=4 n2=4")
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=5.0, save_every_s=1.9))
    cluster.run(moment_s)
    cluster.kill_head()
    cluster.run(away_s)
    cluster.start_head()
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 0)
    assert set(cluster.attempts(job)[0].causes) == {EndCause.SUCCEEDED}
    cluster.run(5.0)
    cluster.invariants.check_settled()


@pytest.mark.parametrize("moment_s", MOMENTS)
def test_head_and_a_supervisor_replaced_at_every_point(moment_s):
    """The engine died with the head: the new head learns of the death by the hello of the node's next life."""
    cluster = Harness("r: n0=4 n1=4 n2=4")
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=5.0, save_every_s=1.9))
    cluster.run(moment_s)
    cluster.kill_head()
    cluster.kill_node("n1")
    cluster.run(2.0)
    cluster.revive_node("n1")
    cluster.start_head()
    ended = cluster.ends(job)
    assert ended.state is JobState.SUCCEEDED
    assert ended.epoch <= 2
    cluster.run(5.0)
    cluster.invariants.check_settled()


@pytest.mark.parametrize("moment_s", MOMENTS[:14])
def test_head_killed_while_a_job_is_being_cancelled(moment_s):
    cluster = Harness("r: n0=4 n1=4 n2=4")
    job = running(cluster, LONG)
    cluster.cancel(job)
    cluster.run(moment_s)
    cluster.kill_head()
    cluster.run(1.0)
    cluster.start_head()
    assert cluster.ends(job).state is JobState.CANCELLED
    cluster.run(10.0)
    cluster.invariants.check_settled()


def test_head_that_was_away_does_not_blame_nodes_for_not_answering(cluster):
    """Found by reading: the limit for getting ready ran on while there was no head to get ready for."""
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(prepare_s=1.0))
    cluster.kill_head()
    cluster.run(200.0)
    cluster.start_head()
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 0)


def test_new_head_loses_no_node_before_a_full_lease(cluster):
    job = running(cluster, LONG)
    cluster.kill_head()
    for node in cluster.nodes.values():
        node.cut = True
    cluster.start_head()
    cluster.run(6.9)
    assert all(node.state is NodeState.UP for node in cluster.world.nodes.values())
    cluster.run(0.2)
    assert all(node.state is NodeState.DOWN for node in cluster.world.nodes.values())
    assert cluster.job(job).epoch == 1


def test_partition_after_the_first_hello_to_a_new_head_does_not_cut_a_long_lease(cluster):
    """Found by reading: two epochs ran at once, for up to ten minutes."""
    job = running(cluster, JobBehaviour(run_s=300.0, save_every_s=2.0))
    cluster.request(PreparePlannedStop(lease_s=100.0, grants_until_s=cluster.boot_s + 10.0))
    cluster.run(3.0)
    until_s = cluster.boot_s + 101.0
    cluster.kill_head()
    cluster.start_head(leases_until_s=until_s)
    cluster.until(lambda: N1 in cluster.head.registered)
    cluster.nodes[N1].cut = True
    cluster.run(60.0)
    assert cluster.job(job).epoch == 1
    cluster.nodes[N1].cut = False
    assert cluster.ends(job, 400.0).epoch == 1


# ---- the disk is full -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [1, 3])
@pytest.mark.parametrize("moment_s", MOMENTS)
def test_store_that_refuses_undoes_everything_and_it_is_tried_again(moment_s, commits):
    cluster = Harness("r: n0=4 n1=4 n2=4")
    job = cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=5.0, save_every_s=1.9))
    cluster.run(moment_s)
    cluster.store.full_commits = commits
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 0)


def test_refused_submit_acknowledges_nothing_and_its_number_goes_back(cluster):
    """24."""
    cluster.store.full_commits = 1
    with pytest.raises(StoreRefused) as refused:
        cluster.submit(spec("a"), key="k")
    assert refused.value.retry_helps
    assert not any(isinstance(command, PrepareTasks) for command in cluster.commands)
    assert cluster.world.jobs == {}
    assert cluster.submit(spec("a"), key="k") == "1"


def test_placements_of_a_refused_commit_are_judged_again_with_nobody_asking(cluster, monkeypatch):
    monkeypatch.setattr(controller_module, "rejection_reason", lambda *_: "not now")
    job = cluster.submit(spec("a"))
    cluster.kill_head()
    monkeypatch.undo()
    cluster.store.full_commits = 1  # the first step of the next head, which would have placed it
    cluster.start_head()
    assert cluster.ends(job, 20.0).state is JobState.SUCCEEDED


def test_death_told_while_the_disk_is_full_is_heard_later(cluster):
    job = running(cluster)
    cluster.store.full_commits = 8
    cluster.kill_node("n1")
    assert cluster.ends(job).state is JobState.SUCCEEDED
    assert cluster.job(job).epoch == 2


def test_lease_that_ends_while_the_disk_is_full_is_lost_later(cluster):
    job = running(cluster)
    cluster.kill_node("n1", silent=True)
    cluster.run(5.5)
    cluster.store.full_commits = 6
    assert cluster.ends(job).epoch == 2


# ---- clocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
@pytest.mark.parametrize(
    "moment_s", [0.015, 0.06, 0.09, 1.0, 3.0]
)  # not while Prepare travels: its deadline is Unix time
def test_clock_set_by_a_day_kills_nothing(moment_s, jump_s):
    cluster = Harness("r: n0=4 n1=4 n2=4")
    job = cluster.submit(gpus="2x4", time_limit_s=60.0, behaviour=JobBehaviour(run_s=20.0, save_every_s=2.0))
    cluster.run(moment_s)
    cluster.jump_clock(jump_s)
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, cluster.attempts(job)[0].causes) == (JobState.SUCCEEDED, 1, (EndCause.SUCCEEDED,))
    assert all(node.state is NodeState.UP for node in cluster.world.nodes.values())


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_restart_in_place_after_the_clock_was_set_keeps_its_time(jump_s):
    """Found by reading: 60 s after its start an in-place restart was overdue at once, and its deadline long past."""

    def crash(key, rank):
        return (70.0, None, 11) if rank == 0 and key.generation == 0 else None

    cluster = Harness("r: n0=4")
    job = cluster.submit(
        gpus=4, time_limit_s=200.0, behaviour=JobBehaviour(run_s=100.0, save_every_s=10.0, prepare_s=2.0, ends=crash)
    )
    cluster.until(lambda: "restart" in cluster.kinds(job))
    cluster.run(0.5)
    cluster.jump_clock(jump_s)
    ended = cluster.ends(job)
    assert (ended.state, cluster.attempts(job)[0].causes) == (JobState.SUCCEEDED, (EndCause.CRASH, EndCause.SUCCEEDED))


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_time_limit_is_kept_whatever_the_clock_does(jump_s):
    cluster = Harness("r: n0=4")
    job = cluster.submit(gpus=4, time_limit_s=30.0, behaviour=LONG)
    cluster.run(10.0)
    cluster.jump_clock(jump_s)
    took_s = cluster.until(lambda: cluster.job(job).state.terminal)
    assert cluster.job(job).state is JobState.TIMEOUT
    assert took_s == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_backoff_ends_soon_whatever_the_clock_does(jump_s):
    cluster = Harness("r: n0=4")
    cluster.behaviours["a"] = JobBehaviour(refuses={"n0": "device 1 is sick"})
    job = cluster.submit(spec("a", gpus=4))
    cluster.until(lambda: cluster.job(job).reason is WaitReasonCode.START_FAIL)
    cluster.jump_clock(jump_s)
    cluster.behaviours["a"] = JobBehaviour()
    assert cluster.ends(job).state is JobState.SUCCEEDED
    assert cluster.boot_s < 1015.0


# ---- mixtures that were found to break something --------------------------------------------------------------------


def test_drain_and_death_of_the_same_node(cluster):
    job = running(cluster)
    cluster.request(CordonNode(node_id=N1, by=OP, why="disk", drain=True))
    cluster.kill_node("n1")
    ended = cluster.ends(job)
    assert ended.state is JobState.SUCCEEDED
    assert cluster.attempts(job)[0].causes == (EndCause.DRAINED,), "what an operator wanted is not charged"


def test_checkpoint_of_an_old_epoch_is_not_published(cluster):
    job = running(cluster)
    cluster.run(3.0)
    cluster.nodes[N0].cut = True
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.nodes[N0].cut = False
    cluster.ends(job)
    assert {one.epoch for one in cluster.job(job).checkpoints} == {2}
    assert all(path not in cluster.deleted_checkpoints for one in cluster.job(job).checkpoints for path in [one.path])
    assert any(isinstance(command, DeleteCheckpoints) for command in cluster.commands)


def test_no_request_of_any_kind_breaks_a_step(cluster):
    """Requests about things that are not there are answered, each with a class that says whether a retry helps."""
    for event in (
        RequeueJob(job_id=JobId("0"), by=ADA),
        CordonNode(node_id=NodeId("n9"), by=OP, why="", drain=True),
        RemoveNode(node_id=NodeId("n9"), by=OP),
    ):
        (answer,) = cluster.turn([event])
        assert isinstance(answer, PhalanxError)


def test_budget_counts_on_after_the_clock_was_ahead_for_a_while():
    """Found by reading: the books know no way back in time, and charged the queue for the nine days that never were."""
    cluster = Harness("r: n0=4")
    cluster.request(PutQueue(queue=Queue(id=QueueId("poor"), budget_gpu_h=0.01, budget_period_s=86_400.0)))
    cluster.jump_clock(9 * 86_400.0)
    cluster.ends(cluster.submit(gpus=4, queue="poor", behaviour=JobBehaviour(run_s=1.0)))
    cluster.jump_clock(-9 * 86_400.0)
    cluster.ends(cluster.submit(gpus=4, queue="poor", behaviour=JobBehaviour(run_s=1.0)))
    cluster.ends(cluster.submit(gpus=4, queue="poor", behaviour=JobBehaviour(run_s=20.0)))
    late = cluster.submit(gpus=4, queue="poor", behaviour=JobBehaviour(run_s=1.0))
    cluster.run(2.0)
    assert cluster.head is not None
    assert cluster.head.controller.waits[late].reason is WaitReasonCode.BUDGET


def test_node_that_comes_back_with_fewer_devices_than_its_gangs_still_hold_breaks_no_step():
    """Found by reading: the prices of its row had two numbers too many, and every step broke off until the gangs were gone."""
    cluster = Harness("r: n0=8 n1=8")
    gangs = [cluster.submit(gpus="2x4", behaviour=JobBehaviour(run_s=1000.0)) for _ in range(2)]
    for gang in gangs:
        cluster.runs(gang)
    waiting = cluster.submit(gpus=8, behaviour=JobBehaviour(run_s=1.0))
    node = cluster.nodes[NodeId("n0")]
    node.record = replace(node.record, devices=node.record.devices[:6])
    cluster.nodes[NodeId("n1")].cut = True  # its part of both cannot be stopped
    cluster.kill_node("n0")
    cluster.revive_node("n0")
    cluster.run(3.0)
    assert len(cluster.world.nodes[NodeId("n0")].devices) == 6
    assert {cluster.live(gang).state for gang in gangs} == {AttemptState.STOPPING}
    cluster.nodes[NodeId("n1")].cut = False
    for gang in gangs:
        cluster.cancel(gang)
    assert cluster.ends(waiting).state is JobState.SUCCEEDED
