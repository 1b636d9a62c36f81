"""One node in virtual time: the real supervisor logic over simulated processes and an unreliable network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx.controller.leases import SayHello
from phalanx.core.fleet.fitness import BadLink
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, SupervisorId
from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.state.events import Event
from phalanx.core.work.job import Resume
from phalanx.node.logic import actions
from phalanx.node.logic.happenings import (
    CheckpointReported,
    Commanded,
    Emptied,
    FreezeDone,
    Happening,
    Killed,
    MemberKey,
    Prepared,
    Renewed,
    Spawned,
    TaskEnded,
    Unfit,
    WoundUp,
)  # fmt: skip
from phalanx.node.logic.supervisor import Supervisor
from phalanx.wire.supervisor import command_of, event_of, frame

if TYPE_CHECKING:
    from tests.harness import Harness

LATENCY_S = 0.01
RETRY_S = 0.5
POLL_S = 1.0


@dataclass(frozen=True)
class Behaviour:
    """How the tasks of a job behave.

    Attributes:
        run_s: work of one task from the beginning; a step is a second of it, and a checkpoint saves the steps.
        save_every_s: rank 0 saves so often; None never.
        ends: (key, rank) -> (after seconds, code, signal), or None for the usual end.
        refuses: node -> why it cannot prepare, "!" before it for the job's own fault, "?" for the node's.
        prepare_s: how long preparing takes.
        stubborn: SIGTERM does nothing.
        saves: asked to stop, rank 0 saves before it ends.
        port_taken: how many generations find the rendezvous port taken.
    """

    run_s: float = 5.0
    save_every_s: float | None = None
    ends: Callable[[MemberKey, int], tuple[float, int | None, int | None] | None] = lambda _key, _rank: None
    refuses: dict[str, str] = field(default_factory=dict)
    prepare_s: float = 0.05
    stubborn: bool = False
    saves: bool = False
    port_taken: int = 0


@dataclass
class Task:
    """A process: works while its node does and nobody froze it."""

    key: MemberKey
    rank: int
    devices: tuple[int, ...]
    left_s: float
    code: int | None
    signal: int | None
    done_s: float = 0.0
    save_every_s: float | None = None
    checkpoint_dir: str = ""
    frozen: bool = False
    since_s: float | None = None  # it works since then
    token: int = 0
    ended: bool = False


class SimNode:
    """See the module. `record` is the node as it presents itself."""

    def __init__(self, harness: Harness, record: Node, *, life: int = 1) -> None:
        self.harness = harness
        self.id = record.id
        self.life = life
        self.supervisor_id = SupervisorId(f"{record.id}-life{life}")
        self.record = replace(record, supervisor_id=self.supervisor_id, joined_s=0.0)
        self.logic = Supervisor(record.id)
        self.tasks: dict[tuple[MemberKey, int], Task] = {}
        self.carried: tuple[MemberKey, ...] = ()
        self.alive, self.paused, self.cut = True, False, False
        self.death_untold = False
        self.latency_s = LATENCY_S
        self._killed: set[MemberKey] = set()
        self._backlog: deque[Happening] = deque()
        self._unsent: list[tuple[int, Event]] = []
        self._last_seq = 0
        self._sending = False
        self._after = 0
        self._greeted_by = 0
        self._renewal = 0
        self._wake = 0

    @property
    def reachable(self) -> bool:
        return self.alive and not self.paused and not self.cut

    def working(self) -> list[Task]:
        """Tasks that execute instructions at this moment."""
        return [task for task in self.tasks.values() if self.alive and not self.paused and not task.frozen]

    # ---- life ---------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self._hello()
        self._poll_on()

    def die(self) -> None:
        """Power off: nothing is left, nothing is said."""
        self.alive = False
        self.tasks.clear()

    def pause(self) -> None:
        """SIGSTOP for the whole node."""
        if self.alive and not self.paused:
            for task in self.tasks.values():
                self._halt(task)
            self.paused = True

    def resume(self) -> None:
        """SIGCONT. The supervisor looks at its clock before anything else."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        heard, self._backlog = list(self._backlog), deque()
        self.hear(*heard)
        for task in list(self.tasks.values()):
            self._go(task)
        self._send()
        self._renew()

    # ---- the supervisor's step and its hands --------------------------------------------------------------------------

    def hear(self, *happenings: Happening) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.extend(happenings)
            return
        out = self.logic.step(self.harness.ns, happenings, unix_s=self.harness.now.wall_s)
        for action in out.actions:
            self._do(action)
        self._wake += 1
        if out.wake_ns is not None:
            number = self._wake
            wait_s = (out.wake_ns - self.harness.ns) / 1e9
            self.harness.after(max(0.0, wait_s), lambda: self.hear() if self._wake == number else None)

    def _later(self, delay_s: float, *happenings: Happening) -> None:
        self.harness.after(delay_s, lambda: self.hear(*happenings))

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.PrepareMember(key=key, prepare=prepare):
                self._killed.discard(key)
                self.harness.after(self._behaviour(prepare).prepare_s, lambda: self._prepared(key, prepare))
            case actions.SpawnTasks(key=key, prepare=prepare, start=start):
                self.harness.after(0.02, lambda: self._spawn(key, prepare, start))
            case actions.Signal(key=key):
                for task in self._of(key):
                    if not self._behaviour_of(task.key).stubborn:
                        self._halt(task)
                        if self._behaviour_of(task.key).saves and task.rank == 0:
                            self._save(task)
                        task.left_s, task.code, task.signal, task.save_every_s = 0.1, None, 15, None
                        self._go(task)
            case actions.Freeze(key=key):
                for task in self._of(key):
                    self._halt(task)
                    task.frozen = True
                self._later(0.0, FreezeDone(key=key, still=True))
            case actions.Thaw(key=key):
                for task in self._of(key):
                    task.frozen = False
                    self._go(task)
            case actions.Kill(key=key):
                self._killed.add(key)
                self.harness.after(0.02, lambda: self._kill(key))
            case actions.ProbeEmpty(key=key):
                if not self._of(key):
                    self._later(0.0, Emptied(key=key))
            case actions.WindUp(key=key):
                taken = self._behaviour_of(key).port_taken > key.generation
                self._later(0.01, WoundUp(key=key, tail=b"Address already in use" if taken else b""))
            case actions.DeleteCheckpoints(paths=paths):
                self.harness.deleted.update(paths)
            case actions.Report(event=event):
                self._last_seq += 1
                # Through the wire and back: what cannot travel fails here.
                self._unsent.append((self._last_seq, event_of(frame(self._last_seq, event))))
                self._send()
            case actions.Carry(members=members):
                self.carried = members
            case actions.RenewLease():
                self.harness.after(0.0, self._renew)
            case actions.Exit():
                self.die()
            case actions.WritePage() | actions.CleanUp() | actions.Note():
                pass

    def _behaviour(self, prepare: Prepare) -> Behaviour:
        return self.harness.behaviours.get(prepare.spec.name, Behaviour())

    def _behaviour_of(self, key: MemberKey) -> Behaviour:
        job = self.harness.store.job(key.job_id)
        return self.harness.behaviours.get(job.name if job is not None else "", Behaviour())

    def _of(self, key: MemberKey) -> list[Task]:
        return [task for task in self.tasks.values() if task.key == key]

    def _prepared(self, key: MemberKey, prepare: Prepare) -> None:
        if key in self._killed:
            return
        why = self._behaviour(prepare).refuses.get(self.id, "")
        if why:
            self.hear(Unfit(key=key, why=why.lstrip("!?"), charge=why.startswith("!"), flaw=why.startswith("?")))
            return
        cut = [one.node_id for one in prepare.allocation.grants if {self.id, one.node_id} in self.harness.bad_links]
        if cut:
            bad = tuple(BadLink(peer=peer, why="no connection in 5 s") for peer in cut)
            self.hear(Prepared(key=key, bad_links=bad))
            return
        grant = prepare.allocation.on(self.id)
        assert grant is not None
        if grant.node_rank:
            self.hear(Prepared(key=key))
            return
        whole = (one for one in prepare.candidates if one.digest not in self.harness.corrupt)
        self.hear(Prepared(key=key, port=20_000 + key.generation, resume=next(whole, None)))

    def _spawn(self, key: MemberKey, prepare: Prepare, start: StartTasks) -> None:
        if key in self._killed or not self.alive:
            return
        if self.paused:
            self.harness.after(0.5, lambda: self._spawn(key, prepare, start))
            return
        grant = prepare.allocation.on(self.id)
        assert grant is not None
        behaviour = self._behaviour(prepare)
        begun = 0 if start.resume is None else start.resume.step
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks):
            odd = behaviour.ends(key, rank)
            if rank == 0 and behaviour.port_taken > key.generation:
                odd = (0.1, 1, None)
            left_s, code, signal = odd or (max(0.1, behaviour.run_s - begun), 0, None)
            task = Task(
                key=key, rank=rank, devices=grant.devices, left_s=left_s, code=code, signal=signal, done_s=float(begun),
                save_every_s=behaviour.save_every_s if rank == 0 else None, checkpoint_dir=prepare.checkpoint_dir,
            )  # fmt: skip
            self.tasks[key, rank] = task
            self._go(task)
        self.hear(Spawned(key=key))

    # ---- processes ----------------------------------------------------------------------------------------------------

    def _go(self, task: Task) -> None:
        if task.ended or task.frozen or self.paused or not self.alive or task.since_s is not None:
            return
        task.since_s = self.harness.boot_s
        task.token += 1
        number = task.token
        next_s = task.left_s if task.save_every_s is None else min(task.left_s, task.save_every_s)
        self.harness.after(next_s, lambda: self._due(task) if task.token == number else None)

    def _halt(self, task: Task) -> None:
        if task.since_s is not None:
            worked_s = self.harness.boot_s - task.since_s
            task.left_s = max(0.0, task.left_s - worked_s)
            task.done_s += worked_s
            task.since_s = None
            task.token += 1

    def _due(self, task: Task) -> None:
        if not self.alive:
            return
        self._halt(task)
        if task.left_s > 1e-6:
            self._save(task)
            self._go(task)
            return
        self._end(task, task.code, task.signal)
        if not self._of(task.key):
            self._later(0.01, Emptied(key=task.key))

    def _save(self, task: Task) -> None:
        step = round(task.done_s)
        path = f"{task.checkpoint_dir}/step-{step:08d}"
        self.harness.deleted.discard(path)
        self.hear(
            CheckpointReported(
                key=task.key, step=step, path=path, digest=f"{path}@{task.key.generation}", size_bytes=1, stall_s=0.0,
                write_s=0.0, at_s=self.harness.now.wall_s,
            )
        )  # fmt: skip

    def _end(self, task: Task, code: int | None, signal: int | None) -> None:
        task.ended = True
        task.token += 1
        self.tasks.pop((task.key, task.rank), None)
        self.hear(
            TaskEnded(
                key=task.key, rank=task.rank, code=code, signal=signal, ended_ns=self.harness.ns,
                at_s=self.harness.now.wall_s,
            )
        )  # fmt: skip

    def _kill(self, key: MemberKey) -> None:
        if not self.alive:
            return
        if self.paused:
            self.harness.after(0.2, lambda: self._kill(key))
            return
        for task in self._of(key):
            self._end(task, None, 9)
        self.hear(Killed(key=key))

    # ---- the network --------------------------------------------------------------------------------------------------

    def _call(self, ask: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """A request there, an answer back; either may be lost, then the answer is None."""

        def arrive() -> None:
            answer = ask() if self.alive and not self.cut else None

            def back() -> None:
                if self.alive:
                    answered(None if self.cut else answer)

            self.harness.after(self.latency_s, back)

        self.harness.after(self.latency_s, arrive)

    def _hello(self) -> None:
        if not self.alive:
            return
        if self.paused:
            self.harness.after(RETRY_S, self._hello)
            return
        head = self.harness.head

        def answered(after: int | None) -> None:
            if after is None or head is None:
                self.harness.after(RETRY_S, self._hello)
                return
            self._after, self._greeted_by = after, head.number
            self._renew()
            self._send()
            self.poll()

        self._call(lambda: self.harness.hear_hello(self) if self.harness.head is head else None, answered)

    def _renew(self) -> None:
        """Renew now, and then again when it is due."""
        self._renewal += 1
        number = self._renewal

        def again() -> None:
            if self._renewal == number and self.alive:
                self._renew()

        if self.paused:
            self.harness.after(RETRY_S, again)
            return
        epochs: list[tuple[JobId, Epoch]] = [(key.job_id, key.epoch) for key in self.carried]
        sent_ns = self.harness.ns
        held_s = max(0.0, (self.logic.lease.deadline_ns - sent_ns) / 1e9)

        def answered(answer: Any) -> None:
            if isinstance(answer, SayHello):
                if self._renewal == number:
                    self._hello()
                return
            if answer is not None:
                self.hear(
                    Renewed(
                        sent_ns=sent_ns,
                        lease_s=answer.lease_s,
                        asked=frozenset(epochs),
                        superseded=frozenset(answer.superseded),
                    )
                )
            self.harness.after(RETRY_S if answer is None else answer.renew_in_s, again)

        self._call(lambda: self.harness.hear_renewal(self, epochs, held_s), answered)

    def _send(self) -> None:
        if self._sending or not self._unsent or not self.alive:
            return
        self._sending = True
        batch = list(self._unsent)

        def answered(acked: int | None) -> None:
            self._sending = False
            if acked is None or acked < 0:
                self.harness.after(RETRY_S, self._send)
                return
            self._unsent = [(seq, event) for seq, event in self._unsent if seq > acked]
            self._send()

        self._call(lambda: None if self.paused else self.harness.hear_events(self, batch), answered)

    def poll(self) -> None:
        """Take what lies in the mailbox."""
        head = self.harness.head
        if head is None or not self.reachable or head.greeted.get(self.id) != self.supervisor_id:
            return
        if head.number != self._greeted_by:
            return
        framed, self._after = head.mailboxes.take(self.id, self._after)
        if framed:
            commands = [command_of(one) for one in framed]
            self.hear(*(Commanded(command=command) for command in commands))  # type: ignore[arg-type]  # no exec is opened here

    def _poll_on(self) -> None:
        if self.alive:
            self.poll()
            self.harness.after(POLL_S, self._poll_on)


def newest_whole(checkpoints: tuple[Resume, ...], corrupt: set[str]) -> Resume | None:
    """What a resumed job must start from."""
    return next((one for one in reversed(checkpoints) if one.digest not in corrupt), None)
