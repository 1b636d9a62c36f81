"""A whole cluster in virtual time: the real controller, the real supervisor logic, a store, and a network that can fail.

What is simulated is what the shells do: clocks, messages, processes, the disk. Everything is deterministic for a seed; whoever drives it
moves time with `run`, `until` or `events`. After every event the invariants are checked (`invariants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Final

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook, SayHello
from phalanx.controller.lives import Challenged
from phalanx.controller.outbox import Answer, Now, Outbox
from phalanx.controller.turn import Settings
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.events import Event, Hello, NodeDead, PutProject, PutQueue, PutUser, Report
from phalanx.core.state.world import World
from phalanx.core.work.people import User, UserRole
from phalanx.core.work.queue import Project, Queue
from phalanx.facts.failures import shipped_rules
from phalanx.node.logic.happenings import Happening
from phalanx.ports.store import StoreRefused
from phalanx.simulator.drill.behaviour import Behaviour
from phalanx.simulator.drill.clock import BEGIN_UNIX_S, Clock
from phalanx.simulator.drill.coverage import Coverage, Glance
from phalanx.simulator.drill.disk import Crash, HeadDied, MemoryDisk
from phalanx.simulator.drill.head import Head, Unanswered
from phalanx.simulator.drill.invariants import Watch
from phalanx.simulator.drill.network import LATENCY_S, Network
from phalanx.simulator.drill.node import SimNode
from phalanx.simulator.drill.stage import StagedNode
from phalanx.simulator.drill.violation import demand

RETRY_S: Final = 0.5
TOLD_S: Final = 0.1  # an engine sees a death and has swept within so long
STANDSTILL: Final = 20_000  # things that happen at one instant; past it nobody lets time pass any more


class Cluster:
    """See the module.

    Attributes:
        head: the present life of the head; None while there is none.
        behaviours: how jobs behave, by name; the others run for 5 s and end well.
        heard: every report that was committed, oldest first.
        drop_command: decides which commands are lost on their way.
        bad_links: pairs of nodes that do not reach each other.
        flaws: nodes that refuse whatever comes, with why ("?" before it: the node's own fault).
        commit_s: how long a commit takes on this disk.
        counted: events that changed something, so far.
        touched: something executes otherwise than at the last look.
        told_of, head_died: called after each turn, and when a head dies in one.
        cursed: jobs whose rank 0 dies within a second, whenever it starts.
        leases_until_s: up to when a planned stop has granted leases; survives the head, as a file of its does.
        whole: each node as it was at first, with all its devices.
    """

    def __init__(
        self, fleet: Iterable[Node], *, policy: Policy | None = None, lease_s: float = 6.0, store: MemoryDisk | None = None, dice: Random | None = None
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self.dice = dice or Random(0)
        self.network = Network(self.clock, self.dice)
        self.policy = policy or Policy()
        self.lease_s = lease_s
        self.store = store or MemoryDisk()
        self.behaviours: dict[str, Behaviour] = {}
        self.corrupt: set[str] = set()
        self.deleted: set[str] = set()
        self.heard: list[Event] = []
        self.commands: list[Any] = []
        self.drop_command: Callable[[Any], bool] = lambda _: False
        self.bad_links: list[set[str]] = []
        self.flaws: dict[str, str] = {}
        self.commit_s = 0.0
        self.counted = 0
        self.touched = True
        self.coverage = Coverage()
        self.told_of: Callable[[Outbox], None] = lambda _: None
        self.head_died: Callable[[World, Crash], None] = lambda _world, _crash: None
        self.cursed: set[JobId] = set()
        self.leases_until_s = 0.0
        self.watch = Watch(self)
        self.engine_watches = True
        self.engine_late_s = 0.0
        self._lives = self._at_once = 0
        self._in_doubt: tuple[Head, Outbox, Now] | None = None
        self.head: Head | None = None
        self.nodes: dict[NodeId, SimNode] = {}
        self.start_head()
        self.ask(PutUser(user=User(id=UserId("ada"), role=UserRole.USER)))
        self.ask(PutUser(user=User(id=UserId("op"), role=UserRole.OPERATOR)))
        self.ask(PutProject(project=Project(id=ProjectId("gpt"))))
        self.ask(PutQueue(queue=Queue(id=QueueId("default"))))
        self.whole: dict[NodeId, Node] = {node.id: node for node in fleet}
        for node in self.whole.values():
            self.nodes[node.id] = SimNode(self, node)
            self.nodes[node.id].boot()
        self.run(0.2)

    # ---- time ----------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> Now:
        """Both clocks."""
        return self.clock.now

    @property
    def boot_s(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.clock.boot_s

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Let something happen later."""
        self.clock.after(delay_s, what)

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end_s = self.clock.boot_s + seconds
        while (next_s := self.clock.next_s()) is not None and next_s <= end_s:
            self.run_one()
        self.clock.boot_s = end_s

    def events(self, while_: Callable[[], bool], limit_s: float = 200.0) -> Iterator[None]:
        """One event after the other while it holds, for a look in between. Fails past the limit."""
        start_s = self.clock.boot_s
        while while_():
            assert self.clock.boot_s - start_s <= limit_s, f"not within {limit_s} s\n{self.told()}"
            yield
            self.run_one()

    def until(self, what: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Let time pass until it holds; answers how long that took. Fails past the limit."""
        start_s = self.clock.boot_s
        for _ in self.events(lambda: not what(), limit_s):
            pass
        return self.clock.boot_s - start_s

    def run_one(self) -> None:
        """The next thing that falls due, and a look at what executes then."""
        at_s, do = self.clock.boot_s, self.clock.pop()
        self._at_once = self._at_once + 1 if at_s == self.clock.boot_s else 0
        demand(self._at_once < STANDSTILL, 0, f"time stands still: {STANDSTILL} things happen at one instant")
        do()
        if self.touched:  # else nothing executes that did not at the last look
            self.touched = False
            self.watch.truth()

    def count(self, what: str) -> None:
        """One event that changed something."""
        self.counted += 1
        self.coverage.note(f"{self.clock.boot_s:.6f} {what}")

    def stepped(self, node_id: NodeId, before: Glance, after: Glance, cause: Happening | None) -> None:
        """A supervisor's step changed a member."""
        self.count(f"{node_id} {self.coverage.member_edges(before, after, cause)}")

    # ---- users ---------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """As the head has it."""
        assert self.head is not None
        return self.head.controller.world

    def ask(self, event: Event) -> Any:
        """Ask the head; its refusal is raised."""
        answer = self.turn([event])[0]
        if isinstance(answer, PhalanxError):
            raise answer
        return answer

    def told(self, job_id: JobId | None = None, lines: int = 60) -> str:
        """The story, for people and for failures."""
        return "\n".join(
            f"{line.at_s - BEGIN_UNIX_S:9.2f} {line.kind:12} job {line.job_id or '-'}.{line.epoch or '-'} {line.text}"
            for line in self.store.story(job_id=job_id, limit=1_000_000)[-lines:]
        )

    # ---- the head ------------------------------------------------------------------------------------------------------

    def start_head(self, *, leases_until_s: float = 0.0) -> Head:
        """A head begins on what the store holds."""
        if self._lives:
            durable = self.store.reopen()
            doubt, self._in_doubt = self._in_doubt, None
            if durable and doubt is not None:
                self.touched = True
                head, outbox, now = doubt
                self.watch.committed(outbox, head, now)
            self.watch.restarted()
            self.count("head starts")
        self._lives += 1
        controller = Controller(
            world=self.store.load(), leases=LeaseBook(lease_s=self.lease_s), policy=self.policy, head_id=str(self._lives),
            settings=Settings(checkpoint_root="/ckpt", output_root="/out", rules=shipped_rules()),
        )  # fmt: skip
        self.head = Head(number=self._lives, controller=controller)
        controller.begin(self.now, leases_until_s=max(leases_until_s, self.leases_until_s))
        self._wake_head(self.head, 0.0)
        return self.head

    def kill_head(self) -> None:
        """Nothing of it is left but the store."""
        self.head = None

    def turn(self, events: Sequence[Event]) -> Sequence[Answer | PhalanxError]:
        """What the driver does with a letter: step, commit, and only then publish and command.

        Raises:
            StoreRefused: the step was undone.
            Unanswered: the head died, or there is none.
        """
        head = self.head
        if head is None:
            raise Unanswered("there is no head")
        controller, now = head.controller, self.now
        outbox = controller.step(now, events)
        try:
            if not outbox.change.empty:
                self.store.commit(outbox.batch())
        except StoreRefused:
            controller.refused(outbox)
            self._wake_head(head, RETRY_S)
            raise
        except HeadDied as death:
            self._in_doubt, self.head, self.touched = (head, outbox, now), None, True
            self.head_died(controller.world, death.crash)
            raise Unanswered("the head died at this") from None
        if not outbox.change.empty:
            head.busy_until_s = max(head.busy_until_s, self.clock.boot_s + self.commit_s)
            self.touched = True
            story = [(line.seq, line.job_id, line.text) for line in outbox.change.story]
            self.count(f"commit {story} {[type(one).__name__ for one in outbox.commands]}")
        self.watch.committed(outbox, head, now)
        controller.committed(outbox, now)
        self.watch.heard(events, controller.world)
        self.heard += events
        self._post(head, outbox)
        self._wake_head(head, outbox.wake_in_s)
        self.told_of(outbox)
        return outbox.answers

    def _post(self, head: Head, outbox: Outbox) -> None:
        for command in outbox.commands:
            self.commands.append(command)
            if self.drop_command(command):
                continue
            head.mailboxes.post(command.node_id, command)
            node = self.nodes.get(command.node_id)
            if node is not None:
                self.after(node.link.down.latency_s + self.answer_s(), node.calls.poll)
        for name in outbox.lost:
            head.mailboxes.forget(name)

    def answer_s(self) -> float:
        """How long the head's answers wait for its disk."""
        return 0.0 if self.head is None else max(0.0, self.head.busy_until_s - self.clock.boot_s)

    def when_free(self, what: Callable[[], None]) -> None:
        """Do it when the head's one thread is free."""
        wait_s = self.answer_s()
        if wait_s > 0:
            self.after(wait_s, lambda: self.when_free(what))
        else:
            what()

    def _wake_head(self, head: Head, in_s: float) -> None:
        head.wake += 1
        number = head.wake

        def wake() -> None:
            if self.head is head and head.wake == number:
                self.when_free(lambda: self._wake(head))

        self.after(max(0.001, in_s), wake)

    def _wake(self, head: Head) -> None:
        if self.head is head:
            self.quietly([])

    def quietly(self, events: Sequence[Event]) -> bool:
        """A turn whose refusal is for the sender to repeat. True where it was done."""
        try:
            self.turn(events)
        except (StoreRefused, Unanswered):
            return False
        return True

    # ---- what nodes ask of the head: each answers None where there is no answer ----------------------------------------

    def hello_of(self, node: StagedNode) -> Hello:
        """How the node's supervisor presents itself now."""
        carries = tuple((key.job_id, key.epoch, key.generation) for key in node.carried)
        return Hello(node=node.record, supervisor_id=node.supervisor_id, carries=carries)

    def hear_hello(self, node_id: NodeId, hello: Hello) -> tuple[int | str | None, int]:
        """Where commands for this supervisor begin, or the head's challenge; and which life of the head says so."""
        head = self.head
        if head is None:
            return None, 0
        after = head.mailboxes.last(node_id)
        try:
            answer = self.turn([hello])[0]
        except (StoreRefused, Unanswered):
            return None, head.number
        if isinstance(answer, Challenged):
            return answer.challenge, head.number
        if isinstance(answer, PhalanxError):
            return None, head.number
        if head.greeted.get(node_id) != hello.supervisor_id:
            head.acked.pop(hello.supervisor_id, None)
        head.greeted[node_id] = hello.supervisor_id
        return after, head.number

    def hear_renewal(
        self, node_id: NodeId, supervisor_id: SupervisorId, epochs: list[tuple[JobId, Epoch]], held_s: float
    ) -> Any:
        """The renewal; `SayHello` as a value."""
        head = self.head
        if head is None:
            return None
        if head.greeted.get(node_id) != supervisor_id:
            return SayHello("say hello")
        try:
            return head.controller.leases.renew(node_id, supervisor_id, epochs, self.clock.boot_s, held_s=held_s)
        except SayHello as error:
            return error

    def hear_events(
        self, node_id: NodeId, supervisor_id: SupervisorId, events: Sequence[tuple[int, Event]]
    ) -> int | None:
        """Up to which number all is durable; -1 for `say hello`."""
        head = self.head
        if head is None:
            return None
        if head.greeted.get(node_id) != supervisor_id:
            return -1
        acked = head.acked.get(supervisor_id, 0)
        fresh = [event for seq, event in events if seq > acked]
        if fresh and not self.quietly(fresh):
            return None
        if self.head is head:
            head.acked[supervisor_id] = max(acked, events[-1][0])
        return events[-1][0]

    def hear_steps(self, node_id: NodeId, supervisor_id: SupervisorId, report: Report) -> bool | None:
        """Whether what a step stream says is durable."""
        head = self.head
        if head is None or head.greeted.get(node_id) != supervisor_id:
            return None
        return self.quietly([report])

    # ---- the engine ----------------------------------------------------------------------------------------------------

    def tell_death(self, node: StagedNode) -> None:
        """The engine has seen the supervisor die and has swept the node; it may say so long after it started another."""
        if self.head is None:
            return  # the engine died with the head; the next one finds nobody there and says nothing
        dead = NodeDead(node_id=node.id, supervisor_id=node.supervisor_id, why="its supervisor died", confirmed=True)
        if not self.quietly([dead]):
            self.after(RETRY_S, lambda: self.tell_death(node))

    def kill_node(self, name: str, *, silent: bool = False) -> None:
        """Power off. The engine sees it and sweeps, unless `silent`: then the lease alone tells."""
        node = self.nodes[NodeId(name)]
        if not node.alive:
            return
        node.die()
        if self.engine_watches and not silent:
            self.after(TOLD_S + self.engine_late_s, lambda: self.tell_death(node))

    def revive_node(self, name: str) -> None:
        """Switch it on again: another life of its supervisor. An engine sweeps before it revives, and tells when it can."""
        node = self.nodes[NodeId(name)]
        if node.alive:
            return
        if node.orphans:
            self.after(0.2, lambda: self.revive_node(name))
            return
        fresh = SimNode(self, node.record, life=node.life + 1, link=node.link)
        self.nodes[node.id] = fresh
        fresh.boot()

    def jump_clock(self, seconds: float) -> None:
        """Somebody sets the wall clock, everywhere."""
        self.clock.wall_offset_s += seconds

    def heal(self) -> None:
        """Every fault ends."""
        self.store.refuse_next, self.store.crash_next = 0, None
        self.drop_command = lambda _: False
        self.commit_s = self.engine_late_s = 0.0
        self.flaws.clear()
        self.bad_links.clear()
        if self.head is None:
            self.start_head()
        for node in list(self.nodes.values()):
            for way in (node.link.up, node.link.down):
                way.latency_s, way.spread_s, way.loss, way.double, way.cut = LATENCY_S, 0.0, 0.0, 0.0, False
            node.unfreezable = node.processes.unkillable = False
            node.resume()
            self.revive_node(node.id)
