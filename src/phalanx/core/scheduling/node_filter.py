"""Which nodes a job may use, by its own words: its node list, the nodes that it excludes, and its reservation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.scheduling.shape import WHOLE_FLEET
from phalanx.core.work.reservation import Reservation


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """A choice among the nodes of the fleet.

    Attributes:
        only: the nodes to choose from; None for all.
        excluded: never these.
        text: the nodes in words, for messages.
    """

    only: frozenset[NodeId] | None = None
    excluded: frozenset[NodeId] = frozenset()
    text: str = WHOLE_FLEET

    def admits(self, node_id: NodeId) -> bool:
        """Whether the job may use the node."""
        return node_id not in self.excluded and (self.only is None or node_id in self.only)


ALL_NODES: Final = NodeFilter()


def node_filter_of(
    nodelist: Collection[NodeId],
    exclude: Collection[NodeId],
    reservation: str,
    reservations: Mapping[ReservationId, Reservation],
) -> NodeFilter:
    """The filter of a job; `ALL_NODES` if it names no nodes. An unknown reservation leaves out nothing."""
    if not (nodelist or exclude or reservation):
        return ALL_NODES
    reserved = reservations.get(ReservationId(reservation)) if reservation else None
    if reserved is None and not (nodelist or exclude):
        return ALL_NODES
    listed = frozenset(nodelist) if nodelist else None
    texts = ["the node list"] if nodelist else []
    if reserved is not None:
        listed = frozenset(reserved.nodes) if listed is None else listed.intersection(reserved.nodes)
        texts.append(f"reservation {reserved.id}")
    text = " within ".join(texts) or WHOLE_FLEET
    return NodeFilter(
        only=listed, excluded=frozenset(exclude), text=f"{text} without the excluded nodes" if exclude else text
    )
