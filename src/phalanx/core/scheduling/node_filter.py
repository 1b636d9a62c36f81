"""Which nodes a job may use, by its own words: its node list, the nodes that it excludes, and its reservation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.node import Node
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
_NAMED_MAX: Final = 3


def node_filter_of(
    nodelist: Collection[NodeId],
    exclude: Collection[NodeId],
    reservation: str,
    reservations: Mapping[ReservationId, Reservation],
    unmountable: frozenset[NodeId] = frozenset(),
) -> NodeFilter:
    """The filter of a job; `ALL_NODES` if it names no nodes. An unknown reservation leaves out nothing.

    `unmountable`: of a job that mounts object stores, the nodes that cannot.
    """
    if not (nodelist or exclude or reservation or unmountable):
        return ALL_NODES
    reserved = reservations.get(ReservationId(reservation)) if reservation else None
    if reserved is None and not (nodelist or exclude or unmountable):
        return ALL_NODES
    listed = frozenset(nodelist) if nodelist else None
    texts = ["the node list"] if nodelist else []
    if reserved is not None:
        listed = frozenset(reserved.nodes) if listed is None else listed.intersection(reserved.nodes)
        texts.append(f"reservation {reserved.id}")
    text = " within ".join(texts) or WHOLE_FLEET
    text += " without the excluded nodes" if exclude else ""
    text += " without the nodes that cannot mount object stores" if unmountable else ""
    return NodeFilter(only=listed, excluded=unmountable.union(exclude), text=text)


def unmountable_nodes(nodes: Iterable[Node]) -> frozenset[NodeId]:
    """The nodes that cannot mount object stores, as their supervisors say."""
    return frozenset(node.id for node in nodes if node.mounts_error)


def unmountable_text(nodes: Iterable[Node]) -> str:
    """Nodes that cannot mount object stores in words, by their reasons; at most three of each."""
    named: dict[str, list[str]] = {}
    for node in nodes:
        named.setdefault(node.mounts_error, []).append(node.id)
    groups = sorted((sorted(names), why) for why, names in named.items())
    texts = [
        f"{', '.join(names[:_NAMED_MAX])}{f' and {len(names) - _NAMED_MAX} more' * (len(names) > _NAMED_MAX)} ({why})"
        for names, why in groups
    ]
    return ", ".join(texts[:_NAMED_MAX])
