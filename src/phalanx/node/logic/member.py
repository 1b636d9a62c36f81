"""One node's part of one generation of an attempt: its phases, and its reaction to each event.

Functions take a member and an event and return the new member and actions; `supervisor.py` calls them. Members do not depend on each other.

    PREPARING -> READY -> STARTING -> RUNNING -> LINGERING -.
         |         |         |           |  '-> STOPPING ---+-> KILLING -> CLOSING -> STOPPED
         '---------+---------+-----------'------------------'

Freezing is independent of the phase (`frozen_ns`): ranks may be frozen while they run, stop, or linger.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from phalanx.core.state.commands import Prepare, StartTasks, StopTasks
from phalanx.core.state.events import MemberFroze, MemberHung, MemberReady, MemberStarted, TaskExited
from phalanx.core.work.allocation import Grant
from phalanx.core.work.attempt import TIME_LIMIT_NOTE, TaskExit
from phalanx.node.logic import rendezvous
from phalanx.node.logic.actions import (
    Action,
    DeleteCheckpoints,
    Freeze,
    Kill,
    Note,
    PrepareMember,
    ProbeEmpty,
    Report,
    Signal,
    SpawnTasks,
    TakeStacks,
    Thaw,
    WindUp,
    WritePage,
)
from phalanx.node.logic.happenings import CheckpointReported, Hung, Killed, MemberKey, Place, Prepared, TaskEnded, Unfit
from phalanx.node.logic.kept import keeps_checkpoints
from phalanx.node.logic.lease import NS_PER_S, may_thaw
from phalanx.node.logic.saves import PER_S, Saves, event_of
from phalanx.wire.rank import StopReason

LINGER_S: Final = 2.0  # time for child processes of ended tasks (a logger, a data loader) to end by themselves
KILL_AGAIN_S: Final = 5.0  # a process in an uninterruptible call dies only when the call ends, so the kill is repeated
_SIGKILL: Final = 9


class Phase(enum.StrEnum):
    """The phases of a member."""

    PREPARING = "preparing"
    READY = "ready"  # waits at the gang barrier, or past it for a lease
    STARTING = "starting"
    RUNNING = "running"
    LINGERING = "lingering"  # every task ended by itself; their child processes have until `timer_ns`
    STOPPING = "stopping"  # SIGTERM is sent; SIGKILL follows at `timer_ns`
    KILLING = "killing"
    CLOSING = "closing"  # nothing runs; output is being drained
    STOPPED = "stopped"  # reported; only the scratch folder is left


UNHARMED_BY_LAPSE: Final = frozenset({Phase.KILLING, Phase.CLOSING, Phase.STOPPED})
"""Phases that an expired lease does not affect: all remaining processes are being killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The time of a step: CLOCK_BOOTTIME for decisions, Unix time for reports."""

    ns: int
    unix_s: float

    def after(self, seconds: float) -> int:
        """CLOCK_BOOTTIME `seconds` from now."""
        return self.ns + int(seconds * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """See the module. Times are CLOCK_BOOTTIME, 0 for "not yet".

    Attributes:
        grant: this node's part of the allocation.
        timer_ns: when the current phase times out; 0 without a time-out.
        ready: the result of preparation; repeated when the head asks again.
        start: the start command, once the barrier is passed; stored while no lease permits the start.
        spawned_ns: when the tasks were started.
        ended: ranks whose end is reported.
        held: ends seen while other tasks were still starting.
        asked_ns: when we first asked the tasks to end; later ends count as caused by us.
        frozen_ns: end of the lease whose expiry froze it; 0 while it is not frozen.
        bind_failed: rank 0 failed within the first seconds; its output may show that the port was in use.
        refusal: why it cannot run; reported once none of its processes is left.
        saves: the checkpoints that its program reported.
        superseded: a newer epoch is current: end this one and report none of its results as current.
        forgotten: the head has asked to forget the attempt, or never will ask.
    """

    key: MemberKey
    prepare: Prepare
    grant: Grant
    job_deadline_ns: int = 0
    phase: Phase = Phase.PREPARING
    timer_ns: int = 0
    ready: Prepared | None = None
    start: StartTasks | None = None
    spawned_ns: int = 0
    ended: frozenset[int] = field(default=frozenset())
    held: tuple[TaskEnded, ...] = ()
    asked_ns: int = 0
    stop_why: str = ""
    frozen_ns: int = 0
    bind_failed: bool = False
    refusal: Unfit | None = None
    saves: Saves = field(default_factory=Saves)
    superseded: bool = False
    forgotten: bool = False

    @property
    def place(self) -> Place:
        """Its epoch and generation, comparable."""
        return Place(self.key.epoch, self.key.generation)

    @property
    def all_ended(self) -> bool:
        """Whether all tasks of this node have ended."""
        return len(self.ended) >= self.grant.tasks


Turn: TypeAlias = tuple[Member, list[Action]]


# --------------------------------------------------------------------------------------------------------------- start


def begin(prepare: Prepare, grant: Grant, now: Now) -> Turn:
    """Create a member, and the action that prepares it."""
    key = MemberKey(prepare.job_id, prepare.epoch, prepare.generation)
    left_s = None if prepare.deadline_s is None else prepare.deadline_s - now.unix_s
    job_deadline_ns = 0 if left_s is None else max(1, now.after(left_s))
    member = Member(key=key, prepare=prepare, grant=grant, job_deadline_ns=job_deadline_ns)
    return member, [PrepareMember(key=key, prepare=prepare)]


def prepared(member: Member, found: Prepared) -> Turn:
    """Move a prepared member to the gang barrier."""
    if member.phase is not Phase.PREPARING:
        return member, []
    member = replace(member, phase=Phase.READY, ready=found)
    return member, [say_ready(member)]


def unfit(member: Member, found: Unfit, now: Now) -> Turn:
    """Kill a member that cannot run. The refusal is reported when none of its processes is left: the head counts it as the member's end."""
    if member.phase not in {Phase.PREPARING, Phase.STARTING}:
        return member, []
    return kill(replace(member, refusal=found), now)


def pass_barrier(member: Member, start: StartTasks, *, lease_over: bool, deadline_ns: int, now: Now) -> Turn:
    """Start the tasks, or store the command until there is a lease."""
    if member.phase is not Phase.READY:
        return member, []
    if lease_over or member.frozen_ns:
        return replace(member, start=start), []
    member = replace(member, phase=Phase.STARTING, start=start, spawned_ns=now.ns)
    order = SpawnTasks(
        key=member.key,
        prepare=member.prepare,
        start=start,
        deadline_ns=deadline_ns,
        job_deadline_ns=member.job_deadline_ns,
    )
    return member, [order]


def spawned(member: Member, now: Now) -> Turn:
    """Handle that every task is exec'd; some may have ended already."""
    if member.phase is not Phase.STARTING:
        return member, []
    member = replace(member, phase=Phase.RUNNING)
    actions: list[Action] = [say_started(member, now)]
    member, ends = _report_held(member, now)
    actions += ends
    if member.all_ended:
        # An earlier "empty" may have come before the last task started: check again.
        actions.append(ProbeEmpty(key=member.key))
    return member, actions


# ----------------------------------------------------------------------------------------------------------------- end


def task_ended(member: Member, end: TaskEnded, now: Now) -> Turn:
    """Report the end of a task; after the last one, wait for the processes it left behind."""
    if member.phase in {Phase.CLOSING, Phase.STOPPED} or end.rank in member.ended:
        return member, []
    if member.phase is Phase.STARTING:  # reported after the start of all tasks, so that the story is in order
        return replace(member, held=(*member.held, end)), []
    by_us = member.asked_ns != 0 and end.ended_ns >= member.asked_ns
    bad = end.code != 0
    early = end.ended_ns - member.spawned_ns < rendezvous.BIND_WINDOW_S * NS_PER_S
    member = replace(
        member,
        ended=member.ended | {end.rank},
        bind_failed=member.bind_failed
        or (end.rank == 0 and bad and early and not by_us and member.grant.node_rank == 0),
    )
    actions: list[Action] = [] if member.superseded else [Report(event=_exit_event(member, end, by_us=by_us))]
    if member.all_ended and member.phase in {Phase.RUNNING, Phase.STOPPING}:
        linger_ns = now.after(LINGER_S)
        timer_ns = linger_ns if member.phase is Phase.RUNNING else min(member.timer_ns, linger_ns)
        phase = Phase.LINGERING if member.phase is Phase.RUNNING else Phase.STOPPING
        member = replace(member, phase=phase, timer_ns=timer_ns)
        if end.evidence is not None:  # an "empty" may have come while the evidence was collected
            actions.append(ProbeEmpty(key=member.key))
    return member, actions


def hung(member: Member, found: Hung) -> Turn:
    """Report that the ranks make no steps. The head decides, because only it can stop the whole gang."""
    if member.phase is not Phase.RUNNING or member.frozen_ns or member.superseded or member.asked_ns:
        return member, []
    key, silence = member.key, found.silence
    event = MemberHung(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        silent_s=silence.silent_s,
        limit_s=silence.limit_s,
        step=silence.step,
    )
    return member, [Report(event=event)]


def _report_held(member: Member, now: Now) -> Turn:
    """Report the tasks that ended before the last one started."""
    held, member = member.held, replace(member, held=())
    actions: list[Action] = []
    for end in held:
        member, reports = task_ended(member, end, now)
        actions += reports
    return member, actions


def stop(member: Member, command: StopTasks, now: Now) -> Turn:
    """Ask running tasks to end, and SIGKILL them after the grace. Members that do not run yet are killed immediately. Idempotent."""
    match member.phase:
        case Phase.RUNNING:
            member, actions = _terminate(
                member, reason=_stop_reason(command.reason), grace_s=command.grace_s, why=command.reason, now=now
            )
            if _stop_reason(command.reason) is StopReason.HANG:  # before the signal, which changes the stacks
                actions.insert(0, TakeStacks(key=member.key))
            return member, actions
        case Phase.STOPPING:
            # A repeated stop, perhaps for a more urgent reason, may shorten the grace but never extends it.
            timer_ns = min(member.timer_ns, now.after(command.grace_s))
            page = WritePage(key=member.key, stop=_stop_reason(command.reason), stop_by_ns=timer_ns)
            return replace(member, timer_ns=timer_ns), [page]
        case Phase.PREPARING | Phase.READY | Phase.STARTING | Phase.LINGERING:
            return kill(replace(member, stop_why=command.reason), now)
        case Phase.KILLING | Phase.CLOSING | Phase.STOPPED:
            return member, []


def kill(member: Member, now: Now) -> Turn:
    """Kill all processes of the member immediately. Idempotent."""
    if member.phase in {Phase.KILLING, Phase.CLOSING, Phase.STOPPED}:
        return member, []
    member = replace(member, phase=Phase.KILLING, timer_ns=0, asked_ns=member.asked_ns or now.ns)
    return member, [Kill(key=member.key)]


def supersede(member: Member, now: Now) -> Turn:
    """Kill a member that a newer epoch replaced; nothing that it does counts any more."""
    if member.superseded:
        return member, []
    member = replace(member, superseded=True, forgotten=True, saves=Saves())
    page = WritePage(key=member.key, stop=StopReason.SUPERSEDED, stop_by_ns=now.ns)
    member, actions = kill(member, now)
    return member, [page, *actions]


def emptied(member: Member) -> Turn:
    """Close a member without processes. Ignored while tasks start or setup runs; a kill has its own answer."""
    if not (member.phase in {Phase.STOPPING, Phase.LINGERING} and member.all_ended):
        return member, []
    return _wind_up(member)


def _wind_up(member: Member) -> Turn:
    tail_of = 0 if member.bind_failed else None
    return replace(member, phase=Phase.CLOSING, timer_ns=0), [WindUp(key=member.key, tail_of=tail_of)]


def killed(member: Member, done: Killed, now: Now) -> Turn:
    """Close a killed member; repeat the kill if processes survived or the kill itself failed."""
    if member.phase is not Phase.KILLING:
        return member, []
    if done.fault:
        text = f"killing its processes failed ({done.fault}); its devices stay in use; retrying in {KILL_AGAIN_S:.0f} s"
        return replace(member, timer_ns=now.after(KILL_AGAIN_S)), [_note(member, text)]
    leftover = done.leftover
    if not leftover:
        member, ends = _report_held(member, now)
        member, actions = _wind_up(member)
        return member, [*ends, *actions]
    pids = ", ".join(str(pid) for pid in leftover[:8])
    text = f"processes {pids} survive SIGKILL (in an uninterruptible call?); their devices stay in use; retrying in {KILL_AGAIN_S:.0f} s"
    return replace(member, timer_ns=now.after(KILL_AGAIN_S)), [_note(member, text)]


def time_out(member: Member, now: Now) -> Turn:
    """Act on timers: the end of a grace or of lingering, a repeated kill, or the job's time limit when the head did not stop it."""
    if member.timer_ns and now.ns >= member.timer_ns:
        if member.phase is Phase.KILLING:
            return replace(member, timer_ns=0), [Kill(key=member.key)]
        return kill(member, now)
    if now.ns >= limit_ns(member) > 0:
        if member.frozen_ns:
            return kill(replace(member, stop_why=TIME_LIMIT_NOTE), now)
        grace_s = member.prepare.spec.grace_s
        return _terminate(member, reason=StopReason.DEADLINE, grace_s=grace_s, why=TIME_LIMIT_NOTE, now=now)
    return member, []


def limit_ns(member: Member) -> int:
    """Return when the supervisor itself ends the tasks; 0 for never. This is one grace after the time limit, at which the head stops them."""
    if member.phase is not Phase.RUNNING or not member.job_deadline_ns:
        return 0
    return member.job_deadline_ns + int(member.prepare.spec.grace_s * NS_PER_S)


# ---------------------------------------------------------------------------------------------------------------- lease


def lapse(member: Member, lease_end_ns: int, now: Now) -> Turn:
    """Freeze a member whose lease has expired."""
    match member.phase:
        case _ if member.frozen_ns:
            return member, []
        case Phase.PREPARING | Phase.READY | Phase.RUNNING | Phase.STOPPING | Phase.LINGERING:
            # Also at the barrier: setup may have left processes running.
            return replace(member, frozen_ns=lease_end_ns), [Freeze(key=member.key)]
        case Phase.STARTING:
            # A task cannot be exec'd into a frozen cgroup, and one that has just started has nothing to lose.
            return _kill_frozen(replace(member, frozen_ns=lease_end_ns), now)
        case Phase.KILLING | Phase.CLOSING | Phase.STOPPED:
            return member, []


def renew(member: Member, deadline_ns: int, now: Now, *, decided: bool) -> Turn:
    """Extend the lease page, or thaw the member. `decided`: the renewal's answer confirms that this epoch is current."""
    if not member.frozen_ns:
        page = WritePage(key=member.key, deadline_ns=deadline_ns)
        has_page = member.phase in {Phase.STARTING, Phase.RUNNING, Phase.STOPPING, Phase.LINGERING}
        return member, [page] if has_page else []
    if not decided or member.phase in {Phase.KILLING, Phase.CLOSING, Phase.STOPPED}:
        return member, []
    frozen_ns = max(0, now.ns - member.frozen_ns)
    setup = member.phase in {Phase.PREPARING, Phase.READY}  # no collectives yet: any length of freeze is harmless
    if not setup and not may_thaw(frozen_ns, member.prepare.spec.collective_timeout_s):
        return _kill_frozen(member, now)
    actions: list[Action] = [] if setup else [WritePage(key=member.key, deadline_ns=deadline_ns)]
    actions.append(Thaw(key=member.key))
    if member.phase is Phase.RUNNING:
        actions.append(Report(event=_froze_event(member, frozen_ns, thawed=True)))
    return replace(member, frozen_ns=0), actions


def freeze_done(member: Member, now: Now, *, still: bool) -> Turn:
    """Kill a member that could not be frozen: it must not run without a lease."""
    if still or not member.frozen_ns or member.phase in {Phase.KILLING, Phase.CLOSING, Phase.STOPPED}:
        return member, []
    after, actions = _kill_frozen(member, now)
    return after, [_note(member, "processes could not be frozen when the lease expired; killing them"), *actions]


def _kill_frozen(member: Member, now: Now) -> Turn:
    frozen_ns = max(0, now.ns - member.frozen_ns)
    after, actions = kill(member, now)
    report = member.phase in {Phase.STARTING, Phase.RUNNING} and not member.superseded
    return after, [Report(event=_froze_event(member, frozen_ns, thawed=False)), *actions] if report else actions


# -------------------------------------------------------------------------------------------------------------- reports


def say_ready(member: Member) -> Report:
    """Report the result of preparation."""
    assert member.ready is not None
    key, node_id = member.key, member.grant.node_id
    return Report(
        event=MemberReady(
            job_id=key.job_id,
            epoch=key.epoch,
            generation=key.generation,
            node_id=node_id,
            port=member.ready.port,
            resume=member.ready.resume,
            bad_links=member.ready.bad_links,
            clock_off_s=member.ready.clock_off_s,
        )
    )


def say_started(member: Member, now: Now) -> Report:
    """Report that all tasks are exec'd."""
    key, node_id = member.key, member.grant.node_id
    return Report(
        event=MemberStarted(
            job_id=key.job_id, epoch=key.epoch, generation=key.generation, node_id=node_id, at_s=now.unix_s
        )
    )


def saved(member: Member, report: CheckpointReported, now: Now) -> Turn:
    """Handle a checkpoint of rank 0. The head, which knows the epochs, refuses one that was made too late."""
    if member.superseded:
        return member, []
    member = replace(member, saves=member.saves.heard(report))
    return _report_saved(member, now) if member.phase is Phase.STOPPED else tell_saved(member, now)


def tell_saved(member: Member, now: Now) -> Turn:
    """Report the newest waiting checkpoint, if it is due."""
    return _report_saved(member, now) if now.ns >= member.saves.due_ns else (member, [])


def tell_last_saved(member: Member, now: Now) -> Turn:
    """Report the checkpoint that still waits before the member's end, and note how many were skipped."""
    count = member.saves.passed_over
    member, actions = _report_saved(member, now)
    if count:
        text = f"{count} checkpoints were not reported to the head: the job made more than {PER_S} a second, and newer ones are reported"
        actions.append(_note(member, text))
    return member, actions


def _report_saved(member: Member, now: Now) -> Turn:
    report, unneeded = member.saves.waiting, member.saves.unneeded
    if report is None:
        return member, []
    actions: list[Action] = [Report(event=event_of(report, member.grant.node_id))]
    prepare = member.prepare
    paths = tuple(path for path in unneeded if path.startswith(f"{prepare.checkpoint_dir}/"))
    if paths and not keeps_checkpoints(prepare):  # else the head and the node remove them by themselves
        actions.append(DeleteCheckpoints(job_id=member.key.job_id, paths=paths, user=prepare.user))
    return replace(member, saves=member.saves.told(now.ns)), actions


def _exit_event(member: Member, end: TaskEnded, *, by_us: bool) -> TaskExited:
    key = member.key
    code, signal, note = end.code, end.signal, member.stop_why if by_us else ""
    if end.lost:
        code, signal, note = None, _SIGKILL, "the process that waited for it was killed; its exit status is unknown"
    exit = TaskExit(
        rank=end.rank,
        node_id=member.grant.node_id,
        code=code,
        signal=signal,
        by_us=by_us,
        at_s=end.at_s,
        note=note,
        evidence=end.evidence,
    )
    return TaskExited(job_id=key.job_id, epoch=key.epoch, generation=key.generation, exit=exit)


def _froze_event(member: Member, frozen_ns: int, *, thawed: bool) -> MemberFroze:
    key = member.key
    return MemberFroze(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        frozen_s=frozen_ns / NS_PER_S,
        thawed=thawed,
    )


def _terminate(member: Member, *, reason: StopReason, grace_s: float, why: str, now: Now) -> Turn:
    deadline_ns = now.after(grace_s)
    member = replace(
        member,
        phase=Phase.STOPPING,
        timer_ns=max(1, deadline_ns),
        asked_ns=member.asked_ns or now.ns,
        stop_why=member.stop_why or why,
    )
    page = WritePage(key=member.key, stop=reason, stop_by_ns=deadline_ns)
    return member, [page, Signal(key=member.key)]


def _stop_reason(text: str) -> StopReason:
    """Return the reason by its lower-case name; an unknown one, of a newer head, counts as CANCELLED."""
    return StopReason.__members__.get(text.upper(), StopReason.CANCELLED)


def _note(member: Member, text: str) -> Note:
    return Note(job_id=member.key.job_id, epoch=member.key.epoch, text=text)
