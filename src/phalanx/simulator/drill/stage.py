"""Protocols between the parts of a drill: each part declares only what it uses of the cluster and of a node.

`cluster.Cluster` implements `Stage` for nodes and `Watched` for invariants; `node.SimNode` implements `StagedNode`. mypy checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.controller.outbox import Now
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.commands import Prepare
from phalanx.core.state.events import Event, Hello, Report
from phalanx.core.state.world import World
from phalanx.node.logic.happenings import Happening, MemberKey
from phalanx.node.logic.supervisor import Supervisor
from phalanx.ports.store import Store
from phalanx.simulator.drill.behaviour import Behaviour, Task
from phalanx.simulator.drill.clock import Clock
from phalanx.simulator.drill.coverage import Coverage, Glance
from phalanx.simulator.drill.head import Head
from phalanx.simulator.drill.network import Link, Network


class Stage(Protocol):
    """The cluster as used by a node: time, network, the head's endpoints, and injected faults.

    Attributes:
        touched: set when the executing processes change.
    """

    touched: bool

    @property
    def clock(self) -> Clock:
        """The virtual clock."""
        ...

    @property
    def now(self) -> Now:
        """Both clocks."""
        ...

    @property
    def network(self) -> Network:
        """The network."""
        ...

    @property
    def head(self) -> Head | None:
        """Its current incarnation; None while it is down."""
        ...

    @property
    def store(self) -> Store:
        """The committed state."""
        ...

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        """Behaviour of jobs by name."""
        ...

    @property
    def corrupt(self) -> set[str]:
        """Digests of corrupt checkpoints."""
        ...

    @property
    def deleted(self) -> set[str]:
        """Paths of deleted checkpoints; nodes add to it, and remove paths that are saved again."""
        ...

    @property
    def cursed(self) -> set[JobId]:
        """Jobs whose rank 0 crashes soon after every start."""
        ...

    @property
    def bad_links(self) -> Sequence[set[str]]:
        """Pairs of nodes that cannot connect."""
        ...

    @property
    def flaws(self) -> Mapping[str, str]:
        """Nodes that refuse every member, with the reason."""
        ...

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule a call."""
        ...

    def when_free(self, what: Callable[[], None]) -> None:
        """Call when the head's thread is free."""
        ...

    def answer_s(self) -> float:
        """Return how long the head's answers are delayed by its disk."""
        ...

    def stepped(self, node_id: NodeId, before: Glance, after: Glance, cause: Happening | None) -> None:
        """Count a supervisor's step that changed a member."""
        ...

    def tell_death(self, node: StagedNode) -> None:
        """Report a supervisor's death from the engine."""
        ...

    def hello_of(self, node: StagedNode) -> Hello:
        """Build the registration of the node's supervisor."""
        ...

    def hear_hello(self, node_id: NodeId, hello: Hello) -> tuple[int | str | None, int]:
        """Register a supervisor. Return the last command number or the head's challenge, and the head's incarnation."""
        ...

    def hear_renewal(
        self, node_id: NodeId, supervisor_id: SupervisorId, epochs: list[tuple[JobId, Epoch]], held_s: float
    ) -> Any:
        """Renew a lease; return `SayHello` as a value, None without an answer."""
        ...

    def hear_events(
        self, node_id: NodeId, supervisor_id: SupervisorId, events: Sequence[tuple[int, Event]]
    ) -> int | None:
        """Commit events. Return the last durable number; -1 asks the supervisor to register."""
        ...

    def hear_steps(self, node_id: NodeId, supervisor_id: SupervisorId, report: Report) -> bool | None:
        """Commit a report from a step stream. Return whether it is durable."""
        ...


class StagedNode(Protocol):
    """A node as used by its processes, its calls, the head and the invariants."""

    @property
    def cluster(self) -> Stage:
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
    def link(self) -> Link:
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
    def tasks(self) -> Mapping[tuple[MemberKey, int], Task]:
        """Its processes, by member and rank."""
        ...

    @property
    def carried(self) -> tuple[MemberKey, ...]:
        """The members that its supervisor reports."""
        ...

    def working(self) -> Sequence[Task]:
        """Return the tasks that are executing now."""
        ...

    def hear(self, *happenings: Happening) -> None:
        """Step the supervisor once per event."""
        ...

    def later(self, delay_s: float, *happenings: Happening) -> None:
        """Deliver the events after a delay."""
        ...

    def put_steps(self, report: Report) -> None:
        """Send a report from a task's step stream."""
        ...

    def behaviour(self, prepare: Prepare) -> Behaviour:
        """Return the behaviour of the job's tasks."""
        ...

    def behaviour_of(self, key: MemberKey) -> Behaviour:
        """Return the behaviour of a member's tasks."""
        ...

    def cannot_spawn(self, key: MemberKey) -> None:
        """Report that a task could not be exec'd."""
        ...


class Watched(Protocol):
    """The cluster as used by the invariants; they change only the counts in `coverage`."""

    @property
    def now(self) -> Now:
        """Both clocks."""
        ...

    @property
    def boot_s(self) -> float:
        """CLOCK_BOOTTIME."""
        ...

    @property
    def policy(self) -> Policy:
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
    def nodes(self) -> Mapping[NodeId, StagedNode]:
        """The current incarnation of each node."""
        ...

    @property
    def corrupt(self) -> set[str]:
        """Digests of corrupt checkpoints."""
        ...

    @property
    def deleted(self) -> set[str]:
        """Paths of deleted checkpoints."""
        ...

    @property
    def coverage(self) -> Coverage:
        """Counts of job transitions."""
        ...

    def told(self, job_id: JobId | None = None) -> str:
        """Return the event lines of a job, for failure messages."""
        ...
