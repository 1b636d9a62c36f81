"""Computes what each request becomes on the nodes that accept work now: shapes, and needs in the board's numbers. Cached by equal requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.summary import counted, node_kind
from phalanx.core.ids import NodeId
from phalanx.core.scheduling.fit import Fit
from phalanx.core.scheduling.need import Need
from phalanx.core.scheduling.shape import Shape, shapes_of
from phalanx.core.state.plan import Waiting
from phalanx.core.work.job import Job, Reason
from phalanx.core.work.spec import Role


class Shaping:
    """The requests of one fleet, while the same nodes accept work."""

    def __init__(self, nodes: Mapping[NodeId, Node], fit: Fit) -> None:
        self._nodes = nodes
        self._fit = fit
        self._shapes: dict[Role, tuple[Shape, ...] | Waiting] = {}
        self._needs: dict[tuple[object, ...], tuple[Need, ...]] = {}
        self._kinds = Counter(node_kind(node) for node in nodes.values() if node.schedulable)
        self._summary = counted(self._kinds)

    def changed(self, node: Node) -> None:
        """The node accepts work now, or no longer does: drop the cached results."""
        self._kinds[node_kind(node)] += 1 if node.schedulable else -1
        self._summary = counted(self._kinds)
        self._shapes.clear()
        self._needs.clear()

    def shapes_of_job(self, job: Job) -> tuple[Shape, ...] | Waiting:
        """The shapes on the nodes that accept work now, or why there are none."""
        role = _placement_part(job.spec.role)
        found = self._shapes.get(role)
        if found is None:
            found = self._shapes[role] = self._shape(role)
        return found

    def _shape(self, role: Role) -> tuple[Shape, ...] | Waiting:
        """The shapes on the nodes that accept work now, or why there are none."""
        if not self._summary.kinds:
            return Waiting(reason=Reason.NO_NODES, detail=f"{_no_nodes_text(self._nodes.values())}; see phalanx nodes")
        try:
            return shapes_of(role, self._summary)
        except NeverFits as error:
            away = sorted(node_id for node_id, node in self._nodes.items() if not node.schedulable)
            names = ", ".join(away[:4]) + ("" if len(away) <= 4 else f" and {len(away) - 4} more")
            return Waiting(reason=Reason.NODES_DOWN, detail=f"{error.message}; down or drained: {names or 'none'}")

    def needs_of(self, job: Job) -> tuple[Need, ...]:
        """The same as needs on the board; empty for none."""
        shapes = self.shapes_of_job(job)
        if isinstance(shapes, Waiting):
            return ()
        key = (shapes, job.spec.spread)
        found = self._needs.get(key)
        if found is None:
            found = self._needs[key] = self._fit.needs(shapes, job.spec.spread)
        return found


def _no_nodes_text(nodes: Collection[Node]) -> str:
    """Why no node accepts work, with the cordon's reason if all have the same."""
    whys = {node.cordon.why for node in nodes if node.state is NodeState.UP and node.cordon is not None}
    if whys:
        return "no node accepts work" + (f": {whys.pop()}" if len(whys) == 1 else "")
    return "no node is up" if nodes else "no node has joined"


def _placement_part(role: Role) -> Role:
    """The part of the role that matters for placement, so that equal requests are equal values."""
    return Role(
        gpus=role.gpus,
        cpus=role.cpus,
        memory_bytes=role.memory_bytes,
        launch=role.launch,
        tasks_per_node=role.tasks_per_node,
    )
