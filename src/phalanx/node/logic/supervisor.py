"""The supervisor of one node: step(now, inbox) -> outbox, synchronous, without clock, thread or disk.

It has one member per job and one lease for all of them, and guarantees:
- Two generations of a job never run at once: a newer one is prepared only when no process of the older is left.
- A generation reported as stopped never starts later, even if commands are lost, duplicated or reordered (`_floor`).
- Every StopTasks is answered by MemberStopped, and only once it is true.
- It reports that it leaves only once no member is left (if `leaves_as` is given).
- Without a lease members are frozen. They thaw only after an answer that confirms their epoch as current.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

from phalanx.core.ids import Epoch, Generation, JobId, NodeId, SupervisorId
from phalanx.core.state import commands
from phalanx.core.state.commands import (
    CleanUpAttempt,
    PrepareTasks,
    SaveNow,
    StartTasks,
    StopTasks,
)
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.reports import MemberRefused, MemberStopped, NodeDied
from phalanx.node.logic import member as members
from phalanx.node.logic.actions import (
    AppendNote,
    ExitSupervisor,
    PublishMembers,
    RemoveCheckpoints,
    RemoveScratch,
    RenewLease,
    SendEvent,
    SetPowerLimits,
    SupervisorAction,
    UpdateLeasePage,
)
from phalanx.node.logic.events import (
    CheckpointReported,
    CommandReceived,
    FreezeFinished,
    GenerationId,
    HangDetected,
    LeaseRenewed,
    MemberEmptied,
    MemberKey,
    MemberKilled,
    MemberPrepared,
    MemberStartFailed,
    MemoryExceeded,
    OutputDrained,
    ReadinessProbed,
    SleepHookAnswered,
    SupervisorEvent,
    TaskEnded,
    TasksSpawned,
    TerminationRequested,
)
from phalanx.node.logic.lease import Lease
from phalanx.node.logic.local_member import (
    LEASE_INDEPENDENT_PHASES,
    LocalMember,
    MemberPhase,
    MemberTransition,
    StepClock,
)
from phalanx.node.logic.member_reports import ready_report, started_report
from phalanx.node.logic.utf8 import replace_invalid_utf8
from phalanx.node.logic.variables import rendezvous

STOPPED_GENERATIONS_MAX: Final = (
    20_000  # ended jobs stored to reject late commands; the head's mailboxes hold far fewer
)
TERMINATE_GRACE_MAX_S: Final = 8.0  # engines sweep the node 10 s after SIGTERM, unless they say another time
LEFT: Final = "it left the cluster"
_LAST: Final = Generation(1 << 62)
MemberEvent: TypeAlias = (
    MemberPrepared
    | MemberStartFailed
    | TasksSpawned
    | TaskEnded
    | MemberEmptied
    | MemberKilled
    | FreezeFinished
    | OutputDrained
    | CheckpointReported
    | HangDetected
    | MemoryExceeded
    | ReadinessProbed
    | SleepHookAnswered
)
"""The events of one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOutbox:
    """Actions in order, and the latest time of the next step (CLOCK_BOOTTIME; None: at the next event)."""

    actions: list[SupervisorAction]
    wake_ns: int | None


@dataclass(slots=True)
class _Slot:
    """One job on this node: its member, the command that waits for that one's end, and the generations whose end the head asked for."""

    member: LocalMember
    waiting: PrepareTasks | None = None
    pending_stops: set[GenerationId] = field(default_factory=set)
    _timed: LocalMember | None = None
    _due_ns: int = 0

    def due_ns(self) -> int:
        """Return when the member's next timer is due; 0 without one. Every step asks for every slot, so the answer is kept with its member."""
        if self._timed is not self.member:
            self._timed, self._due_ns = self.member, members.due_ns(self.member)
        return self._due_ns


class Supervisor:
    """See the module. Mutable; its shell calls `step` from one thread.

    `leaves_as`: the id under which it reports its own end to the head; None if an engine of the head watches it.
    `terminate_grace_s`: longest grace of its ranks when it is asked to end itself.
    """

    def __init__(
        self,
        node_id: NodeId,
        leaves_as: SupervisorId | None = None,
        *,
        terminate_grace_s: float = TERMINATE_GRACE_MAX_S,
    ) -> None:
        self._node_id = node_id
        self._terminate_grace_s = terminate_grace_s
        self._leaves_as = leaves_as
        self._slots: dict[JobId, _Slot] = {}
        self._floor: OrderedDict[JobId, GenerationId] = OrderedDict()
        self._lease = Lease()
        self._published: tuple[MemberKey, ...] = ()
        self._slots_changed = False
        self._ending = False
        self._out: list[SupervisorAction] = []

    def step(self, now_ns: int, inbox: Iterable[SupervisorEvent], *, unix_s: float) -> SupervisorOutbox:
        """Handle events in order, then timers up to `now_ns`."""
        now = StepClock(ns=now_ns, unix_s=unix_s)
        self._out = []
        for happening in inbox:
            self._on_event(happening, now)
        self._check_timers(now)
        self._publish_members()
        actions, self._out = self._out, []
        return SupervisorOutbox(actions=actions, wake_ns=self._next_wake_ns(now))

    @property
    def lease(self) -> Lease:
        """The current lease."""
        return self._lease

    def members(self) -> list[LocalMember]:
        """Return the members, in the order in which their jobs came."""
        return [slot.member for slot in self._slots.values()]

    # --------------------------------------------------------------------------------------------------------- events

    def _on_event(self, happening: SupervisorEvent, now: StepClock) -> None:
        match happening:
            case CommandReceived(command=command):
                self._on_command(command, now)
            case LeaseRenewed():
                self._renewed(happening, now)
            case TerminationRequested():
                self._terminate(now)
            case _:
                slot = self._slots.get(happening.key.job_id)
                if slot is not None and _concerns(happening, slot.member.key):
                    self._on_member_event(slot, happening, now)

    def _on_member_event(self, slot: _Slot, happening: MemberEvent, now: StepClock) -> None:
        member = slot.member
        match happening:
            case MemberPrepared():
                self._apply(slot, members.on_prepared(member, happening))
            case MemberStartFailed():
                self._apply(slot, members.on_start_failed(member, happening, now))
            case TasksSpawned():
                self._apply(slot, members.on_spawned(member, now))
            case TaskEnded():
                self._apply(slot, members.on_task_ended(member, happening, now))
            case MemberEmptied():
                self._apply(slot, members.on_emptied(member))
            case MemberKilled():
                self._apply(slot, members.on_killed(member, happening, now))
            case FreezeFinished(frozen=still):
                self._apply(slot, members.on_freeze_finished(member, now, frozen=still))
            case HangDetected():
                self._apply(slot, members.on_hang(member, happening))
            case MemoryExceeded():
                self._apply(slot, members.on_memory_exceeded(member, happening, now))
            case ReadinessProbed():
                self._apply(slot, members.on_readiness(member, happening))
            case SleepHookAnswered():
                self._apply(slot, members.on_sleep_hook_answered(member, happening))
            case CheckpointReported():
                self._apply(slot, members.on_checkpoint(member, happening, now))
            case OutputDrained():
                if member.phase is MemberPhase.CLOSING:
                    self._on_member_gone(slot, happening, now)
            case _:
                assert_never(happening)

    def _on_command(self, command: commands.Command, now: StepClock) -> None:
        if command.node_id != self._node_id:
            return
        match command:
            case PrepareTasks():
                self._prepare(command, now)
            case StartTasks():
                self._start(command, now)
            case StopTasks():
                self._stop(command, now)
            case CleanUpAttempt():
                self._forget(command, now)
            case SaveNow():
                slot = self._slots.get(command.job_id)
                if slot is not None and slot.member.key.epoch == command.epoch:
                    self._out.append(UpdateLeasePage(key=slot.member.key, save_now=True))
            case commands.RunSleepHook():
                slot = self._slots.get(command.job_id)
                place = GenerationId(command.epoch, command.generation)
                if slot is not None and slot.member.generation_id == place:
                    self._apply(slot, members.run_sleep_hook(slot.member, command))
            case commands.DeleteCheckpoints():
                self._out.append(RemoveCheckpoints(job_id=command.job_id, paths=command.paths, user=command.user))
            case commands.LimitPower():
                self._out.append(SetPowerLimits(milliwatts=command.milliwatts, until_s=command.until_s))
            case _:
                assert_never(command)

    # ------------------------------------------------------------------------------------------------------- commands

    def _prepare(self, command: PrepareTasks, now: StepClock) -> None:
        place = GenerationId(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if slot is not None and place == slot.member.generation_id:
            self._repeat_report(slot, now)
            return
        if place <= self._floor.get(command.job_id, GenerationId(Epoch(0), Generation(-1))):
            return
        if self._ending:
            self._refuse(command, _unfit(command, "the node's supervisor is shutting down"))
            return
        if slot is None:
            self._begin(command, now)
            return
        newest = (
            slot.member.generation_id
            if slot.waiting is None
            else GenerationId(slot.waiting.epoch, slot.waiting.generation)
        )
        if place <= newest:
            return
        slot.waiting = command
        if slot.member.phase is MemberPhase.STOPPED:
            self._prepare_waiting(slot, now)
        elif slot.member.key.epoch != place.epoch:
            self._apply(slot, members.supersede(slot.member, now))
        else:
            self._apply(slot, members.kill(slot.member, now))

    def _start(self, command: StartTasks, now: StepClock) -> None:
        place = GenerationId(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if slot is None:
            # Its Prepare never came, or came to an earlier incarnation of this supervisor: it does not run here.
            self._report_stopped(command.job_id, place, now)
            return
        if place > slot.member.generation_id:
            if slot.waiting is None:  # the head is at a newer generation than this member
                slot.pending_stops.add(place)
                self._raise_floor(command.job_id, place)
                self._end_outdated(slot, place, now)
            return
        member = slot.member
        if place < member.generation_id:
            return
        if member.phase is MemberPhase.RUNNING:
            self._out.append(started_report(member, now))
            return
        self._pass_barrier(slot, command, now)

    def _stop(self, command: StopTasks, now: StepClock) -> None:
        place = GenerationId(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if slot is None:  # Stopped before its Prepare came: a supervisor on a seat reports the reason to its engine.
            key = MemberKey(command.job_id, command.epoch, command.generation)
            self._out.append(members.stop_page(key, command, now))
        if (
            slot is None
            or place < slot.member.generation_id
            or (place == slot.member.generation_id and slot.member.phase is MemberPhase.STOPPED)
        ):
            self._report_stopped(command.job_id, place, now)
            return
        slot.pending_stops.add(place)
        if place == slot.member.generation_id:
            self._apply(slot, members.stop(slot.member, command, now))
            return
        # The command names a generation that waits here or is unknown: it never starts, and the older one must end.
        self._raise_floor(command.job_id, place)
        if slot.waiting is not None and GenerationId(slot.waiting.epoch, slot.waiting.generation) <= place:
            slot.waiting = None
        if slot.member.phase is MemberPhase.RUNNING and slot.member.key.epoch == place.epoch:
            self._apply(slot, members.stop(slot.member, command, now))
        else:
            self._end_outdated(slot, place, now)

    def _end_outdated(self, slot: _Slot, place: GenerationId, now: StepClock) -> None:
        """End a member older than the generation that the head commands, then report the pending stops."""
        if slot.member.phase is MemberPhase.STOPPED:
            self._report_pending_stops(slot, now)
        elif slot.member.key.epoch == place.epoch:
            self._apply(slot, members.kill(slot.member, now))
        else:
            self._apply(slot, members.supersede(slot.member, now))

    def _forget(self, command: CleanUpAttempt, now: StepClock) -> None:
        self._raise_floor(command.job_id, GenerationId(command.epoch, _LAST))
        slot = self._slots.get(command.job_id)
        if slot is None or slot.member.key.epoch > command.epoch:
            self._out.append(RemoveScratch(job_id=command.job_id, epoch=command.epoch))
            return
        if slot.waiting is not None and slot.waiting.epoch <= command.epoch:
            slot.waiting = None
        slot.member = replace(slot.member, forgotten=True)
        if slot.member.phase is MemberPhase.STOPPED:
            self._remove(slot, now)
        else:
            self._apply(slot, members.kill(slot.member, now))

    def _repeat_report(self, slot: _Slot, now: StepClock) -> None:
        """Repeat a report that the head asks for again: it may have lost our answer."""
        match slot.member.phase:
            case MemberPhase.READY:
                self._out.append(ready_report(slot.member))
            case MemberPhase.RUNNING:
                self._out.append(started_report(slot.member, now))
            case MemberPhase.STOPPED:
                self._report_stopped(slot.member.key.job_id, slot.member.generation_id, now)
            case _:
                pass  # the answer is on its way

    def _terminate(self, now: StepClock) -> None:
        """Stop all members: with a grace the first time, immediately the second time."""
        again, self._ending = self._ending, True
        for slot in list(self._slots.values()):
            slot.waiting = None
            member = slot.member
            if again or member.phase not in {MemberPhase.RUNNING, MemberPhase.STOPPING}:
                self._apply(slot, members.kill(member, now))
                continue
            key = member.key
            command = StopTasks(
                node_id=self._node_id,
                job_id=key.job_id,
                epoch=key.epoch,
                generation=key.generation,
                reason="drain",
                grace_s=min(member.prepare.spec.grace_s, self._terminate_grace_s),
            )
            self._apply(slot, members.stop(member, command, now))

    # ---------------------------------------------------------------------------------------------------------- lease

    def _renewed(self, answer: LeaseRenewed, now: StepClock) -> None:
        self._lease = self._lease.renewed(sent_ns=answer.sent_ns, lease_s=answer.lease_s, now_ns=now.ns)
        holds = not self._lease.over(now.ns)
        for slot in list(self._slots.values()):
            member = slot.member
            epoch_key = (member.key.job_id, member.key.epoch)
            if epoch_key in answer.superseded:
                self._supersede(slot, now)
            elif holds:
                self._apply(
                    slot,
                    members.on_lease_renewed(
                        member, self._lease.deadline_ns, now, confirmed=epoch_key in answer.requested
                    ),
                )
                if slot.member.start is not None:
                    self._pass_barrier(slot, slot.member.start, now)

    def _supersede(self, slot: _Slot, now: StepClock) -> None:
        if slot.member.phase is MemberPhase.STOPPED:
            slot.member = replace(slot.member, superseded=True, forgotten=True)
            self._remove(slot, now)
        else:
            self._apply(slot, members.supersede(slot.member, now))

    def _pass_barrier(self, slot: _Slot, start: StartTasks, now: StepClock) -> None:
        over = self._lease.over(now.ns)
        step_context = members.pass_barrier(
            slot.member, start, lease_expired=over, deadline_ns=self._lease.deadline_ns, now=now
        )
        self._apply(slot, step_context)
        if slot.member.phase is MemberPhase.READY:
            self._out.append(RenewLease())

    def _check_timers(self, now: StepClock) -> None:
        lapsed = self._lease.over(now.ns)
        asked = False
        for slot in list(self._slots.values()):
            if lapsed and not slot.member.frozen_ns and slot.member.phase not in LEASE_INDEPENDENT_PHASES:
                # A supervisor that never had a lease freezes what it prepares; no work is lost yet.
                self._apply(slot, members.on_lease_expired(slot.member, self._lease.deadline_ns or now.ns, now))
                asked = True
            if 0 < slot.due_ns() <= now.ns:
                self._apply(slot, members.check_timers(slot.member, now))
                self._apply(slot, members.report_due_checkpoint(slot.member, now))
        if asked:
            self._out.append(RenewLease())
        if self._ending and all(slot.member.phase is MemberPhase.STOPPED for slot in self._slots.values()):
            if self._leaves_as is not None:
                left = NodeDied(
                    node_id=self._node_id, supervisor_id=self._leaves_as, why=LEFT, confirmed=True, planned=True
                )
                self._out.append(SendEvent(event=left))
            self._out.append(ExitSupervisor())

    def _next_wake_ns(self, now: StepClock) -> int | None:
        earliest_ns = 0
        leased = False
        for slot in self._slots.values():
            member = slot.member
            phase = member.phase
            if phase is MemberPhase.STOPPED:
                continue
            due_ns = slot.due_ns()
            if due_ns and (due_ns < earliest_ns or not earliest_ns):
                earliest_ns = due_ns
            if not (leased or member.frozen_ns or phase in LEASE_INDEPENDENT_PHASES):
                leased = True
        if leased:
            deadline_ns = self._lease.deadline_ns
            earliest_ns = min(earliest_ns, deadline_ns) if earliest_ns else deadline_ns
        return max(now.ns, earliest_ns) if leased or earliest_ns else None

    # -------------------------------------------------------------------------------------------------------- members

    def _begin(self, command: PrepareTasks, now: StepClock) -> None:
        grant = command.allocation.grant_on(self._node_id)
        if grant is None:
            self._refuse(command, _unfit(command, f"the allocation does not include node {self._node_id}"))
            return
        member, actions = members.begin(command, grant, now)
        self._slots[command.job_id] = _Slot(member=member)
        self._slots_changed = True
        self._out += actions

    def _on_member_gone(self, slot: _Slot, drained: OutputDrained, now: StepClock) -> None:
        """Report the end of a member without processes, and start the command that waits for it."""
        self._apply(slot, members.report_last_checkpoint(slot.member, now))
        member = slot.member
        key = member.key
        slot.member = replace(member, phase=MemberPhase.STOPPED, timer_ns=0, frozen_ns=0)
        if member.refusal is not None:
            self._refuse(member.prepare, member.refusal)
        port = 0 if member.start is None else member.start.port
        port_in_use = member.bind_failed and rendezvous.port_was_in_use(drained.tail, port)
        self._report_stopped(key.job_id, member.generation_id, now, port_in_use=port_in_use, unsent=drained.unsent)
        slot.pending_stops.discard(member.generation_id)
        self._report_pending_stops(slot, now)
        if slot.waiting is not None:
            self._prepare_waiting(slot, now)
        elif slot.member.forgotten:
            self._remove(slot, now)

    def _prepare_waiting(self, slot: _Slot, now: StepClock) -> None:
        """Prepare the waiting generation after the older one ended."""
        waiting = slot.waiting
        assert waiting is not None
        assert slot.member.phase is MemberPhase.STOPPED
        old = slot.member.key
        del self._slots[old.job_id]
        self._slots_changed = True
        if old.epoch != waiting.epoch:
            self._out.append(RemoveScratch(job_id=old.job_id, epoch=old.epoch))
        self._begin(waiting, now)

    def _remove(self, slot: _Slot, now: StepClock) -> None:
        key = slot.member.key
        self._report_pending_stops(slot, now)
        self._raise_floor(key.job_id, GenerationId(key.epoch, _LAST))
        del self._slots[key.job_id]
        self._slots_changed = True
        self._out.append(RemoveScratch(job_id=key.job_id, epoch=key.epoch))

    def _apply(self, slot: _Slot, transition: MemberTransition) -> None:
        slot.member, actions = transition
        self._out += actions

    # -------------------------------------------------------------------------------------------------------- reports

    def _refuse(self, command: PrepareTasks, found: MemberStartFailed) -> None:
        self._raise_floor(command.job_id, GenerationId(command.epoch, command.generation))
        # The reason may hold a file name; the event must be sendable, or the gang waits for this node forever.
        why = replace_invalid_utf8(found.why)
        event = MemberRefused(
            job_id=command.job_id,
            epoch=command.epoch,
            generation=command.generation,
            node_id=self._node_id,
            why=why,
            job_at_fault=found.charge,
            exit_code=found.exit_code,
            node_at_fault=found.flaw,
            disk_full=found.disk_full,
        )
        self._out += [SendEvent(event=event), AppendNote(job_id=command.job_id, epoch=command.epoch, text=why)]

    def _report_stopped(
        self,
        job_id: JobId,
        place: GenerationId,
        now: StepClock,
        *,
        port_in_use: bool = False,
        unsent: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Report a generation as stopped; from now on it can never start."""
        self._raise_floor(job_id, place)
        event = MemberStopped(
            job_id=job_id,
            epoch=place.epoch,
            generation=place.generation,
            node_id=self._node_id,
            at_s=now.unix_s,
            port_in_use=port_in_use,
            unsent=unsent,
        )
        self._out.append(SendEvent(event=event))

    def _report_pending_stops(self, slot: _Slot, now: StepClock) -> None:
        pending_stops, slot.pending_stops = sorted(slot.pending_stops), set()
        for place in pending_stops:
            self._report_stopped(slot.member.key.job_id, place, now)

    def _raise_floor(self, job_id: JobId, place: GenerationId) -> None:
        self._floor[job_id] = max(place, self._floor.pop(job_id, place))
        while len(self._floor) > STOPPED_GENERATIONS_MAX:
            self._floor.popitem(last=False)

    def _publish_members(self) -> None:
        if not self._slots_changed:
            return
        self._slots_changed = False
        members_now = tuple(slot.member.key for slot in self._slots.values())
        if members_now != self._published:
            self._published = members_now
            self._out.append(PublishMembers(members=members_now))


def _concerns(happening: MemberEvent, key: MemberKey) -> bool:
    """Whether the event is about this member. A checkpoint belongs to the attempt: its report may come after its generation ended."""
    if isinstance(happening, CheckpointReported):
        return (happening.key.job_id, happening.key.epoch) == (key.job_id, key.epoch)
    return happening.key == key


def _unfit(command: PrepareTasks, why: str) -> MemberStartFailed:
    """Build a refusal before any preparation: neither the job nor the node is at fault."""
    return MemberStartFailed(key=MemberKey(command.job_id, command.epoch, command.generation), why=why, charge=False)
