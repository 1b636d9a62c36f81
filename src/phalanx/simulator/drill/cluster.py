"""A whole cluster in virtual time: the real controller, the real supervisor logic, a store, and an unreliable network.

Clocks, messages, processes and the disk are simulated. Everything is deterministic for a seed. Callers advance time with `run`, `until`
or `events`. `invariants` checks the invariants after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Final

from phalanx.controller.audit_trail import AuditTrail
from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook, UnknownSupervisor
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.step_result import Answer, ControllerTime, StepResult
from phalanx.controller.supervisor_incarnations import RegistrationChallenged
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import Event, PutProject, PutQueue, PutUser, Request
from phalanx.core.state.reports import NodeDied, Report, SupervisorRegistered
from phalanx.core.state.world import World
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import User, UserRole
from phalanx.node.logic.events import MemberKey, SupervisorEvent
from phalanx.planner.facts.failure_rules import shipped_rules
from phalanx.ports.store import StoreRefused
from phalanx.simulator.drill.behaviour import JobBehaviour, SimulatedTask
from phalanx.simulator.drill.clock import BEGIN_UNIX_S, VirtualClock
from phalanx.simulator.drill.coverage import Coverage, MemberStates
from phalanx.simulator.drill.disk import CommitCrash, DrillMemoryStore, HeadDied
from phalanx.simulator.drill.head import DrillHead, NoAnswer
from phalanx.simulator.drill.invariants import InvariantChecker
from phalanx.simulator.drill.network import LATENCY_S, VirtualNetwork
from phalanx.simulator.drill.node import DrillNode
from phalanx.simulator.drill.operator_invariants import AUDIT_KEY, call_of
from phalanx.simulator.drill.pools.invariants import PoolChecker
from phalanx.simulator.drill.pools.provider import DrillProvider
from phalanx.simulator.drill.protocols import NodeInterface
from phalanx.simulator.drill.violations import require

RETRY_S: Final = 0.5
DEATH_REPORTED_S: Final = 0.1  # time until an engine has noticed a death and swept the node
EVENTS_PER_INSTANT_MAX: Final = 20_000  # events at one instant; more means that time does not advance


class DrillCluster:
    """The cluster; see the module.

    Attributes:
        head: the current incarnation of the head; None while it is down.
        behaviours: behaviour of jobs by name; other jobs run for 5 s and succeed.
        committed_events: every committed event, oldest first.
        drop_command: decides which commands are lost.
        bad_links: pairs of nodes that cannot connect.
        refusing_nodes: nodes that refuse every member, with the reason (a leading "?" blames the node).
        commit_s: duration of a commit.
        event_count: number of state changes so far.
        processes_changed: whether the set of executing processes has changed since the last check.
        on_turn, on_head_death: called after each turn, and when a head dies during one.
        crash_looping: jobs whose rank 0 crashes within a second of every start.
        leases_until_s: end of the leases granted by a planned stop; survives the head, as its file does.
        original_nodes: the original record of each node, with all devices.
        provider: starts and stops the nodes of pools; None if there are no pools.
    """

    def __init__(
        self,
        fleet: Iterable[Node],
        *,
        policy: PolicySettings | None = None,
        lease_s: float = 6.0,
        store: DrillMemoryStore | None = None,
        rng: Random | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.rng = rng or Random(0)
        self.network = VirtualNetwork(self.clock, self.rng)
        self.policy = policy or PolicySettings()
        self.lease_s = lease_s
        self.store = store or DrillMemoryStore()
        self.behaviours: dict[str, JobBehaviour] = {}
        self.corrupt_checkpoints: set[str] = set()
        self.deleted_checkpoints: set[str] = set()
        self.committed_events: list[Event] = []
        self.commands: list[Any] = []
        self.drop_command: Callable[[Any], bool] = lambda _: False
        self.bad_links: list[set[str]] = []
        self.refusing_nodes: dict[str, str] = {}
        self.commit_s = 0.0
        self.event_count = 0
        self.processes_changed = True
        self.coverage = Coverage()
        self.on_turn: Callable[[StepResult], None] = lambda _: None
        self.on_head_death: Callable[[World, CommitCrash], None] = lambda _world, _crash: None
        self.crash_looping: set[JobId] = set()
        self.leases_until_s = 0.0
        self.invariants = InvariantChecker(self)
        self.provider: DrillProvider | None = None
        self.engine_watches = True
        self.engine_late_s = 0.0
        self._incarnations = self._at_once = 0
        self._in_doubt: tuple[DrillHead, StepResult, ControllerTime] | None = None
        self.head: DrillHead | None = None
        self.nodes: dict[NodeId, DrillNode] = {}
        self.start_head()
        self.request(PutUser(user=User(id=UserId("ada"), role=UserRole.USER)))
        self.request(PutUser(user=User(id=UserId("op"), role=UserRole.OPERATOR)))
        self.request(PutProject(project=Project(id=ProjectId("gpt"))))
        self.request(PutQueue(queue=Queue(id=QueueId("default"))))
        self.original_nodes: dict[NodeId, Node] = {node.id: node for node in fleet}
        for node in self.original_nodes.values():
            self.nodes[node.id] = DrillNode(self, node)
            self.nodes[node.id].boot()
        self.run(0.2)

    def add_provider(self, dice: Random, make_node: Callable[[str], Node]) -> DrillProvider:
        """Add the provider of node pools, whose nodes `make_node` describes."""
        self.provider = DrillProvider(self, dice, make_node)
        self.invariants.pools = PoolChecker(self.provider, self.store)
        return self.provider

    # ---- time ----------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> ControllerTime:
        """Both clocks."""
        return self.clock.now

    @property
    def boot_s(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.clock.boot_s

    def gang_tasks(self, key: MemberKey) -> list[SimulatedTask]:
        """Return the executing tasks of one generation on all nodes."""
        return [task for node in self.nodes.values() for task in node.executing_tasks() if task.key == key]

    def call_after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule a call."""
        self.clock.call_after(delay_s, what)

    def run(self, seconds: float) -> None:
        """Advance time by `seconds`."""
        end_s = self.clock.boot_s + seconds
        while (next_s := self.clock.next_call_s()) is not None and next_s <= end_s:
            self.run_next()
        self.clock.boot_s = end_s

    def events(self, while_: Callable[[], bool], limit_s: float = 200.0) -> Iterator[None]:
        """Run one event at a time while the condition holds; yield before each. Fails after the limit."""
        start_s = self.clock.boot_s
        while while_():
            assert self.clock.boot_s - start_s <= limit_s, f"not within {limit_s} s\n{self.event_lines()}"
            yield
            self.run_next()

    def until(self, what: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Advance time until the condition holds; return the elapsed time. Fails after the limit."""
        start_s = self.clock.boot_s
        for _ in self.events(lambda: not what(), limit_s):
            pass
        return self.clock.boot_s - start_s

    def run_next(self) -> None:
        """Run the next event and check the executing processes."""
        at_s, do = self.clock.boot_s, self.clock.next_call()
        self._at_once = self._at_once + 1 if at_s == self.clock.boot_s else 0
        require(
            self._at_once < EVENTS_PER_INSTANT_MAX,
            0,
            f"time does not advance: {EVENTS_PER_INSTANT_MAX} events at one instant",
        )
        do()
        if self.processes_changed:  # otherwise the executing processes are unchanged
            self.processes_changed = False
            self.invariants.check_processes()

    def count_event(self, what: str) -> None:
        """Count a state change."""
        self.event_count += 1
        self.coverage.add_trace_line(f"{self.clock.boot_s:.6f} {what}")

    def member_changed(
        self, node_id: NodeId, before: MemberStates, after: MemberStates, cause: SupervisorEvent | None
    ) -> None:
        """Count a supervisor's step that changed a member."""
        self.count_event(f"{node_id} {self.coverage.count_member_transitions(before, after, cause)}")

    # ---- users ---------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The head's state."""
        assert self.head is not None
        return self.head.controller.world

    def request(self, event: Event) -> Any:
        """Send a request to the head; raise its refusal."""
        answer = self.turn([event])[0]
        if isinstance(answer, PhalanxError):
            raise answer
        return answer

    def event_lines(self, job_id: JobId | None = None, lines: int = 60) -> str:
        """Return the last event lines, for failure messages."""
        return "\n".join(
            f"{line.at_s - BEGIN_UNIX_S:9.2f} {line.kind:12} job {line.job_id or '-'}.{line.epoch or '-'} {line.text}"
            for line in self.store.history(job_id=job_id, limit=1_000_000)[-lines:]
        )

    # ---- the head ------------------------------------------------------------------------------------------------------

    def start_head(self, *, leases_until_s: float = 0.0) -> DrillHead:
        """Start a head from the store."""
        if self._incarnations:
            durable = self.store.reopen()
            doubt, self._in_doubt = self._in_doubt, None
            if durable and doubt is not None:
                self.processes_changed = True
                head, outbox, now = doubt
                self.invariants.check_commit(outbox, head, now)
            self.invariants.check_store()
            self.count_event("head starts")
        self._incarnations += 1
        controller = Controller(
            world=self.store.load(),
            leases=LeaseBook(lease_s=self.lease_s),
            policy=self.policy,
            head_id=str(self._incarnations),
            settings=ControllerSettings(
                checkpoint_root="/ckpt",
                output_root="/out",
                storage_key=str(self._incarnations),
                rules=shipped_rules(),
            ),
        )
        audit = AuditTrail(key=AUDIT_KEY)
        audit.resume_after(self.store.audit_tip())
        self.head = DrillHead(incarnation=self._incarnations, controller=controller, audit=audit)
        controller.start(self.now, leases_until_s=max(leases_until_s, self.leases_until_s))
        if self.provider is not None:
            self.provider.open(self.head, list(controller.world.pool_nodes.values()))
        self._wake_head(self.head, 0.0)
        return self.head

    def kill_head(self) -> None:
        """Kill the head; only the store remains."""
        self.head = None

    def turn(self, events: Sequence[Event]) -> Sequence[Answer | PhalanxError]:
        """Run one driver turn: step, commit, then publish and deliver commands.

        Raises:
            StoreRefused: the commit failed and the step was undone.
            NoAnswer: the head died or is down.
        """
        head = self.head
        if head is None:
            raise NoAnswer("the head is down")
        controller, now = head.controller, self.now
        outbox = controller.step(now, events)
        calls = [call_of(event) for event in events if isinstance(event, Request)]
        audit = head.audit.next_lines([(calls, events, outbox.answers)] if calls else (), now.wall_s)
        try:
            if audit or not outbox.change.empty:
                self.store.commit(outbox.batch(audit))
        except StoreRefused:
            controller.refused(outbox)
            self._wake_head(head, RETRY_S)
            raise
        except HeadDied as death:
            self._in_doubt, self.head, self.processes_changed = (head, outbox, now), None, True
            self.invariants.operators.forget(events)
            self.on_head_death(controller.world, death.crash)
            raise NoAnswer("the head died in this commit") from None
        if audit:
            head.audit.resume_after(audit[-1])
        if not outbox.change.empty:
            head.busy_until_s = max(head.busy_until_s, self.clock.boot_s + self.commit_s)
            self.processes_changed = True
            history = [(line.seq, line.job_id, line.text) for line in outbox.change.history]
            self.count_event(f"commit {history} {[type(one).__name__ for one in outbox.commands]}")
        self.invariants.check_commit(outbox, head, now)
        controller.committed(outbox, now)
        self.invariants.check_events(events, controller.world)
        self.committed_events += events
        self._post(head, outbox)
        self._wake_head(head, outbox.wake_in_s)
        self.on_turn(outbox)
        return outbox.answers

    def _post(self, head: DrillHead, outbox: StepResult) -> None:
        for command in outbox.commands:
            self.commands.append(command)
            if self.drop_command(command):
                continue
            head.mailboxes.post(command.node_id, command)
            node = self.nodes.get(command.node_id)
            if node is not None:
                self.call_after(node.link.down.latency_s + self.answer_delay_s(), node.calls.poll)
        for name in outbox.lost:
            head.mailboxes.remove(name)
        if self.provider is not None:
            self.provider.send(head, outbox.provider_calls)

    def answer_delay_s(self) -> float:
        """Return how long the head's answers are delayed by its disk."""
        return 0.0 if self.head is None else max(0.0, self.head.busy_until_s - self.clock.boot_s)

    def call_when_head_free(self, what: Callable[[], None]) -> None:
        """Call when the head's thread is free."""
        wait_s = self.answer_delay_s()
        if wait_s > 0:
            self.call_after(wait_s, lambda: self.call_when_head_free(what))
        else:
            what()

    def _wake_head(self, head: DrillHead, in_s: float) -> None:
        head.wake_number += 1
        number = head.wake_number

        def wake() -> None:
            if self.head is head and head.wake_number == number:
                self.call_when_head_free(lambda: self._wake(head))

        self.call_after(max(0.001, in_s), wake)

    def _wake(self, head: DrillHead) -> None:
        if self.head is head:
            self.try_turn([])

    def try_turn(self, events: Sequence[Event]) -> bool:
        """Run a turn that the sender retries on failure. Return whether it succeeded."""
        try:
            self.turn(events)
        except (StoreRefused, NoAnswer):
            return False
        return True

    # ---- requests of nodes to the head: None means no answer -----------------------------------------------------------

    def registration_of(self, node: NodeInterface) -> SupervisorRegistered:
        """Build the registration of the node's supervisor."""
        carries = tuple((key.job_id, key.epoch, key.generation) for key in node.reported_members)
        return SupervisorRegistered(node=node.record, supervisor_id=node.supervisor_id, running=carries)

    def handle_registration(self, node_id: NodeId, hello: SupervisorRegistered) -> tuple[int | str | None, int]:
        """Register a supervisor. Return the last command number or the head's challenge, and the head's incarnation."""
        head = self.head
        if head is None:
            return None, 0
        after = head.mailboxes.last(node_id)
        try:
            answer = self.turn([hello])[0]
        except (StoreRefused, NoAnswer):
            return None, head.incarnation
        if isinstance(answer, RegistrationChallenged):
            return answer.challenge, head.incarnation
        if isinstance(answer, PhalanxError):
            return None, head.incarnation
        if head.registered.get(node_id) != hello.supervisor_id:
            head.acked.pop(hello.supervisor_id, None)
        head.registered[node_id] = hello.supervisor_id
        return after, head.incarnation

    def handle_renewal(
        self, node_id: NodeId, supervisor_id: SupervisorId, epochs: list[tuple[JobId, Epoch]], held_s: float
    ) -> Any:
        """Renew a lease; return `UnknownSupervisor` as a value."""
        head = self.head
        if head is None:
            return None
        if head.registered.get(node_id) != supervisor_id:
            return UnknownSupervisor("say hello")
        try:
            return head.controller.leases.renew(node_id, supervisor_id, epochs, self.clock.boot_s, held_s=held_s)
        except UnknownSupervisor as error:
            return error

    def handle_events(
        self, node_id: NodeId, supervisor_id: SupervisorId, events: Sequence[tuple[int, Event]]
    ) -> int | None:
        """Commit events. Return the last durable number; -1 asks the supervisor to register."""
        head = self.head
        if head is None:
            return None
        if head.registered.get(node_id) != supervisor_id:
            return -1
        acked = head.acked.get(supervisor_id, 0)
        fresh = [event for seq, event in events if seq > acked]
        if fresh and not self.try_turn(fresh):
            return None
        if self.head is head:
            head.acked[supervisor_id] = max(acked, events[-1][0])
        return events[-1][0]

    def handle_step_report(self, node_id: NodeId, supervisor_id: SupervisorId, report: Report) -> bool | None:
        """Commit a report from a step stream. Return whether it is durable."""
        head = self.head
        if head is None or head.registered.get(node_id) != supervisor_id:
            return None
        return self.try_turn([report])

    # ---- the engine ----------------------------------------------------------------------------------------------------

    def report_death(self, node: NodeInterface) -> None:
        """Report a supervisor's death after the engine's sweep; the report may arrive after the next incarnation has started."""
        if self.provider is not None and self.provider.machine_of(node.id) is not None:
            self.provider.machine_ended(node.id)
            return
        if self.head is None:
            return  # the engine died with the head; the next one finds no process and sends nothing
        dead = NodeDied(node_id=node.id, supervisor_id=node.supervisor_id, why="its supervisor died", confirmed=True)
        if not self.try_turn([dead]):
            self.call_after(RETRY_S, lambda: self.report_death(node))

    def kill_node(self, name: str, *, silent: bool = False) -> None:
        """Power off a node. The engine notices and sweeps; with `silent` only the lease reveals it."""
        node = self.nodes.get(NodeId(name))
        if node is None or not node.alive:
            return
        node.power_off()
        if self.engine_watches and not silent:
            self.call_after(DEATH_REPORTED_S + self.engine_late_s, lambda: self.report_death(node))

    def revive_node(self, name: str) -> None:
        """Power on a node with a new supervisor incarnation, after the engine has swept it. A machine that was released stays away."""
        node = self.nodes.get(NodeId(name))
        if node is None or node.alive:
            return
        if node.has_orphans:
            self.call_after(0.2, lambda: self.revive_node(name))
            return
        fresh = DrillNode(self, node.record, incarnation=node.incarnation + 1, link=node.link)
        self.nodes[node.id] = fresh
        fresh.boot()

    def jump_clock(self, seconds: float) -> None:
        """Set the wall clock of all machines."""
        self.clock.wall_offset_s += seconds

    def heal(self) -> None:
        """End every fault."""
        self.store.full_commits, self.store.next_crash = 0, None
        self.drop_command = lambda _: False
        self.commit_s = self.engine_late_s = 0.0
        if self.provider is not None:
            self.provider.heal()
        self.refusing_nodes.clear()
        self.bad_links.clear()
        if self.head is None:
            self.start_head()
        for node in list(self.nodes.values()):
            for way in (node.link.up, node.link.down):
                way.latency_s, way.spread_s, way.loss, way.double, way.cut = LATENCY_S, 0.0, 0.0, 0.0, False
            node.unfreezable = node.processes.unkillable = False
            node.resume()
            self.revive_node(node.id)
