"""A whole cluster in virtual time: the real controller, the real supervisor logic, a memory store, and a network that can fail.

What is simulated is what the shells do: clocks, messages, processes. Everything is deterministic; a test moves time with `run` and
`until`. After every event the invariants of DESIGN 3 are checked (`tests.invariants`), so that a scenario need only state its own point.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook, SayHello
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.outbox import Answer, Now, Outbox
from phalanx.controller.turn import Settings
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.scheduling.schedule import Policy
from phalanx.core.state.events import Cancel, Event, Hello, NodeDead, PutProject, PutQueue, PutUser, Submit
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt, AttemptState
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import User, UserRole
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.spec import JobSpec
from phalanx.ports.store import Batch, StoreRefused
from phalanx.store.memory import MemoryStore
from tests.builders import T, make_fleet, spec
from tests.invariants import Watch
from tests.simulated_node import Behaviour, SimNode

LATENCY_S = 0.01
RETRY_S = 0.5


class Store(MemoryStore):
    """A memory store whose disk can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse_next = 0

    def commit(self, batch: Batch) -> None:
        if self.refuse_next > 0:
            self.refuse_next -= 1
            raise StoreRefused("no space left on the device")
        super().commit(batch)


@dataclass
class Head:
    """One life of the head."""

    number: int
    controller: Controller
    mailboxes: Mailboxes = field(default_factory=Mailboxes)
    greeted: dict[NodeId, SupervisorId] = field(default_factory=dict)
    acked: dict[SupervisorId, int] = field(default_factory=dict)
    wake: int = 0


class Harness:
    """See the module.

    Attributes:
        head: the present life of the head; None while there is none.
        behaviours: how jobs behave, by name; the others run for 5 s and end well.
        heard: every report that was committed, oldest first.
        drop_command: decides which commands are lost on their way.
        bad_links: pairs of nodes that do not reach each other.
    """

    def __init__(self, fleet: str = "r: n0=4 n1=4 n2=4", *, policy: Policy | None = None, lease_s: float = 6.0) -> None:
        self.boot_s = 1000.0
        self.wall_offset_s = T - 1000.0
        self.policy = policy or Policy()
        self.lease_s = lease_s
        self.store = Store()
        self.behaviours: dict[str, Behaviour] = {}
        self.corrupt: set[str] = set()
        self.deleted: set[str] = set()
        self.heard: list[Event] = []
        self.commands: list[Any] = []
        self.drop_command: Callable[[Any], bool] = lambda _: False
        self.bad_links: list[set[str]] = []
        self.watch = Watch(self)
        self.engine_watches = True
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lives = itertools.count(1)
        self.head: Head | None = None
        self.nodes: dict[NodeId, SimNode] = {}
        self.start_head()
        self.ask(PutUser(user=User(id=UserId("ada"), role=UserRole.USER)))
        self.ask(PutUser(user=User(id=UserId("op"), role=UserRole.OPERATOR)))
        self.ask(PutProject(project=Project(id=ProjectId("gpt"))))
        self.ask(PutQueue(queue=Queue(id=QueueId("default"))))
        for node in make_fleet(fleet).nodes.values():
            self.nodes[node.id] = SimNode(self, node)
            self.nodes[node.id].boot()
        self.run(0.2)

    # ---- time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> Now:
        return Now(wall_s=self.boot_s + self.wall_offset_s, boot_s=self.boot_s)

    @property
    def ns(self) -> int:
        return round(self.boot_s * 1e9)

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.boot_s + max(0.0, delay_s), next(self._order), what))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end_s = self.boot_s + seconds
        while self._heap and self._heap[0][0] <= end_s:
            self._one()
        self.boot_s = end_s

    def events(self, while_: Callable[[], bool], limit_s: float = 200.0) -> Iterator[None]:
        """One event after the other while it holds, for a look in between. Fails past the limit."""
        start_s = self.boot_s
        while while_():
            assert self.boot_s - start_s <= limit_s, f"not within {limit_s} s\n{self.told()}"
            yield
            self._one()

    def until(self, what: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Let time pass until it holds; answers how long that took. Fails past the limit."""
        start_s = self.boot_s
        while not what():
            assert self._heap
            assert self.boot_s - start_s <= limit_s, f"not within {limit_s} s\n{self.told()}"
            self._one()
        return self.boot_s - start_s

    def _one(self) -> None:
        at_s, _, what = heapq.heappop(self._heap)
        self.boot_s = max(self.boot_s, at_s)
        what()
        self.watch.truth()

    # ---- users --------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        assert self.head is not None
        return self.head.controller.world

    def ask(self, event: Event) -> Any:
        """Ask the head; its refusal is raised."""
        answer = self.turn([event])[0]
        if isinstance(answer, PhalanxError):
            raise answer
        return answer

    def submit(
        self, one: JobSpec | None = None, *, key: str = "", behaviour: Behaviour | None = None, queue: str = "default",
        user: str = "ada", **fields: Any,
    ) -> JobId:  # fmt: skip
        """Submit; the spec by its fields, the behaviour of the job beside it."""
        wanted = one or spec(**{"name": f"job{next(self._order)}", **fields})
        if behaviour is not None:
            self.behaviours[wanted.name] = behaviour
        job: Job = self.ask(
            Submit(
                spec=wanted, user=UserId(user), project=ProjectId("gpt"), queue=QueueId(queue), key=key,
                body_sha256=repr(wanted),
            )
        )  # fmt: skip
        self.watch.acknowledged(job.id)
        return job.id

    def cancel(self, job_id: JobId) -> Job:
        answer: Job = self.ask(Cancel(job_id=job_id, by=UserId("ada")))
        self.watch.cancelled(answer)
        return answer

    def job(self, job_id: JobId) -> Job:
        """As the store holds it: committed truth."""
        found = self.store.job(job_id)
        assert found is not None
        return found

    def attempts(self, job_id: JobId) -> list[Attempt]:
        return self.store.attempts(job_id)

    def live(self, job_id: JobId) -> Attempt:
        return self.world.attempts[job_id]

    def is_(self, job_id: JobId, state: JobState) -> Callable[[], bool]:
        return lambda: self.job(job_id).state is state

    def attempt_is(self, job_id: JobId, state: AttemptState) -> Callable[[], bool]:
        return lambda: job_id in self.world.attempts and self.world.attempts[job_id].state is state

    def runs(self, job_id: JobId) -> None:
        """Wait until its ranks run."""
        self.until(self.attempt_is(job_id, AttemptState.RUNNING))

    def ends(self, job_id: JobId, limit_s: float = 200.0) -> Job:
        """Wait for its end."""
        self.until(lambda: self.job(job_id).state.terminal, limit_s)
        return self.job(job_id)

    def told(self, job_id: JobId | None = None) -> str:
        """The story, for people and for failures."""
        return "\n".join(
            f"{line.at_s - T:9.2f} {line.kind:12} job {line.job_id or '-'}.{line.epoch or '-'} {line.text}"
            for line in self.store.story(job_id=job_id, limit=10_000)[-60:]
        )

    def kinds(self, job_id: JobId) -> list[str]:
        return [line.kind for line in self.store.story(job_id=job_id, limit=10_000)]

    # ---- the head -----------------------------------------------------------------------------------------------------

    def start_head(self, *, leases_until_s: float = 0.0) -> Head:
        controller = Controller(
            world=self.store.load(), leases=LeaseBook(lease_s=self.lease_s), policy=self.policy,
            settings=Settings(checkpoint_root="/ckpt", output_root="/out"),
        )  # fmt: skip
        self.head = Head(number=next(self._lives), controller=controller)
        controller.begin(self.now, leases_until_s=leases_until_s)
        self._wake_head(self.head, 0.0)
        return self.head

    def kill_head(self) -> None:
        """Nothing of it is left but the store."""
        self.head = None

    def turn(self, events: Sequence[Event]) -> Sequence[Answer | PhalanxError]:
        """What the driver does with a letter: step, commit, and only then publish and command.

        Raises:
            StoreRefused: the step was undone.
        """
        head = self.head
        assert head is not None
        controller, now = head.controller, self.now
        outbox = controller.step(now, events)
        change = outbox.change
        try:
            if not change.empty:
                removed = [node.id for node in change.removed]
                self.store.commit(
                    Batch(records=change.records, removed_nodes=removed, story=change.story, epochs=change.epochs)
                )
        except StoreRefused:
            controller.refused(outbox)
            self._wake_head(head, RETRY_S)
            raise
        self.watch.committed(outbox)
        controller.committed(outbox, now)
        self.heard += events
        self._post(head, outbox)
        self._wake_head(head, outbox.wake_in_s)
        return outbox.answers

    def _post(self, head: Head, outbox: Outbox) -> None:
        for command in outbox.commands:
            self.commands.append(command)
            if self.drop_command(command):
                continue
            head.mailboxes.post(command.node_id, command)
            if command.node_id in self.nodes:
                self.after(LATENCY_S, self.nodes[command.node_id].poll)

    def _wake_head(self, head: Head, in_s: float) -> None:
        head.wake += 1
        number = head.wake

        def wake() -> None:
            if self.head is head and head.wake == number:
                self._quietly([])

        self.after(max(0.001, in_s), wake)

    def _quietly(self, events: Sequence[Event]) -> bool:
        try:
            self.turn(events)
        except StoreRefused:
            return False
        return True

    # ---- what nodes ask of the head: each answers None where there is no answer ---------------------------------------

    def hear_hello(self, node: SimNode) -> int | None:
        """Where commands for this supervisor begin."""
        head = self.head
        if head is None:
            return None
        after = head.mailboxes.reset(node.id)
        hello = Hello(
            node=node.record, supervisor_id=node.supervisor_id,
            carries=tuple((key.job_id, key.epoch, key.generation) for key in node.carried),
        )  # fmt: skip
        if not self._quietly([hello]):
            return None
        if head.greeted.get(node.id) != node.supervisor_id:
            head.acked.pop(node.supervisor_id, None)
        head.greeted[node.id] = node.supervisor_id
        return after

    def hear_renewal(self, node: SimNode, epochs: list[tuple[JobId, Epoch]], held_s: float) -> Any:
        """The renewal; `SayHello` as a value."""
        head = self.head
        if head is None:
            return None
        if head.greeted.get(node.id) != node.supervisor_id:
            return SayHello("say hello")
        try:
            return head.controller.leases.renew(node.id, node.supervisor_id, epochs, self.boot_s, held_s=held_s)
        except SayHello as error:
            return error

    def hear_events(self, node: SimNode, events: list[tuple[int, Event]]) -> int | None:
        """Up to which number all is durable; -1 for `say hello`."""
        head = self.head
        if head is None:
            return None
        if head.greeted.get(node.id) != node.supervisor_id:
            return -1
        acked = head.acked.get(node.supervisor_id, 0)
        fresh = [event for seq, event in events if seq > acked]
        if fresh and not self._quietly(fresh):
            return None
        if self.head is head:
            head.acked[node.supervisor_id] = max(acked, events[-1][0])
        return events[-1][0]

    # ---- faults -------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str, *, silent: bool = False) -> None:
        """Power off. The engine sees it and sweeps, unless `silent`: then the lease alone tells."""
        node = self.nodes[NodeId(name)]
        if not node.alive:
            return
        node.die()
        if self.engine_watches and not silent:
            node.death_untold = True
            self.after(0.1, lambda: self._dead(node))

    def _dead(self, node: SimNode) -> None:
        if self.head is None:
            node.death_untold = False
            return  # the engine died with the head; the next one finds nobody there and says nothing
        dead = NodeDead(node_id=node.id, supervisor_id=None, why="its supervisor died", confirmed=True)
        if self._quietly([dead]):
            node.death_untold = False
        else:
            self.after(RETRY_S, lambda: self._dead(node))

    def revive_node(self, name: str) -> None:
        """Switch it on again: another life of its supervisor. An engine tells of the death before it revives."""
        node = self.nodes[NodeId(name)]
        if not node.alive and node.death_untold:
            self.after(0.2, lambda: self.revive_node(name))
        elif not node.alive:
            fresh = SimNode(self, node.record, life=node.life + 1)
            self.nodes[node.id] = fresh
            fresh.boot()

    def jump_clock(self, seconds: float) -> None:
        """Somebody sets the wall clock, everywhere."""
        self.wall_offset_s += seconds

    def heal(self) -> None:
        """Every fault ends."""
        self.store.refuse_next = 0
        self.drop_command = lambda _: False
        if self.head is None:
            self.start_head()
        for node in list(self.nodes.values()):
            node.cut = False
            node.resume()
            self.revive_node(node.id)
