"""What operators rely on: a cordon stays until it is lifted (invariant 2), and the audit trail has an unbroken chain (19). Called by `invariants`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from phalanx.core.access.audit import AuditCall, ChainVerifier
from phalanx.core.ids import NodeId, TokenId, UserId
from phalanx.core.state.events import CordonNode, Event, RemoveNode, Request, UncordonNode
from phalanx.core.state.world import World
from phalanx.ports.store import Store
from phalanx.simulator.drill.violations import InvariantBroken

AUDIT_KEY: Final = b"drill"
_ALL: Final = 1_000_000


def call_of(request: Request[Any]) -> AuditCall:
    """The entry of a request in the audit trail."""
    return AuditCall(user=UserId("drill"), token_id=TokenId("1"), origin="drill", action=type(request).__name__)


class OperatorChecker:
    """Records the cordons that operators requested."""

    def __init__(self) -> None:
        self._cordoned: set[NodeId] = set()

    def check_events(self, events: Sequence[Event], world: World) -> None:
        """Check the cordons after a step that is durable."""
        for event in events:
            if isinstance(event, CordonNode) and event.node_id in world.nodes:
                self._cordoned.add(event.node_id)
        self.forget(events)
        self._cordoned &= world.nodes.keys()  # a pool may release a node; its name never returns
        for node_id in sorted(self._cordoned):
            if world.nodes[node_id].cordon is None and not _is_lifted(world, node_id):
                raise InvariantBroken(
                    2, f"{node_id} lost its operator's cordon in {[type(one).__name__ for one in events]}"
                )

    def forget(self, events: Sequence[Event]) -> None:
        """Drop the cordons that these requests lift, or may have lifted if no answer came."""
        for event in events:
            if isinstance(event, UncordonNode | RemoveNode):
                self._cordoned.discard(event.node_id)

    @staticmethod
    def check_trail(store: Store) -> None:
        """Verify the chain of the whole audit trail."""
        verifier = ChainVerifier.for_anchors(AUDIT_KEY, ())
        for line in store.audit(limit=_ALL):
            verifier.verify(line)
        if verifier.flaws:
            flaw = verifier.flaws[0]
            raise InvariantBroken(19, f"audit line {flaw.seq}: {flaw.text}")


def _is_lifted(world: World, node_id: NodeId) -> bool:
    """Whether a reservation has the node's cordon, and brings it back."""
    return any(node_id == one for reservation in world.reservations.values() for one, _ in reservation.cordons)
