"""A whole cluster in virtual time: the real controller, the real supervisor logic, a store, and an unreliable network.

Clocks, messages, processes and the disk are simulated. Everything is deterministic for a seed. Callers advance time with `run`, `until`
or `events`. `invariants` checks the invariants after every event.
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
TOLD_S: Final = 0.1  # time until an engine has noticed a death and swept the node
STANDSTILL: Final = 20_000  # events at one instant; more means that time does not advance


class Cluster:
    """The cluster; see the module.

    Attributes:
        head: the current incarnation of the head; None while it is down.
        behaviours: behaviour of jobs by name; other jobs run for 5 s and succeed.
        heard: every committed event, oldest first.
        drop_command: decides which commands are lost.
        bad_links: pairs of nodes that cannot connect.
        flaws: nodes that refuse every member, with the reason (a leading "?" blames the node).
        commit_s: duration of a commit.
        counted: number of state changes so far.
        touched: whether the set of executing processes has changed since the last check.
        told_of, head_died: called after each turn, and when a head dies during one.
        cursed: jobs whose rank 0 crashes within a second of every start.
        leases_until_s: end of the leases granted by a planned stop; survives the head, as its file does.
        whole: the original record of each node, with all devices.
    """

    def __init__(
        self,
        fleet: Iterable[Node],
        *,
        policy: Policy | None = None,
        lease_s: float = 6.0,
        store: MemoryDisk | None = None,
        dice: Random | None = None,
    ) -> None:
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
        self._incarnations = self._at_once = 0
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
        """Schedule a call."""
        self.clock.after(delay_s, what)

    def run(self, seconds: float) -> None:
        """Advance time by `seconds`."""
        end_s = self.clock.boot_s + seconds
        while (next_s := self.clock.next_s()) is not None and next_s <= end_s:
            self.run_one()
        self.clock.boot_s = end_s

    def events(self, while_: Callable[[], bool], limit_s: float = 200.0) -> Iterator[None]:
        """Run one event at a time while the condition holds; yield before each. Fails after the limit."""
        start_s = self.clock.boot_s
        while while_():
            assert self.clock.boot_s - start_s <= limit_s, f"not within {limit_s} s\n{self.told()}"
            yield
            self.run_one()

    def until(self, what: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Advance time until the condition holds; return the elapsed time. Fails after the limit."""
        start_s = self.clock.boot_s
        for _ in self.events(lambda: not what(), limit_s):
            pass
        return self.clock.boot_s - start_s

    def run_one(self) -> None:
        """Run the next event and check the executing processes."""
        at_s, do = self.clock.boot_s, self.clock.pop()
        self._at_once = self._at_once + 1 if at_s == self.clock.boot_s else 0
        demand(self._at_once < STANDSTILL, 0, f"time does not advance: {STANDSTILL} events at one instant")
        do()
        if self.touched:  # otherwise the executing processes are unchanged
            self.touched = False
            self.watch.truth()

    def count(self, what: str) -> None:
        """Count a state change."""
        self.counted += 1
        self.coverage.note(f"{self.clock.boot_s:.6f} {what}")

    def stepped(self, node_id: NodeId, before: Glance, after: Glance, cause: Happening | None) -> None:
        """Count a supervisor's step that changed a member."""
        self.count(f"{node_id} {self.coverage.member_edges(before, after, cause)}")

    # ---- users ---------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The head's state."""
        assert self.head is not None
        return self.head.controller.world

    def ask(self, event: Event) -> Any:
        """Send a request to the head; raise its refusal."""
        answer = self.turn([event])[0]
        if isinstance(answer, PhalanxError):
            raise answer
        return answer

    def told(self, job_id: JobId | None = None, lines: int = 60) -> str:
        """Return the last event lines, for failure messages."""
        return "\n".join(
            f"{line.at_s - BEGIN_UNIX_S:9.2f} {line.kind:12} job {line.job_id or '-'}.{line.epoch or '-'} {line.text}"
            for line in self.store.story(job_id=job_id, limit=1_000_000)[-lines:]
        )

    # ---- the head ------------------------------------------------------------------------------------------------------

    def start_head(self, *, leases_until_s: float = 0.0) -> Head:
        """Start a head from the store."""
        if self._incarnations:
            durable = self.store.reopen()
            doubt, self._in_doubt = self._in_doubt, None
            if durable and doubt is not None:
                self.touched = True
                head, outbox, now = doubt
                self.watch.committed(outbox, head, now)
            self.watch.restarted()
            self.count("head starts")
        self._incarnations += 1
        controller = Controller(
            world=self.store.load(),
            leases=LeaseBook(lease_s=self.lease_s),
            policy=self.policy,
            head_id=str(self._incarnations),
            settings=Settings(checkpoint_root="/ckpt", output_root="/out", rules=shipped_rules()),
        )
        self.head = Head(number=self._incarnations, controller=controller)
        controller.begin(self.now, leases_until_s=max(leases_until_s, self.leases_until_s))
        self._wake_head(self.head, 0.0)
        return self.head

    def kill_head(self) -> None:
        """Kill the head; only the store remains."""
        self.head = None

    def turn(self, events: Sequence[Event]) -> Sequence[Answer | PhalanxError]:
        """Run one driver turn: step, commit, then publish and deliver commands.

        Raises:
            StoreRefused: the commit failed and the step was undone.
            Unanswered: the head died or is down.
        """
        head = self.head
        if head is None:
            raise Unanswered("the head is down")
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
            raise Unanswered("the head died in this commit") from None
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
        """Return how long the head's answers are delayed by its disk."""
        return 0.0 if self.head is None else max(0.0, self.head.busy_until_s - self.clock.boot_s)

    def when_free(self, what: Callable[[], None]) -> None:
        """Call when the head's thread is free."""
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
        """Run a turn that the sender retries on failure. Return whether it succeeded."""
        try:
            self.turn(events)
        except (StoreRefused, Unanswered):
            return False
        return True

    # ---- requests of nodes to the head: None means no answer -----------------------------------------------------------

    def hello_of(self, node: StagedNode) -> Hello:
        """Build the registration of the node's supervisor."""
        carries = tuple((key.job_id, key.epoch, key.generation) for key in node.carried)
        return Hello(node=node.record, supervisor_id=node.supervisor_id, carries=carries)

    def hear_hello(self, node_id: NodeId, hello: Hello) -> tuple[int | str | None, int]:
        """Register a supervisor. Return the last command number or the head's challenge, and the head's incarnation."""
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
        """Renew a lease; return `SayHello` as a value."""
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
        """Commit events. Return the last durable number; -1 asks the supervisor to register."""
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
        """Commit a report from a step stream. Return whether it is durable."""
        head = self.head
        if head is None or head.greeted.get(node_id) != supervisor_id:
            return None
        return self.quietly([report])

    # ---- the engine ----------------------------------------------------------------------------------------------------

    def tell_death(self, node: StagedNode) -> None:
        """Report a supervisor's death after the engine's sweep; the report may arrive after the next incarnation has started."""
        if self.head is None:
            return  # the engine died with the head; the next one finds no process and sends nothing
        dead = NodeDead(node_id=node.id, supervisor_id=node.supervisor_id, why="its supervisor died", confirmed=True)
        if not self.quietly([dead]):
            self.after(RETRY_S, lambda: self.tell_death(node))

    def kill_node(self, name: str, *, silent: bool = False) -> None:
        """Power off a node. The engine notices and sweeps; with `silent` only the lease reveals it."""
        node = self.nodes[NodeId(name)]
        if not node.alive:
            return
        node.die()
        if self.engine_watches and not silent:
            self.after(TOLD_S + self.engine_late_s, lambda: self.tell_death(node))

    def revive_node(self, name: str) -> None:
        """Power on a node with a new supervisor incarnation, after the engine has swept it."""
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
        """Set the wall clock of all machines."""
        self.clock.wall_offset_s += seconds

    def heal(self) -> None:
        """End every fault."""
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
