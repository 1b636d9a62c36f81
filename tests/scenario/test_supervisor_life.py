"""One node's part of a gang, from Prepare to Forget, in virtual time."""

from dataclasses import replace

import pytest

from phalanx.core.ids import SupervisorId
from phalanx.core.state.commands import SaveNow
from phalanx.core.state.reports import (
    CheckpointSaved,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    NodeDied,
    TaskExited,
)
from phalanx.node.logic import actions as act
from phalanx.node.logic import events as hap
from phalanx.node.logic.checkpoint_report_limiter import BURST_MAX, REPORTS_PER_S
from phalanx.node.logic.local_member import MemberPhase
from phalanx.node.logic.member import KILL_AGAIN_S, LINGER_S
from phalanx.node.logic.supervisor import LEFT
from phalanx.wire.rank import RankStopReason
from tests.scenario.supervisor_world import NODE, World, forget, key_of, prepare, start, stop, with_deadline


def test_life_of_a_member_reads_in_order():
    world = World().running().end(0).end(1)
    assert world.kinds() == ["MemberReady", "MemberStarted", "TaskExited", "TaskExited", "MemberStopped"]
    assert [r.exit.requested_by_phalanx for r in world.said(TaskExited)] == [False, False]
    assert world.tell(forget()).clean == [("1", 1)]
    assert world.carried == ()


def test_nothing_starts_before_the_barrier():
    world = World().tell(prepare())
    assert world.kinds() == ["MemberReady"]
    assert world.opened == []


def test_task_that_ends_before_the_last_one_begins_is_told_after_the_start():
    world = World(auto=False).tell(prepare()).do_work().tell(start())
    world.hear(hap.TaskEnded(key=key_of(), rank=0, code=1, signal=None, ended_ns=world.now_ns, at_s=0.0))
    assert world.kinds() == ["MemberReady"]
    world.do_work()
    assert world.kinds() == ["MemberReady", "MemberStarted", "TaskExited"]


def test_failed_task_leaves_the_others_to_the_head():
    world = World().running().end(0, code=1).wait(5, renewing=True)
    assert world.living() == [key_of()]
    assert world.did(act.KillMember) == []


def test_daemon_left_behind_is_killed_after_a_moment():
    world = World().running(tasks=1).end(0, leaving=(99,))
    assert world.said(MemberStopped) == []
    world.wait(LINGER_S, renewing=True)
    assert world.living() == []
    assert len(world.said(MemberStopped)) == 1


def test_stop_writes_the_page_then_signals_then_kills_after_the_grace():
    world = World().running().tell(stop(grace_s=3))
    page = world.pages[key_of()]
    assert page["stop"] is RankStopReason.CANCELLED
    assert page["stop_by_ns"] == world.now_ns + 3_000_000_000
    kinds = [type(action) for action in world.actions]
    assert kinds.index(act.SendSigterm) > kinds.index(act.UpdateLeasePage)
    world.wait(2.9, renewing=True)
    assert world.living()
    world.wait(0.2, renewing=True)
    assert not world.living()
    assert len(world.said(MemberStopped)) == 1
    assert all(r.exit.requested_by_phalanx for r in world.said(TaskExited))


def test_obedient_ranks_need_no_kill():
    world = World(deaf=False).running().tell(stop())
    assert [r.exit.signal for r in world.said(TaskExited)] == [15, 15]
    assert world.did(act.KillMember) == []
    assert len(world.said(MemberStopped)) == 1


def test_second_stop_may_shorten_the_grace_and_never_lengthens_it():
    world = World().running().tell(stop(grace_s=10)).tell(stop(grace_s=100)).tell(stop(grace_s=1))
    world.wait(1.1, renewing=True)
    assert not world.living()


def test_end_that_came_before_the_stop_is_the_tasks_own():
    world = World().running()
    before_ns = world.now_ns
    world.now_ns += 1_000_000
    world.tell(stop())
    world.hear(hap.TaskEnded(key=key_of(), rank=0, code=1, signal=None, ended_ns=before_ns, at_s=0.0))
    assert not world.said(TaskExited)[0].exit.requested_by_phalanx


def test_stop_at_the_barrier_is_answered_at_once():
    world = World().tell(prepare(), stop())
    assert world.kinds() == ["MemberReady", "MemberStopped"]
    assert world.opened == []
    assert world.pages[key_of()]["stop"] is RankStopReason.CANCELLED


def test_stop_while_preparing_waits_for_the_hand():
    world = World(auto=False).tell(prepare(), stop())
    assert world.said(MemberStopped) == []
    while world.work:
        world.do_work()
    assert world.kinds() == ["MemberStopped"]
    assert world.pages[key_of()]["stop"] is RankStopReason.CANCELLED


def test_stop_while_starting_kills_what_has_begun():
    world = World(auto=False).tell(prepare()).do_work().tell(start(), stop())
    while world.work:
        world.do_work()
    assert not world.living()
    assert world.kinds()[-1] == "MemberStopped"
    assert world.pages[key_of()]["stop"] is RankStopReason.CANCELLED


def test_stop_of_the_unknown_is_answered_at_once_and_keeps_it_from_starting():
    world = World().tell(stop()).tell(prepare(), start())
    assert world.kinds()[0] == "MemberStopped"
    assert world.pages[key_of()]["stop"] is RankStopReason.CANCELLED
    assert world.opened == []
    assert MemberReady not in [type(r) for r in world.reports]


def test_what_cannot_be_prepared_is_refused_when_nothing_of_it_is_left():
    world = World(auto=False).tell(prepare())
    world.hear(hap.MemberStartFailed(key=key_of(), why="train.py: no such file in /w", charge=True))
    assert world.reports == []
    world.work.popleft()
    while world.work:
        world.do_work()
    assert world.kinds() == ["MemberRefused", "MemberStopped"]
    refused = world.said(MemberRefused)[0]
    assert (refused.job_at_fault, refused.why) == (True, "train.py: no such file in /w")


def test_task_that_cannot_be_execd_refuses_and_ends_the_others():
    world = World(auto=False).tell(prepare()).do_work().tell(start())
    world.alive[key_of()] = {0}
    world.hear(hap.MemberStartFailed(key=key_of(), why="python: not found", charge=True))
    world.work.popleft()
    while world.work:
        world.do_work()
    assert not world.living()
    assert world.kinds() == ["MemberReady", "TaskExited", "MemberRefused", "MemberStopped"]


def test_survivor_of_sigkill_is_tried_again_and_not_called_stopped():
    world = World().running()
    world.unkillable = {1}
    world.tell(stop(grace_s=0)).wait(0.1, renewing=True)
    assert world.said(MemberStopped) == []
    world.unkillable = set()
    world.wait(KILL_AGAIN_S, renewing=True)
    assert len(world.said(MemberStopped)) == 1


def test_save_now_counts_up():
    world = World().running()
    order = SaveNow(node_id=NODE, job_id=key_of().job_id, epoch=key_of().epoch)
    world.tell(order, order)
    assert world.pages[key_of()]["saves"] == 2


# ------------------------------------------------------------------------------------------------------ port and time limit


@pytest.mark.parametrize(
    ("tail", "taken"),
    [
        (b"The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n", True),
        (b"OSError: [Errno 98] Address already in use\n", True),
        (b"[2026-11-21 10:00:00 pid 4242] EADDRINUSE on port: 29500\n", True),
        (b"dashboard on 0.0.0.0:30123: address already in use\n", False),
        (b"Traceback ... ValueError\n", False),
    ],
)
def test_port_in_use_is_read_from_rank_zeros_last_words(tail, taken):
    world = World().running()
    world.tail = tail
    world.end(0, code=1).tell(stop(grace_s=0)).wait(0.1)
    assert world.said(MemberStopped)[0].port_in_use is taken


def test_bind_error_after_the_first_half_minute_is_the_scripts_own():
    world = World().running().wait(31, renewing=True)
    world.tail = b"Address already in use\n"
    world.end(0, code=1).tell(stop(grace_s=0)).wait(0.1)
    assert not world.said(MemberStopped)[0].port_in_use


def test_time_limit_is_on_the_page_and_kept_without_the_heads_word():
    world = World()
    world.tell(with_deadline(prepare(grace_s=5), world, 60), start())
    spawn = world.did(act.SpawnTasks)[0]
    assert spawn.job_deadline_ns == world.now_ns + 60_000_000_000
    world.wait(64, renewing=True)
    assert world.pages[key_of()].get("stop") is None, "the head has the first word"
    world.wait(1.1, renewing=True)
    assert world.pages[key_of()]["stop"] is RankStopReason.DEADLINE
    world.wait(5, renewing=True)
    assert not world.living()
    assert {r.exit.note for r in world.said(TaskExited)} == {"time limit"}


# --------------------------------------------------------------------------------------------------- generations and epochs


def test_next_generation_is_prepared_when_the_last_is_gone():
    world = World(auto=False).tell(prepare()).do_work().tell(start()).do_work()
    world.tell(prepare(generation=1))
    assert [a.key.generation for a in world.did(act.PrepareMember)] == [0]
    while world.work:
        world.do_work()
    assert world.said(MemberStopped, generation=0)
    assert world.said(MemberReady, generation=1)


def test_restart_in_place_keeps_the_scratch_folder():
    world = (
        World()
        .running()
        .tell(stop(grace_s=0, reason="restart"))
        .wait(0.1)
        .tell(prepare(generation=1), start(generation=1))
    )
    assert world.living() == [key_of(generation=1)]
    assert world.clean == []


def test_higher_epoch_kills_the_lower_and_cleans_it_up():
    world = World().running().tell(prepare(epoch=2), start(epoch=2))
    assert world.pages[key_of()]["stop"] is RankStopReason.SUPERSEDED
    assert world.said(TaskExited) == [], "an old epoch's ends are nobody's news"
    assert world.clean == [("1", 1)]
    assert [r.epoch for r in world.said(MemberReady)] == [1, 2]
    assert world.tell(start(epoch=2)).living() == [key_of(epoch=2)]


def test_lower_epoch_and_older_generation_are_ignored():
    world = (
        World().running(epoch=2, generation=1).tell(prepare(epoch=1), prepare(epoch=2), start(epoch=2), start(epoch=1))
    )
    assert world.living() == [key_of(epoch=2, generation=1)]
    assert world.opened == [key_of(epoch=2, generation=1)]


def test_stop_of_an_older_generation_leaves_the_newer_alone():
    world = World().running(generation=1).tell(stop(generation=0))
    assert world.said(MemberStopped, generation=0)
    assert world.living() == [key_of(generation=1)]


def test_stop_of_a_generation_never_seen_ends_the_older_and_is_answered_after_it():
    world = World().running().tell(stop(generation=1, grace_s=1))
    assert world.said(MemberStopped) == []
    world.wait(1.1, renewing=True)
    assert [r.generation for r in world.said(MemberStopped)] == [0, 1]
    world.tell(prepare(generation=1))
    assert not world.said(MemberReady, generation=1)


def test_repeated_commands_repeat_the_answer_and_do_nothing_twice():
    world = World().tell(prepare(), prepare(), start(), start(), prepare())
    assert world.kinds() == ["MemberReady", "MemberReady", "MemberStarted", "MemberStarted", "MemberStarted"]
    assert len(world.did(act.SpawnTasks)) == 1
    world.tell(stop(grace_s=0)).wait(0.1)
    before = len(world.said(MemberStopped))
    world.tell(stop(), prepare())
    assert len(world.said(MemberStopped)) == before + 2
    assert len(world.opened) == 1


def test_start_without_prepare_is_told_that_nothing_runs():
    world = World().tell(start())
    assert world.kinds() == ["MemberStopped"]
    assert MemberStarted not in {type(r) for r in world.reports}


def test_forget_under_living_ranks_kills_first():
    world = World().running().tell(forget())
    assert not world.living()
    assert world.clean == [("1", 1)]
    assert world.tell(prepare()).carried == (), "what is forgotten does not come back"


def test_other_nodes_commands_are_not_ours():
    assert World().tell(replace(prepare(), node_id="n9")).carried == ()


# --------------------------------------------------------------------------------------------------------- its own end


def test_termination_stops_gently_and_exits_when_all_is_told():
    world = World().running("1").running("2")
    world.hear(hap.TerminationRequested())
    assert world.pages[key_of("1")]["stop"] is RankStopReason.DRAIN
    world.wait(5.1, renewing=True)
    assert world.exited
    assert len(world.said(MemberStopped, "1") + world.said(MemberStopped, "2")) == 2


def test_an_unwatched_supervisor_reports_that_it_leaves_once_no_process_is_left():
    world = World(leaves_as=SupervisorId("s1")).running("1")
    world.hear(hap.TerminationRequested()).wait(4.9, renewing=True)
    assert not any(isinstance(report, NodeDied) for report in world.reports), "its ranks still run"
    world.wait(0.2, renewing=True)
    left = NodeDied(node_id=NODE, supervisor_id=SupervisorId("s1"), why=LEFT, confirmed=True, planned=True)
    assert isinstance(world.reports[world.reports.index(left) - 1], MemberStopped)
    assert world.exited


def test_a_supervisor_that_an_engine_watches_leaves_the_report_to_it():
    world = World().running("1")
    world.hear(hap.TerminationRequested()).wait(5.1, renewing=True)
    assert world.exited
    assert isinstance(world.reports[-1], MemberStopped)


def test_termination_during_a_stop_leaves_its_ranks_the_rest_of_their_grace():
    world = World().running()
    world.tell(stop(grace_s=5.0))
    world.hear(hap.TerminationRequested()).wait(4.9, renewing=True)
    assert world.supervisor.members()[0].phase is MemberPhase.STOPPING, "they save"
    world.wait(0.2, renewing=True)
    assert world.exited


def test_second_termination_does_not_wait():
    world = World().running()
    world.hear(hap.TerminationRequested())
    assert not world.exited
    world.hear(hap.TerminationRequested())
    assert world.exited


def test_ending_supervisor_takes_nothing_new():
    world = World().running()
    world.hear(hap.TerminationRequested())
    world.tell(prepare("2"))
    assert not world.said(MemberRefused, "2")[0].job_at_fault
    assert world.supervisor.members()[0].phase is MemberPhase.STOPPING


def test_a_checkpoint_that_reaches_the_head_after_its_gang_started_again_is_published():
    """Found by reading: the generation it was made in was gone, and the newest checkpoint with it."""
    world = World().running().tell(stop()).end(0).end(1).running(generation=1)
    saved = hap.CheckpointReported(
        key=key_of(), step=40, path="/c/step-00000040", digest="d", size_bytes=1, stall_s=0.0, write_s=0.0, at_s=0.0
    )
    world.hear(saved)
    (event,) = world.said(CheckpointSaved)
    assert (event.resume.epoch, event.resume.step, event.generation) == (1, 40, 0)
    world.hear(replace(saved, key=key_of(epoch=2)), replace(saved, key=key_of(job="2")))
    assert len(world.said(CheckpointSaved)) == 1


def save(step, folder="/c", **given):
    return hap.CheckpointReported(
        key=key_of(**given),
        step=step,
        path=f"{folder}/step-{step:08d}",
        digest="d",
        size_bytes=1,
        stall_s=0.0,
        write_s=0.0,
        at_s=0.0,
    )


def steps_told(world):
    return [event.resume.step for event in world.said(CheckpointSaved)]


def test_every_checkpoint_of_a_program_that_saves_often_is_told_at_once():
    world = World().running()
    for step in range(300):
        world.wait(1 / REPORTS_PER_S, renewing=True).hear(save(step))
        assert steps_told(world)[-1] == step
    assert world.did(act.AppendNote) == []


def test_checkpoints_heard_all_at_once_after_a_busy_while_are_all_told():
    world = World().running().hear(*map(save, range(BURST_MAX)))
    assert steps_told(world) == list(range(BURST_MAX))


def test_of_a_flood_of_checkpoints_a_few_are_told_and_the_newest_always():
    """50,000 reports in a second were as many lines of the job's history, for good."""
    world = World().running()
    for step in range(10_000):
        if step % 1000 == 0:
            world.wait(0.1, renewing=True)
        world.hear(save(step))
    assert len(steps_told(world)) <= BURST_MAX + REPORTS_PER_S
    world.wait(1 / REPORTS_PER_S, renewing=True)
    assert steps_told(world)[-1] == 9999, "once the pause is over"
    world.wait(10, renewing=True)
    assert steps_told(world)[-2:] != [9999, 9999], "and once"
    world.tell(stop(grace_s=1)).wait(3, renewing=True)
    (note,) = world.did(act.AppendNote)
    passed_over = 10_000 - len(steps_told(world))
    assert note.text.startswith(
        f"{passed_over} checkpoints were not reported to the head: the job made more than {REPORTS_PER_S} a second"
    )


def test_what_was_passed_over_is_removed_once_a_newer_one_is_told():
    """Found by reading: the head never heard of it, so nobody ever removed it from the disk."""
    world = World().running()
    order = world.supervisor.members()[0].prepare
    folder = order.checkpoint_dir
    for step in range(300):
        world.wait(0.02, renewing=True).hear(save(step, folder))
    world.hear(*[save(step, "/elsewhere") for step in range(300, 310)]).wait(10, renewing=True)
    told = [event.resume.path for event in world.said(CheckpointSaved)]
    removed = [path for action in world.did(act.RemoveCheckpoints) for path in action.paths]
    assert {action.user for action in world.did(act.RemoveCheckpoints)} == {order.user}
    assert sorted([*told, *removed]) == sorted(
        [*(save(step, folder).path for step in range(300)), "/elsewhere/step-00000309"]
    )


def test_the_two_that_the_head_keeps_are_not_removed_though_they_are_made_again():
    folder = World().running().supervisor.members()[0].prepare.checkpoint_dir
    world = World().running().hear(*[save(step, folder) for step in range(BURST_MAX)])
    kept = [BURST_MAX - 2, BURST_MAX - 1]
    world.hear(*[save(step, folder) for step in (*kept, BURST_MAX, BURST_MAX + 1)]).wait(1, renewing=True)
    (removal,) = world.did(act.RemoveCheckpoints)
    assert removal.paths == (save(BURST_MAX, folder).path,)


def test_last_checkpoint_is_told_before_the_end():
    world = World().running().hear(*map(save, range(1000))).end(0).end(1)
    assert steps_told(world)[-1] == 999
    told = [type(event) for event in world.reports]
    assert told.index(MemberStopped) > len(told) - 1 - told[::-1].index(CheckpointSaved)


def test_what_waits_of_an_attempt_that_no_longer_counts_is_never_told_and_wakes_nobody():
    world = World(auto=False).running().do_work().do_work().hear(*map(save, range(1000)))
    world.renew(superseded=[(key_of().job_id, key_of().epoch)])
    told = len(steps_told(world))
    world.wait(5)
    assert len(steps_told(world)) == told == BURST_MAX


def test_a_kill_that_failed_is_told_and_tried_again():
    world = World(auto=False).running().do_work().do_work()
    world.tell(stop(grace_s=1)).wait(1.5, renewing=True)
    world.work.clear()  # what would confirm the kill fails
    world.hear(hap.MemberKilled(key=key_of(), fault="OSError: too many open files"))
    assert world.said(MemberStopped) == []
    assert any("too many open files" in note.text for note in world.did(act.AppendNote))
    world.auto = True
    world.wait(KILL_AGAIN_S + 0.1, renewing=True)
    assert len(world.did(act.KillMember)) == 2
    assert len(world.said(MemberStopped)) == 1
