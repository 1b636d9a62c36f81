"""What the parts of a drill see of the cluster they play in, and of a node: no more than they use, so that none needs the whole.

`cluster.Cluster` is a `Stage` for its nodes and `Watched` by the invariants, `node.SimNode` is a `StagedNode`; mypy holds them to it.
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
    """What a node needs around it: time, the network, the head's ears, and how fate has it behave.

    Attributes:
        touched: a part sets it where something executes otherwise than before.
    """

    touched: bool

    @property
    def clock(self) -> Clock:
        """The one time."""
        ...

    @property
    def now(self) -> Now:
        """Both clocks."""
        ...

    @property
    def network(self) -> Network:
        """What messages travel on."""
        ...

    @property
    def head(self) -> Head | None:
        """Its present life; None while there is none."""
        ...

    @property
    def store(self) -> Store:
        """Committed truth."""
        ...

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        """How jobs behave, by name."""
        ...

    @property
    def corrupt(self) -> set[str]:
        """Digests of checkpoints that no longer hold."""
        ...

    @property
    def deleted(self) -> set[str]:
        """Paths of checkpoints that were deleted; nodes add to it, and take out what is saved anew."""
        ...

    @property
    def cursed(self) -> set[JobId]:
        """Jobs whose rank 0 dies soon, whenever it starts."""
        ...

    @property
    def bad_links(self) -> Sequence[set[str]]:
        """Pairs of nodes that do not reach each other."""
        ...

    @property
    def flaws(self) -> Mapping[str, str]:
        """Nodes that refuse whatever comes, with why."""
        ...

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Let something happen later."""
        ...

    def when_free(self, what: Callable[[], None]) -> None:
        """Do it when the head's one thread is free."""
        ...

    def answer_s(self) -> float:
        """How long the head's answers wait for its disk."""
        ...

    def stepped(self, node_id: NodeId, before: Glance, after: Glance, cause: Happening | None) -> None:
        """A supervisor's step changed a member."""
        ...

    def tell_death(self, node: StagedNode) -> None:
        """The engine has seen the supervisor die, and says so."""
        ...

    def hello_of(self, node: StagedNode) -> Hello:
        """How the node's supervisor presents itself now."""
        ...

    def hear_hello(self, node_id: NodeId, hello: Hello) -> tuple[int | str | None, int]:
        """Where commands for this supervisor begin, or the head's challenge; and which life of the head says so."""
        ...

    def hear_renewal(
        self, node_id: NodeId, supervisor_id: SupervisorId, epochs: list[tuple[JobId, Epoch]], held_s: float
    ) -> Any:
        """The renewal; `SayHello` as a value; None where there is no answer."""
        ...

    def hear_events(
        self, node_id: NodeId, supervisor_id: SupervisorId, events: Sequence[tuple[int, Event]]
    ) -> int | None:
        """Up to which number all is durable; -1 for `say hello`."""
        ...

    def hear_steps(self, node_id: NodeId, supervisor_id: SupervisorId, report: Report) -> bool | None:
        """Whether what a step stream says is durable."""
        ...


class StagedNode(Protocol):
    """What a node's processes, its calls, the head's ears and the invariants see of it."""

    @property
    def cluster(self) -> Stage:
        """Where it plays."""
        ...

    @property
    def id(self) -> NodeId:
        """The node's name."""
        ...

    @property
    def supervisor_id(self) -> SupervisorId:
        """This life of its supervisor."""
        ...

    @property
    def record(self) -> Node:
        """The node as it presents itself."""
        ...

    @property
    def logic(self) -> Supervisor:
        """The real supervisor."""
        ...

    @property
    def link(self) -> Link:
        """Its only cable."""
        ...

    @property
    def alive(self) -> bool:
        """Whether its supervisor lives."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the whole node stands still."""
        ...

    @property
    def reachable(self) -> bool:
        """Whether it and its cable work."""
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
        """What its supervisor says it carries."""
        ...

    def working(self) -> Sequence[Task]:
        """Tasks that execute instructions at this moment."""
        ...

    def hear(self, *happenings: Happening) -> None:
        """Its supervisor steps once for each."""
        ...

    def later(self, delay_s: float, *happenings: Happening) -> None:
        """The same after a while."""
        ...

    def put_steps(self, report: Report) -> None:
        """What the head reads out of a task's step stream."""
        ...

    def behaviour(self, prepare: Prepare) -> Behaviour:
        """How the job's tasks behave here."""
        ...

    def behaviour_of(self, key: MemberKey) -> Behaviour:
        """The same for a member."""
        ...

    def cannot_spawn(self, key: MemberKey) -> None:
        """A task could not be exec'd."""
        ...


class Watched(Protocol):
    """What the invariants look at; they change nothing but the counts in `coverage`."""

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
        """By which every head decides."""
        ...

    @property
    def store(self) -> Store:
        """Committed truth."""
        ...

    @property
    def world(self) -> World:
        """As the head has it."""
        ...

    @property
    def nodes(self) -> Mapping[NodeId, StagedNode]:
        """Each node in its present life."""
        ...

    @property
    def corrupt(self) -> set[str]:
        """Digests of checkpoints that no longer hold."""
        ...

    @property
    def deleted(self) -> set[str]:
        """Paths of checkpoints that were deleted."""
        ...

    @property
    def coverage(self) -> Coverage:
        """Where the edges that jobs take are counted."""
        ...

    def told(self, job_id: JobId | None = None) -> str:
        """The story, for failures."""
        ...
