"""The port of providers of node pools. A provider starts and stops machines; the supervisor on each registers with the head as any other.

A provider consists of a `ProviderType`, found by its name (`providers.registry`), and of the `NodeProvider` that it creates for one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from phalanx.core.fleet.node_pool import NodeTemplate
    from phalanx.core.ids import NodeId
    from phalanx.ports.engine import EngineContext


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """One node to start. `token`: idempotency token; `template`: what to start, as `NodeTemplate.text`; `zone`: where, empty for anywhere."""

    node_id: NodeId
    token: str
    template: str
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that ended although it was not stopped: none of its processes is left."""

    node_id: NodeId
    token: str
    why: str


class NodeProvider(Protocol):
    """Starts and stops nodes for one head. `offer` may be called at any time and on any thread.

    The head calls `open` first, then `start`, `stop` and `observe` from one thread, and `close` last.
    """

    def offer(self, template: str) -> NodeTemplate:
        """Return what a node of this template has.

        Raises:
            BadRequest: the provider has no such node, or cannot start nodes here.
        """
        ...

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Find the nodes of these orders that run, and stop all others that this head's database ever ordered here. Idempotent.

        A lost order is one whose record did not survive, as after the restore of an older backup: its node must not run on.
        """
        ...

    def start(self, order: NodeOrder) -> None:
        """Start the node of the order; a repeated call with the same token starts nothing.

        Raises:
            OSError: it could not be started; something of it may run, until `stop`.
        """
        ...

    def stop(self, order: NodeOrder) -> None:
        """Stop the node of the order; nothing of it runs afterwards, even if a start sent by an earlier head arrives later.

        Idempotent, also for an order that was never started.

        Raises:
            OSError: something may still run; the head calls again.
        """
        ...

    def observe(self) -> Sequence[LostNode]:
        """Return the nodes that ended since the last call, or while no head ran. Never blocks."""
        ...

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless `keep_nodes`, stop every node."""
        ...


class ProviderType:
    """What the head knows of a provider. Subclass it; importing the module of a subclass must be cheap.

    Attributes:
        name: as in `phalanx pools add --provider NAME`.
    """

    name: ClassVar[str]

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider of a head; nothing is started yet."""
        raise NotImplementedError
