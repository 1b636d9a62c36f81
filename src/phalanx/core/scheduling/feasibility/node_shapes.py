"""The shapes of a request on the nodes that it may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, summary_of
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.scheduling.feasibility.node_scopes import NodeScope, ScopedNodes
from phalanx.core.scheduling.feasibility.request import FeasibilityRequest
from phalanx.core.scheduling.node_filter import ALL_NODES, NodeFilter, node_filter_of
from phalanx.core.scheduling.shape import Shape, acceptable_shapes
from phalanx.core.scheduling.submission import check_topology, could_hold_part
from phalanx.core.work.reservation import Reservation


class RequestShapes:
    """Finds the shapes of requests on the nodes of one state of a cluster."""

    __slots__ = ("_nodes", "_reservations")

    def __init__(self, nodes: ScopedNodes, reservations: Mapping[ReservationId, Reservation]) -> None:
        self._nodes, self._reservations = nodes, reservations

    def filter_of(self, request: FeasibilityRequest) -> NodeFilter:
        """The nodes that the request may use."""
        unmountable = self._nodes.unmountable if request.mounts else frozenset[NodeId]()
        return node_filter_of(request.nodelist, request.exclude, request.reservation, self._reservations, unmountable)

    def find(self, request: FeasibilityRequest, chosen: NodeFilter, scope: NodeScope) -> tuple[Shape, ...] | NeverFits:
        """The request's shapes on the nodes that it may use, or why there are none."""
        if chosen is not ALL_NODES:
            return self.find_on(request, chosen, lambda: self._nodes.of(scope))
        return self.find_on(request, chosen, lambda: self._nodes.of(scope), self._nodes.summary(scope))

    def find_on(
        self,
        request: FeasibilityRequest,
        chosen: NodeFilter,
        nodes_of: Callable[[], Mapping[NodeId, Node]],
        summary: FleetSummary | None = None,
    ) -> tuple[Shape, ...] | NeverFits:
        """The same on these nodes. `summary`: of all of them, where it is known and none is excluded; then few requests need the nodes."""
        if summary is None:
            admitted = {node_id: node for node_id, node in nodes_of().items() if chosen.admits(node_id)}
            nodes_of, summary = lambda: admitted, summary_of(admitted.values())
        if not summary.kinds:
            return _no_node(request, chosen, self._nodes.known)
        try:
            shapes = acceptable_shapes(request.role, summary, fleet_text=chosen.text)
            if request.topology.binding:
                self._check_topology(request, shapes, nodes_of(), chosen)
            if not shapes[0].node_devices and shapes[0].nodes > 1 and not shapes[0].others:
                self._check_one_model(request, shapes, nodes_of(), chosen)
        except NeverFits as error:
            return error
        return shapes

    def _check_topology(
        self,
        request: FeasibilityRequest,
        shapes: tuple[Shape, ...],
        nodes: Mapping[NodeId, Node],
        chosen: NodeFilter,
    ) -> None:
        """Reject a job whose topology constraint these nodes cannot meet.

        Raises:
            NeverFits: so it is.
        """
        check_topology(
            request.topology,
            shapes,
            [
                *(nodes.get(node_id, node) for node_id, node in self._nodes.known.items()),
                *(node for node_id, node in nodes.items() if node_id not in self._nodes.known),
            ],
            may_use=lambda node: node.id in nodes,
            fleet_text=chosen.text,
        )

    def _check_one_model(
        self,
        request: FeasibilityRequest,
        shapes: tuple[Shape, ...],
        nodes: Mapping[NodeId, Node],
        chosen: NodeFilter,
    ) -> None:
        """Reject a job without GPUs on several nodes if these have no model in common, as the scheduler places a gang on nodes of one model.

        Raises:
            NeverFits: no model has enough nodes.
        """
        groups: dict[str, dict[NodeId, Node]] = {}
        for node_id, node in nodes.items():
            if could_hold_part(shapes, node):
                # As the scheduler numbers them: devices with MIG mode on are a kind of their own.
                kinds = {f"{device.model}{device.divided}" for device in node.devices if device.healthy}
                for model in kinds or {""}:
                    groups.setdefault(model, {})[node_id] = node
        error: NeverFits | None = None
        for group in groups.values():
            try:
                acceptable_shapes(request.role, summary_of(group.values()))
                if request.topology.binding:
                    self._check_topology(request, shapes, group, chosen)
            except NeverFits as refusal:
                error = refusal
            else:
                return
        most = max((len(group) for group in groups.values()), default=0)
        if error is not None and most >= shapes[0].nodes:  # enough nodes, but not near enough to each other
            raise error
        raise NeverFits(
            f"{shapes[0].nodes} nodes can never fit: the nodes of one job have one GPU model, and {chosen.text} has at most {most} such nodes",
            hint=Hint(HintCode.LIST_NODES),
        )


def _no_node(request: FeasibilityRequest, chosen: NodeFilter, nodes: Mapping[NodeId, Node]) -> NeverFits:
    """The error if none of the nodes that the job may use counts."""
    gone = [name for name in request.nodelist if name not in nodes]
    if gone:
        return NeverFits(f"the node list names {gone[0]}, which is not in the fleet", hint=Hint(HintCode.LIST_NODES))
    return NeverFits(f"{chosen.text} has no node that is up or may return", hint=Hint(HintCode.LIST_NODES))
