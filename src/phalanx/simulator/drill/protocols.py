"""Protocols between the parts of a drill: each part declares only what it uses of the cluster and of a node.

`cluster.Cluster` implements `Stage` for nodes and `ObservedCluster` for invariants; `node.SimNode` implements `NodeInterface`. mypy checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.controller.step_result import ControllerTime
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.events import Event
from phalanx.core.state.reports import Report, SupervisorRegistered
from phalanx.core.state.world import World
from phalanx.node.logic.events import MemberKey, SupervisorEvent
from phalanx.node.logic.supervisor import Supervisor
from phalanx.ports.store import Store
from phalanx.simulator.drill.behaviour import JobBehaviour, SimulatedTask
from phalanx.simulator.drill.clock import VirtualClock
from phalanx.simulator.drill.coverage import Coverage, MemberStates
from phalanx.simulator.drill.head import DrillHead
from phalanx.simulator.drill.network import NodeLink, VirtualNetwork


class NodeEnvironment(Protocol):
    """The cluster as used by a node: time, network, the head's endpoints, and injected faults.

    Attributes:
        processes_changed: set when the executing processes change.
    """

    processes_changed: bool

    @property
    def clock(self) -> VirtualClock:
        """The virtual clock."""
        ...

    @property
    def now(self) -> ControllerTime:
        """Both clocks."""
        ...

    @property
    def network(self) -> VirtualNetwork:
        """The network."""
        ...

    @property
    def head(self) -> DrillHead | None:
        """Its current incarnation; None while it is down."""
        ...

    @property
    def store(self) -> Store:
        """The committed state."""
        ...

    @property
    def behaviours(self) -> Mapping[str, JobBehaviour]:
        """Behaviour of jobs by name."""
        ...

    @property
    def corrupt_checkpoints(self) -> set[str]:
        """Digests of corrupt checkpoints."""
        ...

    @property
    def deleted_checkpoints(self) -> set[str]:
        """Paths of deleted checkpoints; nodes add to it, and remove paths that are saved again."""
        ...

    @property
    def crash_looping(self) -> set[JobId]:
        """Jobs whose rank 0 crashes soon after every start."""
        ...

    @property
    def bad_links(self) -> Sequence[set[str]]:
        """Pairs of nodes that cannot connect."""
        ...

    @property
    def refusing_nodes(self) -> Mapping[str, str]:
        """Nodes that refuse every member, with the reason."""
        ...

    def gang_tasks(self, key: MemberKey) -> Sequence[SimulatedTask]:
        """Return the executing tasks of one generation on all nodes."""
        ...

    def call_after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule a call."""
        ...

    def call_when_head_free(self, what: Callable[[], None]) -> None:
        """Call when the head's thread is free."""
        ...

    def answer_delay_s(self) -> float:
        """Return how long the head's answers are delayed by its disk."""
        ...

    def member_changed(
        self, node_id: NodeId, before: MemberStates, after: MemberStates, cause: SupervisorEvent | None
    ) -> None:
        """Count a supervisor's step that changed a member."""
        ...

    def report_death(self, node: NodeInterface) -> None:
        """Report a supervisor's death from the engine."""
        ...

    def registration_of(self, node: NodeInterface) -> SupervisorRegistered:
        """Build the registration of the node's supervisor."""
        ...

    def handle_registration(self, node_id: NodeId, hello: SupervisorRegistered) -> tuple[int | str | None, int]:
        """Register a supervisor. Return the last command number or the head's challenge, and the head's incarnation."""
        ...

    def handle_renewal(
        self, node_id: NodeId, supervisor_id: SupervisorId, epochs: list[tuple[JobId, Epoch]], held_s: float
    ) -> Any:
        """Renew a lease; return `UnknownSupervisor` as a value, None without an answer."""
        ...

    def handle_events(
        self, node_id: NodeId, supervisor_id: SupervisorId, events: Sequence[tuple[int, Event]]
    ) -> int | None:
        """Commit events. Return the last durable number; -1 asks the supervisor to register."""
        ...

    def handle_step_report(self, node_id: NodeId, supervisor_id: SupervisorId, report: Report) -> bool | None:
        """Commit a report from a step stream. Return whether it is durable."""
        ...


class NodeInterface(Protocol):
    """A node as used by its processes, its calls, the head and the invariants."""

    @property
    def cluster(self) -> NodeEnvironment:
        """The cluster around it."""
        ...

    @property
    def id(self) -> NodeId:
        """The node's name."""
        ...

    @property
    def supervisor_id(self) -> SupervisorId:
        """The supervisor's incarnation."""
        ...

    @property
    def record(self) -> Node:
        """The node as it registers."""
        ...

    @property
    def logic(self) -> Supervisor:
        """The real supervisor logic."""
        ...

    @property
    def link(self) -> NodeLink:
        """Its link to the head."""
        ...

    @property
    def alive(self) -> bool:
        """Whether its supervisor is running."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the whole node is stopped."""
        ...

    @property
    def reachable(self) -> bool:
        """Whether the node and its link work."""
        ...

    @property
    def wall_s(self) -> float:
        """Its wall clock."""
        ...

    @property
    def tasks(self) -> Mapping[tuple[MemberKey, int], SimulatedTask]:
        """Its processes, by member and rank."""
        ...

    @property
    def reported_members(self) -> tuple[MemberKey, ...]:
        """The members that its supervisor reports."""
        ...

    def executing_tasks(self) -> Sequence[SimulatedTask]:
        """Return the tasks that are executing now."""
        ...

    def deliver(self, *happenings: SupervisorEvent) -> None:
        """Step the supervisor once per event."""
        ...

    def deliver_later(self, delay_s: float, *happenings: SupervisorEvent) -> None:
        """Deliver the events after a delay."""
        ...

    def send_step_report(self, report: Report) -> None:
        """Send a report from a task's step stream."""
        ...

    def behaviour(self, prepare: PrepareTasks) -> JobBehaviour:
        """Return the behaviour of the job's tasks."""
        ...

    def behaviour_of(self, key: MemberKey) -> JobBehaviour:
        """Return the behaviour of a member's tasks."""
        ...

    def report_spawn_failure(self, key: MemberKey) -> None:
        """Report that a task could not be exec'd."""
        ...


class ObservedCluster(Protocol):
    """The cluster as used by the invariants; they change only the counts in `coverage`."""

    @property
    def now(self) -> ControllerTime:
        """Both clocks."""
        ...

    @property
    def boot_s(self) -> float:
        """CLOCK_BOOTTIME."""
        ...

    @property
    def policy(self) -> PolicySettings:
        """The policy of every head."""
        ...

    @property
    def store(self) -> Store:
        """The committed state."""
        ...

    @property
    def world(self) -> World:
        """The head's state."""
        ...

    @property
    def nodes(self) -> Mapping[NodeId, NodeInterface]:
        """The current incarnation of each node."""
        ...

    @property
    def corrupt_checkpoints(self) -> set[str]:
        """Digests of corrupt checkpoints."""
        ...

    @property
    def deleted_checkpoints(self) -> set[str]:
        """Paths of deleted checkpoints."""
        ...

    @property
    def coverage(self) -> Coverage:
        """Counts of job transitions."""
        ...

    def event_lines(self, job_id: JobId | None = None) -> str:
        """Return the event lines of a job, for failure messages."""
        ...
