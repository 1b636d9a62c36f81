"""Which nodes count for a request: those that accept work now, those that may return, or all that are known."""

from __future__ import annotations

import enum
import math
from dataclasses import replace
from typing import Final

from phalanx.core.fleet.fleet_counts import FleetCounts
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.node_pool import mixed_kinds, startable_nodes
from phalanx.core.fleet.summary import FleetSummary, NodeKinds, summary_of
from phalanx.core.ids import NodeId, PoolId
from phalanx.core.scheduling.feasibility.cluster_limits import ClusterLimits
from phalanx.core.scheduling.node_filter import unmountable_nodes

NODE_RETURNS_WITHIN_S: Final = 30 * 86_400.0  # repairs by a vendor take days to weeks; after a month a node is gone


class NodeScope(enum.Enum):
    """Which nodes count."""

    NOW = "those that accept work now"
    RETURNING = "these, and those that may accept work again, repaired"
    KNOWN = "all, however long they have been down"


class ScopedNodes:
    """The nodes of one state of a cluster, by scope. Safe for several threads: it copies the mappings, and a race only repeats work.

    Attributes:
        known: the nodes that have joined, by id.
        pooled: the nodes that pools could start, each with its pool, by id.
        mixed_kinds: pools whose nodes turned out to be of several kinds: the pool, its nodes that have joined, and nodes all of one kind.
        unmountable: nodes that cannot mount object stores.
        capped: pools whose cap allows no node.
        counts: of all nodes.
        now_s: the time of the state, Unix seconds.
        valid_until_s: until when (Unix seconds) the scopes hold if nothing changes: then a node has been DOWN for too long. Infinite for never.
    """

    __slots__ = (
        "_scopes",
        "_summaries",
        "capped",
        "counts",
        "known",
        "mixed_kinds",
        "now_s",
        "pooled",
        "unmountable",
        "valid_until_s",
    )

    def __init__(self, cluster: ClusterLimits, now_s: float, node_kinds: NodeKinds) -> None:
        self.known = dict(sorted(cluster.nodes.items()))  # messages must not depend on the order of the nodes
        pools, members = list(cluster.node_pools.values()), dict(cluster.pool_nodes)
        self.pooled = {node.id: (pool, node) for pool, node in startable_nodes(pools, members, self.known)}
        self.mixed_kinds = list(mixed_kinds(pools, members, self.known))
        startable = [node for _, node in self.pooled.values()]
        coming = startable + [node for *_, own in self.mixed_kinds for node in own]
        self.unmountable = unmountable_nodes((*self.known.values(), *coming))
        capped = (pool.id for pool in pools if pool.max_nodes and not (pool.removing or pool.most_nodes))
        self.capped = sorted(capped)
        self.counts = FleetCounts(self.known.values(), startable, node_kinds)
        self.now_s = now_s
        self.valid_until_s = min(
            (until_s for node in self.known.values() if (until_s := _returns_until_s(node)) > now_s), default=math.inf
        )
        self._scopes: dict[NodeScope, dict[NodeId, Node]] = {}
        self._summaries: dict[NodeScope, FleetSummary] = {}

    def of(self, scope: NodeScope) -> dict[NodeId, Node]:
        """The nodes that count, as they are when they accept work."""
        found = self._scopes.get(scope)
        if found is None:
            nodes = self.known.values()
            if scope is NodeScope.NOW:
                counted = [node for node in nodes if node.schedulable]
            else:
                counted = [restored(node) for node in nodes if scope is NodeScope.KNOWN or self.returns(node)]
                counted += [node for _, node in self.pooled.values()]
            found = self._scopes[scope] = {node.id: node for node in counted}
        return found

    def summary(self, scope: NodeScope) -> FleetSummary:
        """The summary of all nodes that count."""
        summary = self._summaries.get(scope)
        if summary is None:
            # Nodes of the other scopes are restored ones, new each time.
            summary = self.counts.schedulable() if scope is NodeScope.NOW else summary_of(self.of(scope).values())
            self._summaries[scope] = summary
        return summary

    def returns(self, node: Node) -> bool:
        """Whether the node may still return."""
        return self.now_s < _returns_until_s(node)

    def startable_by(self, node_id: NodeId) -> PoolId | None:
        """The pool that could start this node; None for a node that exists."""
        found = self.pooled.get(node_id)
        return None if found is None else found[0].id


def restored(node: Node) -> Node:
    """The node once it accepts work again, repaired."""
    if node.schedulable and all(device.healthy for device in node.devices):
        return node
    devices = tuple(device if device.healthy else replace(device, healthy=True) for device in node.devices)
    return replace(node, state=NodeState.UP, cordon=None, devices=devices)


def why_not_now(node: Node, *, holds_now: bool) -> str:
    """Why the node is no help now; empty if it is. `holds_now`: its healthy devices suffice."""
    if node.state is NodeState.DOWN:
        return "is down"
    if node.cordon is not None:
        why = f" ({node.cordon.why})" if node.cordon.why else ""
        return f"is {'drained' if node.cordon.drain else 'cordoned'}{why}"
    if holds_now:
        return ""
    broken = sum(not device.healthy for device in node.devices)
    return f"has {broken} unhealthy device{'' if broken == 1 else 's'}"


def _returns_until_s(node: Node) -> float:
    """Until when (Unix seconds) the node is expected back."""
    return math.inf if node.state is NodeState.UP else max(node.changed_s, node.joined_s) + NODE_RETURNS_WITHIN_S
