"""The port of providers of node pools. A provider starts and stops machines; the supervisor on each registers with the head as any other.

A provider consists of a `ProviderType`, found by its name (`providers.registry`), and of the `NodeProvider` that it creates for one head.
`docs/add-a-provider.md` adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeTemplate
    from phalanx.core.ids import NodeId, PoolId
    from phalanx.ports.engine import EngineContext


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTerms:
    """What an operator asks of the nodes of a new pool.

    Attributes:
        template: what each node has, as the operator wrote it.
        zones: where, in the order in which they are tried; empty for the provider's choice.
        settings: by name, as the provider defines them.
        price_per_h: of one node, in US dollars; None for the prices that the provider knows.
    """

    template: str
    zones: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    price_per_h: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """One node to start or stop.

    Attributes:
        token: idempotency token of the order.
        template: what to start, as `NodeTemplate.text`.
        zone: where, empty for anywhere.
        pool: the pool's name.
        offer: the text of the offer to try, of `NodeTemplate.offers`.
        settings: of the pool.
        machine: stop only this machine of the order; empty for all.
        known_machine: the machine that the record of the order has; empty if its start was not answered.
    """

    node_id: NodeId
    token: str
    template: str
    zone: str = ""
    pool: str = ""
    offer: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    known_machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that ended although it was not stopped: none of its processes is left."""

    node_id: NodeId
    token: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedMachine:
    """The machine of an order. `since_s`: since when it is charged (Unix seconds by the provider's clock), 0 if unknown."""

    machine: str
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRight:
    """One thing that a provider needs to do. `allowed`: None if it cannot be tried without doing it; `why`: what the cloud said."""

    name: str
    allowed: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRights:
    """What the credentials of a head may do. `policy`: the least that is to be granted, in the cloud's own language."""

    rights: Sequence[CloudRight]
    policy: str = ""


class OfferRefused(OSError):
    """The offer brings no node now, for want of capacity or quota. For certain, nothing was started; the next offer is tried."""


class CallUnanswered(OSError):
    """Whether the call was carried out is unknown, or the provider asked to wait. The head calls again with the same token and offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingNode:
    """A node that will end soon, or that the provider cannot keep: its jobs are saved and moved, then the head stops it."""

    node_id: NodeId
    token: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedNode:
    """A node that is not up yet, and what the provider knows of the reason; `why` is empty once nothing delays it any more."""

    node_id: NodeId
    token: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedOrder:
    """An order whose machines were stopped with the head: it is over, and the next head does not repeat it.

    Attributes:
        stopped: its machines, and what they are charged for.
        stray: the provider has not seen this order; it is that of a machine in the list, by its tags.
    """

    node_id: NodeId
    token: str
    stopped: Sequence[ChargedMachine] = ()
    stray: bool = False


class NodeProvider(Protocol):
    """Starts and stops nodes for one head. `offer` may be called at any time and on any thread.

    The head calls `open` first, then `start`, `stop`, `observe` and `machines`, and `close` last. It calls from one thread, unless the type
    has more `parallel_calls`; the calls of one order always come one after the other.
    """

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a node of a pool has, and the offers in the order in which they are tried.

        Raises:
            BadRequest: the provider has no such node, or cannot start nodes here.
        """
        ...

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Find the nodes of these orders that run, and stop all others that this head's database ever ordered here. Idempotent.

        A lost order is one whose record did not survive, as after the restore of an older backup: its node must not run on. A provider with
        `machines` leaves that to the head's sweeper.
        """
        ...

    def start(self, order: NodeOrder) -> StartedMachine | None:
        """Start the node of the order by its offer; a repeated call with the same token and offer starts nothing. None: machines have no ids.

        Raises:
            OfferRefused: see there.
            CallUnanswered: see there.
            OSError: it could not be started; something of it may run, until `stop`.
        """
        ...

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Stop the node of the order; nothing of it runs afterwards, even if a start sent by an earlier head arrives later.

        Idempotent, also for an order that was never started. A provider with `machines` may leave late starts to the head's sweeper.
        Returns the machines of the order that have ended, and what they are charged for; none if machines have no ids.

        Raises:
            OSError: something may still run; the head calls again.
        """
        ...

    def observe(self) -> Sequence[LostNode | LeavingNode | DelayedNode]:
        """Return the nodes that ended, began to leave, or wait for a new reason since the last call, or while no head ran. Never blocks."""
        ...

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return all machines of this head that the settings of a pool reach: of all its pools, also such as no order has.

        The head asks each minute for each pool whose `NodeTemplate.listed` is set.

        Raises:
            OSError: the list is not complete.
        """
        ...

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Try what the credentials may do, without doing it.

        Raises:
            BadRequest: this provider has no credentials, or they are not valid.
        """
        ...

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Stop watching; unless `keep_nodes`, stop every node and every other machine of this head.

        Returns what it has stopped for certain. All other orders are repeated or stopped by the next head.
        """
        ...


@runtime_checkable
class ConsoleReader(Protocol):
    """A provider that can read what its machines printed on their console. The head asks it about nodes that never joined, before it stops them."""

    def console(self, order: NodeOrder) -> str:
        """Return the console output of the order's machine, which the order names; at least its end. Empty if it has printed nothing.

        Raises:
            OSError: it cannot be read.
        """
        ...


class ProviderType:
    """What the head knows of a provider. Subclass it; importing the module of a subclass must be cheap.

    Attributes:
        name: as in `phalanx pools add --provider NAME`.
        parallel_calls: how many calls, of different orders, the provider takes at the same time.
    """

    name: ClassVar[str]
    parallel_calls: ClassVar[int] = 1

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider of a head; nothing is started yet."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """A node pool that the options of an engine ask for, with the engine's own provider.

    Attributes:
        id: of the pool.
        template: what its nodes are, in the words of the provider.
        min_nodes, max_nodes, idle_s, start_limit_s: as in `NodePool`.
    """

    id: PoolId
    template: str
    min_nodes: int
    max_nodes: int
    idle_s: float
    start_limit_s: float


class EnginePools:
    """What a type of engine adds that has node pools of its own. Subclass it beside `EngineType`."""

    def pools(self, options: Mapping[str, str]) -> Sequence[EnginePool]:
        """Return the node pools that the options ask for. The head adds them at its start, and removes those that no option asks for any more."""
        raise NotImplementedError

    def create_provider(self, options: Mapping[str, str], head: EngineContext) -> NodeProvider:
        """Create the provider of these pools, which has the name of the engine; nothing is started yet.

        `options`: empty if the head runs on another engine; then only pools with settings of their own can be added.
        """
        raise NotImplementedError
