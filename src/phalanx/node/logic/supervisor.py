"""The supervisor of one node: step(now, inbox) -> outbox, synchronous, without clock, thread or disk.

It keeps one member per job, one lease for all of them, and these promises:
- never two generations of a job at once: a newer one is prepared only when nothing of the older is left;
- what has been declared stopped never starts later, however commands are lost, doubled or reordered (`_floor`);
- every StopTasks is answered by MemberStopped, and never before it is true;
- without a lease nothing runs that could run on: members are frozen, and thawed only by an answer that names their epoch current.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, assert_never

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state import commands
from phalanx.core.state.commands import Forget, Prepare, SaveNow, StartTasks, StopTasks
from phalanx.core.state.events import MemberRefused, MemberStopped
from phalanx.node.logic import member as members
from phalanx.node.logic import rendezvous
from phalanx.node.logic.actions import (
    Action,
    Carry,
    CleanUp,
    DeleteCheckpoints,
    Exit,
    Note,
    RenewLease,
    Report,
    WritePage,
)  # fmt: skip
from phalanx.node.logic.happenings import (
    CheckpointReported,
    Commanded,
    Emptied,
    FreezeDone,
    Happening,
    Hung,
    Killed,
    MemberKey,
    Place,
    Prepared,
    Renewed,
    Spawned,
    TaskEnded,
    Terminated,
    Unfit,
    WoundUp,
)  # fmt: skip
from phalanx.node.logic.lease import Lease
from phalanx.node.logic.legible import legible
from phalanx.node.logic.member import Member, Now, Phase

FLOORS_MAX: Final = 20_000  # jobs whose end is remembered against late commands; the head's mailboxes hold far fewer
TERMINATE_GRACE_MAX_S: Final = 8.0  # engines wait 10 s from SIGTERM to a sweep of the node
_LAST: Final = Generation(1 << 62)
Told: TypeAlias = (
    Prepared | Unfit | Spawned | TaskEnded | Emptied | Killed | FreezeDone | WoundUp | CheckpointReported | Hung
)
"""Of one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """What to do, in order, and when to step again at the latest (CLOCK_BOOTTIME; None: when something happens)."""

    actions: list[Action]
    wake_ns: int | None


@dataclass(slots=True)
class _Slot:
    """One job on this node: the member that is here, the one that waits for it to go, and who asked to be told of the end."""

    member: Member
    waiting: Prepare | None = None
    owed: set[Place] = field(default_factory=set)


class Supervisor:
    """See the module. Mutable; its shell calls `step` from one thread."""

    def __init__(self, node_id: NodeId) -> None:
        self._node_id = node_id
        self._slots: dict[JobId, _Slot] = {}
        self._floor: OrderedDict[JobId, Place] = OrderedDict()
        self._lease = Lease()
        self._carried: tuple[MemberKey, ...] = ()
        self._ending = False
        self._out: list[Action] = []

    def step(self, now_ns: int, inbox: Iterable[Happening], *, unix_s: float) -> Outbox:
        """Take in what happened, in order, then let time pass up to `now_ns`."""
        now = Now(ns=now_ns, unix_s=unix_s)
        self._out = []
        for happening in inbox:
            self._hear(happening, now)
        self._let_time_pass(now)
        self._publish()
        actions, self._out = self._out, []
        return Outbox(actions=actions, wake_ns=self._next_wake_ns(now))

    @property
    def lease(self) -> Lease:
        """The lease held."""
        return self._lease

    def present(self) -> list[Member]:
        """What is here, in the order in which the jobs came."""
        return [slot.member for slot in self._slots.values()]

    # -------------------------------------------------------------------------------------------------------- hearing

    def _hear(self, happening: Happening, now: Now) -> None:
        match happening:
            case Commanded(command=command):
                self._obey(command, now)
            case Renewed():
                self._renewed(happening, now)
            case Terminated():
                self._terminate(now)
            case _:
                slot = self._slots.get(happening.key.job_id)
                if slot is not None and _speaks_of(happening, slot.member.key):
                    self._happened(slot, happening, now)

    def _happened(
        self,
        slot: _Slot,
        happening: Told,
        now: Now,
    ) -> None:
        member = slot.member
        match happening:
            case Prepared():
                self._turn(slot, members.prepared(member, happening))
            case Unfit():
                self._turn(slot, members.unfit(member, happening, now))
            case Spawned():
                self._turn(slot, members.spawned(member, now))
            case TaskEnded():
                self._turn(slot, members.task_ended(member, happening, now))
            case Emptied():
                self._turn(slot, members.emptied(member))
            case Killed():
                self._turn(slot, members.killed(member, happening, now))
            case FreezeDone(still=still):
                self._turn(slot, members.freeze_done(member, now, still=still))
            case Hung():
                self._turn(slot, members.hung(member, happening))
            case CheckpointReported():
                self._turn(slot, members.saved(member, happening, now))
            case WoundUp(tail=tail):
                if member.phase is Phase.CLOSING:
                    self._gone(slot, tail, now)
            case _:
                assert_never(happening)

    def _obey(self, command: commands.Command, now: Now) -> None:
        if command.node_id != self._node_id:
            return
        match command:
            case Prepare():
                self._prepare(command, now)
            case StartTasks():
                self._start(command, now)
            case StopTasks():
                self._stop(command, now)
            case Forget():
                self._forget(command, now)
            case SaveNow():
                slot = self._slots.get(command.job_id)
                if slot is not None and slot.member.key.epoch == command.epoch:
                    self._out.append(WritePage(key=slot.member.key, save_now=True))
            case commands.DeleteCheckpoints():
                self._out.append(DeleteCheckpoints(job_id=command.job_id, paths=command.paths, user=command.user))
            case _:
                assert_never(command)

    # ------------------------------------------------------------------------------------------------------- commands

    def _prepare(self, command: Prepare, now: Now) -> None:
        place = Place(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if slot is not None and place == slot.member.place:
            self._repeat(slot, now)
            return
        if place <= self._floor.get(command.job_id, Place(Epoch(0), Generation(-1))):
            return
        if self._ending:
            self._refuse(command, _unfit(command, "the node's supervisor is shutting down"))
            return
        if slot is None:
            self._begin(command, now)
            return
        newest = slot.member.place if slot.waiting is None else Place(slot.waiting.epoch, slot.waiting.generation)
        if place <= newest:
            return
        slot.waiting = command
        if slot.member.phase is Phase.STOPPED:
            self._advance(slot, now)
        elif slot.member.key.epoch != place.epoch:
            self._turn(slot, members.supersede(slot.member, now))
        else:
            self._turn(slot, members.kill(slot.member, now))

    def _start(self, command: StartTasks, now: Now) -> None:
        place = Place(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if slot is None:
            # Its Prepare never came, or is forgotten with an earlier life of this supervisor: nothing of it runs here.
            self._say_stopped(command.job_id, place, now)
            return
        if place > slot.member.place:
            if slot.waiting is None:  # the head is past the one that is here
                slot.owed.add(place)
                self._raise_floor(command.job_id, place)
                self._outlive(slot, place, now)
            return
        member = slot.member
        if place < member.place:
            return
        if member.phase is Phase.RUNNING:
            self._out.append(members.say_started(member, now))
            return
        self._pass_barrier(slot, command, now)

    def _stop(self, command: StopTasks, now: Now) -> None:
        place = Place(command.epoch, command.generation)
        slot = self._slots.get(command.job_id)
        if (
            slot is None
            or place < slot.member.place
            or (place == slot.member.place and slot.member.phase is Phase.STOPPED)
        ):
            self._say_stopped(command.job_id, place, now)
            return
        slot.owed.add(place)
        if place == slot.member.place:
            self._turn(slot, members.stop(slot.member, command, now))
            return
        # It speaks of a generation that waits here, or that we never heard of: that one never starts, and the older one must go.
        self._raise_floor(command.job_id, place)
        if slot.waiting is not None and Place(slot.waiting.epoch, slot.waiting.generation) <= place:
            slot.waiting = None
        if slot.member.phase is Phase.RUNNING and slot.member.key.epoch == place.epoch:
            self._turn(slot, members.stop(slot.member, command, now))
        else:
            self._outlive(slot, place, now)

    def _outlive(self, slot: _Slot, place: Place, now: Now) -> None:
        """The head speaks of a later generation than the one here: end this one at once, then tell whom we owe it."""
        if slot.member.phase is Phase.STOPPED:
            self._tell_owed(slot, now)
        elif slot.member.key.epoch == place.epoch:
            self._turn(slot, members.kill(slot.member, now))
        else:
            self._turn(slot, members.supersede(slot.member, now))

    def _forget(self, command: Forget, now: Now) -> None:
        self._raise_floor(command.job_id, Place(command.epoch, _LAST))
        slot = self._slots.get(command.job_id)
        if slot is None or slot.member.key.epoch > command.epoch:
            self._out.append(CleanUp(job_id=command.job_id, epoch=command.epoch))
            return
        if slot.waiting is not None and slot.waiting.epoch <= command.epoch:
            slot.waiting = None
        slot.member = replace(slot.member, forgotten=True)
        if slot.member.phase is Phase.STOPPED:
            self._drop(slot, now)
        else:
            self._turn(slot, members.kill(slot.member, now))

    def _repeat(self, slot: _Slot, now: Now) -> None:
        """The head asks again for what is here: it may have lost our answer."""
        match slot.member.phase:
            case Phase.READY:
                self._out.append(members.say_ready(slot.member))
            case Phase.RUNNING:
                self._out.append(members.say_started(slot.member, now))
            case Phase.STOPPED:
                self._say_stopped(slot.member.key.job_id, slot.member.place, now)
            case _:
                pass  # the answer is on its way

    def _terminate(self, now: Now) -> None:
        """Stop everything, gently the first time."""
        again, self._ending = self._ending, True
        for slot in list(self._slots.values()):
            slot.waiting = None
            member = slot.member
            if again or member.phase is not Phase.RUNNING:
                self._turn(slot, members.kill(member, now))
                continue
            key = member.key
            command = StopTasks(
                node_id=self._node_id, job_id=key.job_id, epoch=key.epoch, generation=key.generation, reason="drain",
                grace_s=min(member.prepare.spec.grace_s, TERMINATE_GRACE_MAX_S),
            )  # fmt: skip
            self._turn(slot, members.stop(member, command, now))

    # ---------------------------------------------------------------------------------------------------------- lease

    def _renewed(self, answer: Renewed, now: Now) -> None:
        self._lease = self._lease.renewed(sent_ns=answer.sent_ns, lease_s=answer.lease_s, now_ns=now.ns)
        holds = not self._lease.over(now.ns)
        for slot in list(self._slots.values()):
            member = slot.member
            named = (member.key.job_id, member.key.epoch)
            if named in answer.superseded:
                self._supersede(slot, now)
            elif holds:
                self._turn(slot, members.renew(member, self._lease.deadline_ns, now, decided=named in answer.asked))
                if slot.member.start is not None:
                    self._pass_barrier(slot, slot.member.start, now)

    def _supersede(self, slot: _Slot, now: Now) -> None:
        if slot.member.phase is Phase.STOPPED:
            slot.member = replace(slot.member, superseded=True, forgotten=True)
            self._drop(slot, now)
        else:
            self._turn(slot, members.supersede(slot.member, now))

    def _pass_barrier(self, slot: _Slot, start: StartTasks, now: Now) -> None:
        over = self._lease.over(now.ns)
        turn = members.pass_barrier(slot.member, start, lease_over=over, deadline_ns=self._lease.deadline_ns, now=now)
        self._turn(slot, turn)
        if slot.member.phase is Phase.READY:
            self._out.append(RenewLease())

    def _let_time_pass(self, now: Now) -> None:
        lapsed = self._lease.over(now.ns)
        asked = False
        for slot in list(self._slots.values()):
            if lapsed and not slot.member.frozen_ns and slot.member.phase not in members.UNHARMED_BY_LAPSE:
                # A supervisor that never held a lease freezes what it prepares: it has nothing to lose yet.
                self._turn(slot, members.lapse(slot.member, self._lease.deadline_ns or now.ns, now))
                asked = True
            self._turn(slot, members.time_out(slot.member, now))
            self._turn(slot, members.tell_saved(slot.member, now))
        if asked:
            self._out.append(RenewLease())
        if self._ending and all(slot.member.phase is Phase.STOPPED for slot in self._slots.values()):
            self._out.append(Exit())

    def _next_wake_ns(self, now: Now) -> int | None:
        due: list[int] = []
        for slot in self._slots.values():
            member = slot.member
            if member.phase is Phase.STOPPED:
                continue
            limit_ns = members.limit_ns(member)
            due += [when for when in (member.timer_ns, limit_ns, member.saves.due_ns) if when]
            if not member.frozen_ns and member.phase not in members.UNHARMED_BY_LAPSE:
                due.append(self._lease.deadline_ns)
        return max(now.ns, min(due)) if due else None

    # ----------------------------------------------------------------------------------------------- members come and go

    def _begin(self, command: Prepare, now: Now) -> None:
        grant = command.allocation.on(self._node_id)
        if grant is None:
            self._refuse(command, _unfit(command, f"the allocation has no part for {self._node_id}"))
            return
        member, actions = members.begin(command, grant, now)
        self._slots[command.job_id] = _Slot(member=member)
        self._out += actions

    def _gone(self, slot: _Slot, tail: bytes, now: Now) -> None:
        """Nothing of the member is left: tell, and make room."""
        self._turn(slot, members.tell_last_saved(slot.member, now))
        member = slot.member
        key = member.key
        slot.member = replace(member, phase=Phase.STOPPED, timer_ns=0, frozen_ns=0)
        if member.refusal is not None:
            refusal = member.refusal
            self._refuse(member.prepare, refusal)
        port = 0 if member.start is None else member.start.port
        port_in_use = member.bind_failed and rendezvous.port_was_taken(tail, port)
        self._say_stopped(key.job_id, member.place, now, port_in_use=port_in_use)
        slot.owed.discard(member.place)
        self._tell_owed(slot, now)
        if slot.waiting is not None:
            self._advance(slot, now)
        elif slot.member.forgotten:
            self._drop(slot, now)

    def _advance(self, slot: _Slot, now: Now) -> None:
        """The older one is gone: prepare the one that waited."""
        waiting = slot.waiting
        assert waiting is not None
        assert slot.member.phase is Phase.STOPPED
        old = slot.member.key
        del self._slots[old.job_id]
        if old.epoch != waiting.epoch:
            self._out.append(CleanUp(job_id=old.job_id, epoch=old.epoch))
        self._begin(waiting, now)

    def _drop(self, slot: _Slot, now: Now) -> None:
        key = slot.member.key
        self._tell_owed(slot, now)
        self._raise_floor(key.job_id, Place(key.epoch, _LAST))
        del self._slots[key.job_id]
        self._out.append(CleanUp(job_id=key.job_id, epoch=key.epoch))

    def _turn(self, slot: _Slot, turn: members.Turn) -> None:
        slot.member, actions = turn
        self._out += actions

    # --------------------------------------------------------------------------------------------------------- telling

    def _refuse(self, command: Prepare, found: Unfit) -> None:
        self._raise_floor(command.job_id, Place(command.epoch, command.generation))
        why = legible(found.why)  # it may name a file; unsaid, the gang would wait for this node for ever
        event = MemberRefused(
            job_id=command.job_id, epoch=command.epoch, generation=command.generation, node_id=self._node_id, why=why,
            charge=found.charge, exit_code=found.exit_code, flaw=found.flaw,
        )  # fmt: skip
        self._out += [Report(event=event), Note(job_id=command.job_id, epoch=command.epoch, text=why)]

    def _say_stopped(self, job_id: JobId, place: Place, now: Now, *, port_in_use: bool = False) -> None:
        """Declare it stopped; from now on it can never start."""
        self._raise_floor(job_id, place)
        event = MemberStopped(
            job_id=job_id, epoch=place.epoch, generation=place.generation, node_id=self._node_id, at_s=now.unix_s,
            port_in_use=port_in_use,
        )  # fmt: skip
        self._out.append(Report(event=event))

    def _tell_owed(self, slot: _Slot, now: Now) -> None:
        owed, slot.owed = sorted(slot.owed), set()
        for place in owed:
            self._say_stopped(slot.member.key.job_id, place, now)

    def _raise_floor(self, job_id: JobId, place: Place) -> None:
        self._floor[job_id] = max(place, self._floor.pop(job_id, place))
        while len(self._floor) > FLOORS_MAX:
            self._floor.popitem(last=False)

    def _publish(self) -> None:
        carried = tuple(slot.member.key for slot in self._slots.values())
        if carried != self._carried:
            self._carried = carried
            self._out.append(Carry(members=carried))


def _speaks_of(happening: Told, key: MemberKey) -> bool:
    """Whether it is this member's. A checkpoint is its attempt's: on its way to the head it may outlive the generation that made it."""
    if isinstance(happening, CheckpointReported):
        return (happening.key.job_id, happening.key.epoch) == (key.job_id, key.epoch)
    return happening.key == key


def _unfit(command: Prepare, why: str) -> Unfit:
    """A refusal before anything was prepared: neither the job's fault nor the node's."""
    return Unfit(key=MemberKey(command.job_id, command.epoch, command.generation), why=why, charge=False)
