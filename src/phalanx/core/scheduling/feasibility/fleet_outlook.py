"""Whether the fleet can hold a request: now, once nodes return or are started, or never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.ids import NodeId
from phalanx.core.scheduling.feasibility.answer import POSSIBLE, Feasibility, never, not_now
from phalanx.core.scheduling.feasibility.node_scopes import (
    NODE_RETURNS_WITHIN_S,
    NodeScope,
    ScopedNodes,
    restored,
    why_not_now,
)
from phalanx.core.scheduling.feasibility.node_shapes import RequestShapes
from phalanx.core.scheduling.feasibility.request import FeasibilityRequest
from phalanx.core.scheduling.node_filter import NodeFilter, unmountable_text
from phalanx.core.scheduling.submission import could_hold_part
from phalanx.core.units import format_duration

_NAMED_MAX: Final = 3  # nodes named in one sentence


class FleetOutlook:
    """Judges requests against the nodes of one state of a cluster."""

    __slots__ = ("_awaited", "_nodes", "_shapes")

    def __init__(self, nodes: ScopedNodes, shapes: RequestShapes, awaited_nodes: str) -> None:
        self._nodes, self._shapes, self._awaited = nodes, shapes, awaited_nodes

    def judge(self, request: FeasibilityRequest) -> Feasibility:
        """The outlook of the request by its nodes alone, without quotas and limits."""
        if not self._nodes.known and not self._nodes.pooled:
            return not_now(self._awaited or "no node has joined")
        chosen = self._shapes.filter_of(request)
        if not isinstance(self._shapes.find(request, chosen, NodeScope.NOW), NeverFits):
            return POSSIBLE
        if self._awaited:
            return not_now(self._awaited)
        shapes = self._shapes.find(request, chosen, NodeScope.RETURNING)
        if isinstance(shapes, NeverFits):
            return (
                self._outlook_on_mixed_pools(request, chosen)
                or self._never_mounts(request)
                or self._never_on_fleet(request, chosen, shapes)
            )
        away = [
            (node.id, why)
            for node_id, back in self._nodes.of(NodeScope.RETURNING).items()
            if chosen.admits(node_id) and could_hold_part(shapes, back)
            if node_id in self._nodes.known
            and (why := why_not_now(node := self._nodes.known[node_id], holds_now=could_hold_part(shapes, node)))
        ]
        pools = {pool.id: pool for pool, node in self._nodes.pooled.values() if could_hold_part(shapes, node)}
        if pools:
            text = [
                f"{name} (at most {pool.most_nodes} node{'' if pool.most_nodes == 1 else 's'})"
                for name, pool in sorted(pools.items())
            ]
            return not_now(f"needs nodes of pool {_listed(text)}", str(shapes[0]))
        why = _listed([f"{node_id} {reason}" for node_id, reason in away])
        return replace(not_now(why, str(shapes[0])), nodes=tuple(node_id for node_id, _ in away))

    def _never_mounts(self, request: FeasibilityRequest) -> Feasibility | None:
        """The refusal of a job that would fit if its nodes could mount object stores; None if that is not the reason."""
        if not self._nodes.unmountable or not request.mounts:
            return None
        without = replace(request, mounts=False)
        chosen = self._shapes.filter_of(without)
        shapes = self._shapes.find(without, chosen, NodeScope.RETURNING)
        if isinstance(shapes, NeverFits):
            return None
        known = {name: node for name, node in self._nodes.known.items() if name in self._nodes.unmountable}
        for pool, node in self._nodes.pooled.values():
            if node.id in self._nodes.unmountable and chosen.admits(node.id):
                known[NodeId(f"nodes of pool {pool.id}")] = replace(node, id=NodeId(f"nodes of pool {pool.id}"))
        nodes = [
            node
            for name, node in sorted(known.items())
            if chosen.admits(node.id) and could_hold_part(shapes, restored(node))
        ]
        detail = f"too few nodes that fit can mount object stores; it cannot use {unmountable_text(nodes)}"
        pooled = " (of a pool: mend the image, then remove the pool and add it again)" if self._nodes.pooled else ""
        return never(
            "mounts", detail, f"copy the data (mode: stage), or mend the nodes and restart their supervisors{pooled}"
        )

    def _outlook_on_mixed_pools(self, request: FeasibilityRequest, chosen: NodeFilter) -> Feasibility | None:
        """The outlook if the nodes of a pool whose nodes are of several kinds were all of one; None if that does not help."""
        for pool, registered, coming in self._nodes.mixed_kinds:
            returning = self._nodes.of(NodeScope.RETURNING).items()
            nodes = {
                name: node
                for name, node in returning
                if name not in registered and self._nodes.startable_by(name) != pool.id
            }
            shapes = self._shapes.find_on(request, chosen, (nodes | {node.id: node for node in coming}).copy)
            if not isinstance(shapes, NeverFits):
                have = coming[0].devices[0].model if coming[0].devices else "no GPUs"
                text = f"needs nodes of pool {pool.id} with {have} (at most {len(coming)}); it also has others"
                return not_now(text, str(shapes[0]))
        return None

    def _never_on_fleet(self, request: FeasibilityRequest, chosen: NodeFilter, error: NeverFits) -> Feasibility:
        """With notes on nodes that could hold it but have been DOWN for too long to count on them, and on pools whose cap allows no node."""
        detail = error.message
        long_down = sorted(
            node.id for node in self._nodes.known.values() if not self._nodes.returns(node) and chosen.admits(node.id)
        )
        if long_down and not isinstance(self._shapes.find(request, chosen, NodeScope.KNOWN), NeverFits):
            limit = format_duration(NODE_RETURNS_WITHIN_S)
            detail += f"; it would fit with {_listed(long_down)}, down for more than {limit}"
        detail += "".join(f"; pool {name} orders no node: its cap allows none" for name in self._nodes.capped)
        return never("nodes", detail, error.hint)


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _NAMED_MAX
    return ", ".join(words[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
