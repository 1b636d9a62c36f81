"""One node's part of one generation of an attempt: its phases, and its reaction to each event.

Functions take a member and an event and return the new member and actions; `supervisor.py` calls them. Members do not depend on each other.
The phases: `local_member.py`.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.state.commands import PrepareTasks, RunSleepHook, StartTasks, StopTasks
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import TIME_LIMIT_NOTE
from phalanx.node.logic.actions import (
    CallSleepHook,
    CheckEmpty,
    DrainOutput,
    DumpStacks,
    FreezeMember,
    KillMember,
    PrepareMember,
    RemoveCheckpoints,
    SendEvent,
    SendSigterm,
    SpawnTasks,
    SupervisorAction,
    ThawMember,
    UpdateLeasePage,
)
from phalanx.node.logic.checkpoint_report_limiter import REPORTS_PER_S, CheckpointReportLimiter, checkpoint_event
from phalanx.node.logic.events import (
    CheckpointReported,
    HangDetected,
    MemberKey,
    MemberKilled,
    MemberPrepared,
    MemberStartFailed,
    MemoryExceeded,
    ReadinessProbed,
    SleepHookAnswered,
    TaskEnded,
)
from phalanx.node.logic.lease import NS_PER_S, may_thaw
from phalanx.node.logic.local_copies import head_stores_checkpoints
from phalanx.node.logic.local_member import (
    LEASE_INDEPENDENT_PHASES,
    LocalMember,
    MemberPhase,
    MemberTransition,
    StepClock,
)
from phalanx.node.logic.member_reports import (
    SIGKILL_NUMBER,
    exit_report,
    freeze_report,
    hang_report,
    note,
    readiness_report,
    ready_report,
    sleep_hook_answer,
    started_report,
)
from phalanx.node.logic.variables import rendezvous
from phalanx.wire.rank import RankStopReason

LINGER_S: Final = 2.0  # time for child processes of ended tasks (a logger, a data loader) to end by themselves
KILL_AGAIN_S: Final = 5.0  # a process in an uninterruptible call dies only when the call ends, so the kill is repeated
_SHELL_SIGKILL: Final = 128 + SIGKILL_NUMBER  # as a shell reports it


# --------------------------------------------------------------------------------------------------------------- start


def begin(prepare: PrepareTasks, grant: NodeGrant, now: StepClock) -> MemberTransition:
    """Create a member, and the action that prepares it."""
    key = MemberKey(prepare.job_id, prepare.epoch, prepare.generation)
    left_s = None if prepare.deadline_s is None else prepare.deadline_s - now.unix_s
    job_deadline_ns = 0 if left_s is None else max(1, now.after(left_s))
    member = LocalMember(key=key, prepare=prepare, grant=grant, job_deadline_ns=job_deadline_ns)
    return member, [PrepareMember(key=key, prepare=prepare)]


def on_prepared(member: LocalMember, found: MemberPrepared) -> MemberTransition:
    """Move a prepared member to the gang barrier."""
    if member.phase is not MemberPhase.PREPARING:
        return member, []
    member = replace(member, phase=MemberPhase.READY, ready=found)
    return member, [ready_report(member)]


def on_start_failed(member: LocalMember, found: MemberStartFailed, now: StepClock) -> MemberTransition:
    """Kill a member that cannot run. The refusal is reported when none of its processes is left: the head counts it as the member's end."""
    if member.phase not in {MemberPhase.PREPARING, MemberPhase.STARTING}:
        return member, []
    return kill(replace(member, refusal=found), now)


def pass_barrier(
    member: LocalMember, start: StartTasks, *, lease_expired: bool, deadline_ns: int, now: StepClock
) -> MemberTransition:
    """Start the tasks, or store the command until there is a lease."""
    if member.phase is not MemberPhase.READY:
        return member, []
    if lease_expired or member.frozen_ns:
        return replace(member, start=start), []
    member = replace(member, phase=MemberPhase.STARTING, start=start, spawned_ns=now.ns)
    order = SpawnTasks(
        key=member.key,
        prepare=member.prepare,
        start=start,
        deadline_ns=deadline_ns,
        job_deadline_ns=member.job_deadline_ns,
    )
    return member, [order]


def on_spawned(member: LocalMember, now: StepClock) -> MemberTransition:
    """Handle that every task is exec'd; some may have ended already."""
    if member.phase is not MemberPhase.STARTING:
        return member, []
    member = replace(member, phase=MemberPhase.RUNNING)
    actions: list[SupervisorAction] = [started_report(member, now)]
    member, ends = _report_held(member, now)
    actions += ends
    if member.all_ended:
        # An earlier "empty" may have come before the last task started: check again.
        actions.append(CheckEmpty(key=member.key))
    return member, actions


# ----------------------------------------------------------------------------------------------------------------- end


def on_task_ended(member: LocalMember, end: TaskEnded, now: StepClock) -> MemberTransition:
    """Report the end of a task; after the last one, wait for the processes it left behind."""
    if member.phase in {MemberPhase.CLOSING, MemberPhase.STOPPED} or end.rank in member.ended:
        return member, []
    if member.phase is MemberPhase.STARTING:  # reported after the start of all tasks, so that the history is in order
        return replace(member, held_exits=(*member.held_exits, end)), []
    by_us = member.stop_requested_ns != 0 and end.ended_ns >= member.stop_requested_ns and not member.out_of_memory
    bad = end.code != 0
    early = end.ended_ns - member.spawned_ns < rendezvous.BIND_WINDOW_S * NS_PER_S
    member = replace(
        member,
        ended=member.ended | {end.rank},
        bind_failed=member.bind_failed
        or (end.rank == 0 and bad and early and not by_us and member.grant.node_rank == 0),
    )
    actions: list[SupervisorAction] = [] if member.superseded else [exit_report(member, end, by_us=by_us)]
    if member.all_ended and member.phase in {MemberPhase.RUNNING, MemberPhase.STOPPING}:
        linger_ns = now.after(LINGER_S)
        timer_ns = linger_ns if member.phase is MemberPhase.RUNNING else min(member.timer_ns, linger_ns)
        phase = MemberPhase.LINGERING if member.phase is MemberPhase.RUNNING else MemberPhase.STOPPING
        member = replace(member, phase=phase, timer_ns=timer_ns)
        if end.evidence is not None:  # an "empty" may have come while the evidence was collected
            actions.append(CheckEmpty(key=member.key))
    return member, actions


def on_hang(member: LocalMember, found: HangDetected) -> MemberTransition:
    """Report that the ranks make no steps. The head decides, because only it can stop the whole gang."""
    if member.phase is not MemberPhase.RUNNING or member.frozen_ns or member.superseded or member.stop_requested_ns:
        return member, []
    return member, [hang_report(member, found)]


def on_memory_exceeded(member: LocalMember, found: MemoryExceeded, now: StepClock) -> MemberTransition:
    """Kill a member that needs more memory than its job asked for. No grace: the memory that it takes meanwhile is that of others.

    The exits count as the job's own, unless the member was asked to end before.
    """
    if member.phase in LEASE_INDEPENDENT_PHASES or member.all_ended:
        return member, []
    if member.phase in {MemberPhase.PREPARING, MemberPhase.READY}:
        why = f"setup ended: {found.use}"
        refusal = MemberStartFailed(key=member.key, why=why, charge=True, exit_code=_SHELL_SIGKILL)
        return kill(replace(member, refusal=refusal), now)
    killing = note(member, f"{found.use}; killing its processes")
    member, actions = kill(replace(member, out_of_memory=member.stop_requested_ns == 0), now)
    return member, [killing, *actions]


def on_readiness(member: LocalMember, found: ReadinessProbed) -> MemberTransition:
    """Report that a replica became ready or no longer answers. Its end is reported anyway."""
    if member.phase is not MemberPhase.RUNNING or member.superseded or member.stop_requested_ns:
        return member, []
    return member, [readiness_report(member, found)]


def run_sleep_hook(member: LocalMember, command: RunSleepHook) -> MemberTransition:
    """Call a hook of a later turn than the last one, or repeat the answer of the last one.

    A command of an earlier turn arrived late. It must not wake a program whose devices others may hold.
    """
    if member.phase is not MemberPhase.RUNNING or member.superseded or command.turn < member.hook_turn:
        return member, []
    if command.turn == member.hook_turn:
        return member, [] if member.hook_answer is None else [SendEvent(event=member.hook_answer)]
    call = CallSleepHook(key=member.key, turn=command.turn, sleep=command.sleep)
    return replace(member, hook_turn=command.turn, hook_answer=None), [call]


def on_sleep_hook_answered(member: LocalMember, found: SleepHookAnswered) -> MemberTransition:
    """Report the answer of a hook. Of a member that is asked to end, its end is reported instead."""
    if found.turn != member.hook_turn or member.phase is not MemberPhase.RUNNING or member.superseded:
        return member, []
    answer = sleep_hook_answer(member, found)
    return replace(member, hook_answer=answer), [SendEvent(event=answer)]


def _report_held(member: LocalMember, now: StepClock) -> MemberTransition:
    """Report the tasks that ended before the last one started."""
    held, member = member.held_exits, replace(member, held_exits=())
    actions: list[SupervisorAction] = []
    for end in held:
        member, reports = on_task_ended(member, end, now)
        actions += reports
    return member, actions


def stop(member: LocalMember, command: StopTasks, now: StepClock) -> MemberTransition:
    """Ask running tasks to end, and SIGKILL them after the grace. Members that do not run yet are killed immediately. Idempotent."""
    match member.phase:
        case MemberPhase.RUNNING:
            member, actions = _terminate(
                member, reason=_stop_reason(command.reason), grace_s=command.grace_s, why=command.reason, now=now
            )
            if _stop_reason(command.reason) is RankStopReason.HANG:  # before the signal, which changes the stacks
                actions.insert(0, DumpStacks(key=member.key))
            return member, actions
        case MemberPhase.STOPPING:
            # A repeated stop, perhaps for a more urgent reason, may shorten the grace but never extends it.
            timer_ns = min(member.timer_ns, now.after(command.grace_s))
            page = UpdateLeasePage(key=member.key, stop=_stop_reason(command.reason), stop_by_ns=timer_ns)
            return replace(member, timer_ns=timer_ns), [page]
        case MemberPhase.PREPARING | MemberPhase.READY | MemberPhase.STARTING | MemberPhase.LINGERING:
            page = stop_page(member.key, command, now)
            member, actions = kill(replace(member, stop_why=command.reason), now)
            return member, [page, *actions]
        case MemberPhase.KILLING | MemberPhase.CLOSING | MemberPhase.STOPPED:
            return member, []


def stop_page(key: MemberKey, command: StopTasks, now: StepClock) -> UpdateLeasePage:
    """Return the page of a member that is stopped before its ranks run. A supervisor on a seat reports the reason to its engine."""
    return UpdateLeasePage(key=key, stop=_stop_reason(command.reason), stop_by_ns=now.ns)


def kill(member: LocalMember, now: StepClock) -> MemberTransition:
    """Kill all processes of the member immediately. Idempotent."""
    if member.phase in LEASE_INDEPENDENT_PHASES:
        return member, []
    member = replace(
        member, phase=MemberPhase.KILLING, timer_ns=0, stop_requested_ns=member.stop_requested_ns or now.ns
    )
    return member, [KillMember(key=member.key)]


def supersede(member: LocalMember, now: StepClock) -> MemberTransition:
    """Kill a member that a newer epoch replaced; nothing that it does counts any more."""
    if member.superseded:
        return member, []
    member = replace(member, superseded=True, forgotten=True, checkpoint_reports=CheckpointReportLimiter())
    page = UpdateLeasePage(key=member.key, stop=RankStopReason.SUPERSEDED, stop_by_ns=now.ns)
    member, actions = kill(member, now)
    return member, [page, *actions]


def on_emptied(member: LocalMember) -> MemberTransition:
    """Close a member without processes. Ignored while tasks start or setup runs; a kill has its own answer."""
    if not (member.phase in {MemberPhase.STOPPING, MemberPhase.LINGERING} and member.all_ended):
        return member, []
    return _wind_up(member)


def _wind_up(member: LocalMember) -> MemberTransition:
    tail_of = 0 if member.bind_failed else None
    return replace(member, phase=MemberPhase.CLOSING, timer_ns=0), [DrainOutput(key=member.key, tail_of=tail_of)]


def on_killed(member: LocalMember, done: MemberKilled, now: StepClock) -> MemberTransition:
    """Close a killed member; repeat the kill if processes survived or the kill itself failed."""
    if member.phase is not MemberPhase.KILLING:
        return member, []
    if done.fault:
        text = f"killing its processes failed ({done.fault}); its devices stay in use; retrying in {KILL_AGAIN_S:.0f} s"
        return replace(member, timer_ns=now.after(KILL_AGAIN_S)), [note(member, text)]
    leftover = done.leftover
    if not leftover:
        member, ends = _report_held(member, now)
        member, actions = _wind_up(member)
        return member, [*ends, *actions]
    pids = ", ".join(str(pid) for pid in leftover[:8])
    text = f"processes {pids} survive SIGKILL (in an uninterruptible call?); their devices stay in use; retrying in {KILL_AGAIN_S:.0f} s"
    return replace(member, timer_ns=now.after(KILL_AGAIN_S)), [note(member, text)]


def check_timers(member: LocalMember, now: StepClock) -> MemberTransition:
    """Act on timers: the end of a grace or of lingering, a repeated kill, or the job's time limit when the head did not stop it."""
    if member.timer_ns and now.ns >= member.timer_ns:
        if member.phase is MemberPhase.KILLING:
            return replace(member, timer_ns=0), [KillMember(key=member.key)]
        return kill(member, now)
    if now.ns >= time_limit_ns(member) > 0:
        if member.frozen_ns:
            return kill(replace(member, stop_why=TIME_LIMIT_NOTE), now)
        grace_s = member.prepare.spec.grace_s
        return _terminate(member, reason=RankStopReason.DEADLINE, grace_s=grace_s, why=TIME_LIMIT_NOTE, now=now)
    return member, []


def time_limit_ns(member: LocalMember) -> int:
    """Return when the supervisor itself ends the tasks; 0 for never. This is one grace after the time limit, at which the head stops them."""
    if member.phase is not MemberPhase.RUNNING or not member.job_deadline_ns:
        return 0
    return member.job_deadline_ns + int(member.prepare.spec.grace_s * NS_PER_S)


def due_ns(member: LocalMember) -> int:
    """Return when `check_timers` or `report_due_checkpoint` next has something to do; 0 for never."""
    known = (member.timer_ns, time_limit_ns(member), member.checkpoint_reports.due_ns)
    return min(filter(None, known), default=0)


# ---------------------------------------------------------------------------------------------------------------- lease


def on_lease_expired(member: LocalMember, lease_end_ns: int, now: StepClock) -> MemberTransition:
    """Freeze a member whose lease has expired."""
    match member.phase:
        case _ if member.frozen_ns:
            return member, []
        case (
            MemberPhase.PREPARING
            | MemberPhase.READY
            | MemberPhase.RUNNING
            | MemberPhase.STOPPING
            | MemberPhase.LINGERING
        ):
            # Also at the barrier: setup may have left processes running.
            return replace(member, frozen_ns=lease_end_ns), [FreezeMember(key=member.key)]
        case MemberPhase.STARTING:
            # A task cannot be exec'd into a frozen cgroup, and one that has just started has nothing to lose.
            return _kill_frozen(replace(member, frozen_ns=lease_end_ns), now)
        case MemberPhase.KILLING | MemberPhase.CLOSING | MemberPhase.STOPPED:
            return member, []


def on_lease_renewed(member: LocalMember, deadline_ns: int, now: StepClock, *, confirmed: bool) -> MemberTransition:
    """Extend the lease page, or thaw the member. `confirmed`: the renewal's answer confirms that this epoch is current."""
    if not member.frozen_ns:
        page = UpdateLeasePage(key=member.key, deadline_ns=deadline_ns)
        has_page = member.phase in {
            MemberPhase.STARTING,
            MemberPhase.RUNNING,
            MemberPhase.STOPPING,
            MemberPhase.LINGERING,
        }
        return member, [page] if has_page else []
    if not confirmed or member.phase in LEASE_INDEPENDENT_PHASES:
        return member, []
    frozen_ns = max(0, now.ns - member.frozen_ns)
    setup = member.phase in {
        MemberPhase.PREPARING,
        MemberPhase.READY,
    }  # no collectives yet: any length of freeze is harmless
    if not setup and not may_thaw(frozen_ns, member.prepare.spec.collective_timeout_s):
        return _kill_frozen(member, now)
    actions: list[SupervisorAction] = [] if setup else [UpdateLeasePage(key=member.key, deadline_ns=deadline_ns)]
    actions.append(ThawMember(key=member.key))
    if member.phase is MemberPhase.RUNNING:
        actions.append(freeze_report(member, frozen_ns, thawed=True))
    return replace(member, frozen_ns=0), actions


def on_freeze_finished(member: LocalMember, now: StepClock, *, frozen: bool) -> MemberTransition:
    """Kill a member that could not be frozen: it must not run without a lease."""
    if frozen or not member.frozen_ns or member.phase in LEASE_INDEPENDENT_PHASES:
        return member, []
    after, actions = _kill_frozen(member, now)
    return after, [note(member, "processes could not be frozen when the lease expired; killing them"), *actions]


def _kill_frozen(member: LocalMember, now: StepClock) -> MemberTransition:
    frozen_ns = max(0, now.ns - member.frozen_ns)
    after, actions = kill(member, now)
    report = member.phase in {MemberPhase.STARTING, MemberPhase.RUNNING} and not member.superseded
    return after, [freeze_report(member, frozen_ns, thawed=False), *actions] if report else actions


# -------------------------------------------------------------------------------------------------------------- reports


def on_checkpoint(member: LocalMember, report: CheckpointReported, now: StepClock) -> MemberTransition:
    """Handle a checkpoint of rank 0. The head, which knows the epochs, refuses one that was made too late."""
    if member.superseded:
        return member, []
    member = replace(member, checkpoint_reports=member.checkpoint_reports.add(report))
    return _report_saved(member, now) if member.phase is MemberPhase.STOPPED else report_due_checkpoint(member, now)


def report_due_checkpoint(member: LocalMember, now: StepClock) -> MemberTransition:
    """Report the newest waiting checkpoint, if it is due."""
    return _report_saved(member, now) if now.ns >= member.checkpoint_reports.due_ns else (member, [])


def report_last_checkpoint(member: LocalMember, now: StepClock) -> MemberTransition:
    """Report the checkpoint that still waits before the member's end, and note how many were skipped."""
    count = member.checkpoint_reports.skipped
    member, actions = _report_saved(member, now)
    if count:
        text = f"{count} checkpoints were not reported to the head: the job made more than {REPORTS_PER_S} a second, and newer ones are reported"
        actions.append(note(member, text))
    return member, actions


def _report_saved(member: LocalMember, now: StepClock) -> MemberTransition:
    report = member.checkpoint_reports.pending
    if report is None:
        return member, []
    unneeded = member.checkpoint_reports.removable_paths
    actions: list[SupervisorAction] = [SendEvent(event=checkpoint_event(report, member.grant.node_id))]
    prepare = member.prepare
    paths = tuple(path for path in unneeded if path.startswith(f"{prepare.checkpoint_dir}/"))
    if paths and not head_stores_checkpoints(prepare):  # else the head and the node remove them by themselves
        actions.append(RemoveCheckpoints(job_id=member.key.job_id, paths=paths, user=prepare.user))
    return replace(member, checkpoint_reports=member.checkpoint_reports.mark_reported(now.ns)), actions


def _terminate(
    member: LocalMember, *, reason: RankStopReason, grace_s: float, why: str, now: StepClock
) -> MemberTransition:
    deadline_ns = now.after(grace_s)
    member = replace(
        member,
        phase=MemberPhase.STOPPING,
        timer_ns=max(1, deadline_ns),
        stop_requested_ns=member.stop_requested_ns or now.ns,
        stop_why=member.stop_why or why,
    )
    page = UpdateLeasePage(key=member.key, stop=reason, stop_by_ns=deadline_ns)
    return member, [page, SendSigterm(key=member.key)]


def _stop_reason(text: str) -> RankStopReason:
    """Return the reason by its lower-case name; an unknown one, of a newer head, counts as CANCELLED."""
    return RankStopReason.__members__.get(text.upper(), RankStopReason.CANCELLED)
