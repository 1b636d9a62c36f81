"""Checks at submit, against the present fleet, and the notes that the submitter sees. The pool decides later where a gang goes.

Topology: `within` is required: a level that the fleet lacks, or whose largest domain is too small even when empty, never fits. `prefer` is
optional: it is ignored with a note. Slices are required too.

Plans: tensor groups must not cross nodes, since they exchange activations in every layer. The shape is fixed at submit, so that a later
cycle cannot divide a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, summary_of
from phalanx.core.fleet.topology import NODE_LEVEL, TopologyTree, build_topology_tree
from phalanx.core.hints import Hint, HintCode
from phalanx.core.scheduling.shape import WHOLE_FLEET, Shape, preferred_shape
from phalanx.core.work.gang_topology import LINK_LEVEL
from phalanx.core.work.gpus import GpuRequest, map_choices
from phalanx.core.work.job_file.plan_key import planned_layout, tensor_span
from phalanx.core.work.spec import (
    JobSpec,
    LaunchMode,
    Role,
    TopologyConstraint,
)


def check_topology(
    topology: TopologyConstraint,
    shapes: Sequence[Shape],
    fleet: Iterable[Node],
    *,
    may_use: Callable[[Node], bool] = lambda _: True,
    fleet_text: str = WHOLE_FLEET,
) -> None:
    """Reject constraints that no domain can satisfy, in any of the shapes. Free if no level is required, else nodes x devices.

    Args:
        topology: the constraints.
        shapes: of the request, on the nodes that it may use.
        fleet: all nodes, whose labels define the domains.
        may_use: whether the request may use the node.
        fleet_text: what the nodes are that it may use, for the error.

    Raises:
        NeverFits: names the existing levels, or the largest domain. A fleet without nodes rejects nothing.
    """
    if not topology.binding:
        return
    nodes = tuple(fleet)
    if not nodes:
        return
    tree = build_topology_tree(nodes)
    for level in (topology.within if topology.required else "", topology.slice_within):
        if level and level not in tree.levels:
            raise NeverFits(
                f"no node is labelled with its {level}, so no job can be kept within one",
                hint=Hint(HintCode.DEFINE_LEVELS, levels=_levels_text(tree)),
            )
    allowed = [(position, node) for position, node in enumerate(nodes) if may_use(node)]
    refusals = []
    for shape in shapes:
        usable = [position for position, node in allowed if _holds(shape, node)]
        refusal = _refusal(topology, shape, usable, tree, fleet_text)
        if refusal is None:
            return
        refusals.append(refusal)
    raise refusals[0]


def topology_notes(topology: TopologyConstraint, fleet: Iterable[Node]) -> list[str]:
    """Notes for the submitter: a preference that has no effect on this fleet."""
    if not topology.within or topology.required:
        return []
    tree = build_topology_tree(tuple(fleet))
    if not tree.node_ids or topology.within in tree.levels:
        return []
    return [f"no node is labelled with its {topology.within}, so preferring one has no effect ({_levels_text(tree)})"]


def _levels_text(tree: TopologyTree) -> str:
    if not tree.levels:
        return f"this fleet has no level but {NODE_LEVEL}"
    return f"this fleet has the levels {', '.join(tree.levels)}"


def could_hold_part(shapes: Iterable[Shape], node: Node) -> bool:
    """Whether the node could hold a part of one of the shapes if it ran nothing else."""
    return any(_holds(one, node) for shape in shapes for one in shape.each)


def _refusal(
    topology: TopologyConstraint, shape: Shape, usable: Sequence[int], tree: TopologyTree, fleet_text: str
) -> NeverFits | None:
    if topology.slice_nodes and (shape.nodes % topology.slice_nodes or shape.last_node_devices):
        return NeverFits(
            f"{shape.nodes} nodes do not divide into slices of {topology.slice_nodes}",
            hint=f"request a multiple of {topology.slice_nodes} nodes",
        )
    parts = shape.nodes + bool(shape.last_node_devices)
    if not topology.required:
        return _slice_refusal(topology, shape, tree, usable, fleet_text)
    domains = tree.domains[tree.level(topology.within)]
    inside: dict[int, list[int]] = {}
    for position in usable:
        inside.setdefault(domains[position], []).append(position)
    largest = max(inside.values(), key=len, default=[])
    if len(largest) < parts:
        named = tree.names[tree.level(topology.within)]
        of_fleet = "" if fleet_text == WHOLE_FLEET else f" of {fleet_text}"
        where = f", the largest is {named[domains[largest[0]]]} with {len(largest)}" if largest else ""
        return NeverFits(
            f"{shape} within one {topology.within} can never fit: no {topology.within} has {parts} such nodes{of_fleet}{where}",
            hint=Hint(HintCode.PREFER_LEVEL, level=topology.within),
        )
    refusals = [_slice_refusal(topology, shape, tree, one, f"one {topology.within}") for one in inside.values()]
    return None if None in refusals else refusals[0]


def _slice_refusal(
    topology: TopologyConstraint, shape: Shape, tree: TopologyTree, usable: Sequence[int], where: str
) -> NeverFits | None:
    """A slice must lie in one domain: a domain with 7 nodes can hold one slice of 4."""
    if not topology.slice_nodes:
        return None
    domains = tree.domains[tree.level(topology.slice_within)]
    room = sum(count // topology.slice_nodes for count in Counter(domains[position] for position in usable).values())
    wanted = shape.nodes // topology.slice_nodes
    if room >= wanted:
        return None
    return NeverFits(
        f"{wanted} slices of {topology.slice_nodes} nodes, each within one {topology.slice_within}, can never fit: {where} can hold {room}",
        hint=Hint(HintCode.SMALLER_SLICES),
    )


def _holds(shape: Shape, node: Node) -> bool:
    if not shape.host.fits(node.host):
        return False
    return sum(shape.capacity_on(device) for device in node.devices) >= shape.node_devices


def with_whole_tensor_groups(spec: JobSpec, fleet: Sequence[Node]) -> JobSpec:
    """The job with its shape fixed to whole tensor groups on each node, fewest nodes first; unchanged if impossible or unnecessary.

    Unchanged too if the user fixed the shape, for an elastic job, and while the fleet has no node.
    """
    if spec.role.gpus.alternatives:

        def grouped(one: GpuRequest) -> GpuRequest:
            alone = replace(spec, role=replace(spec.role, gpus=one))
            return with_whole_tensor_groups(alone, fleet).role.gpus

        return replace(spec, role=replace(spec.role, gpus=map_choices(spec.role.gpus, grouped)))
    layout, request = planned_layout(spec.plan), spec.role.gpus
    if layout is None or layout.tensor == 1 or not fleet or not request.total or request.nodes is not None:
        return spec
    if spec.role.launch is LaunchMode.FIXED:
        return spec
    summary = summary_of(fleet)
    role = next((role for role in _with_whole_nodes(spec.role, tensor_span(layout)) if _fits(role, summary)), spec.role)
    return replace(spec, role=role)


def plan_notes(spec: JobSpec, fleet: Sequence[Node]) -> list[str]:
    """Notes for the submitter: the layout in words, and whether a tensor group crosses nodes."""
    if spec.plan == "auto":
        return ["plan auto: the ranks choose the layout once the script provides its model"]
    layout = planned_layout(spec.plan)
    if layout is None:
        return []
    notes = [f"layout {layout}: {layout.ranks} ranks"]
    per_node = _per_node(spec.role, fleet)
    span = tensor_span(layout)
    if layout.tensor == 1 or per_node is None or per_node % span == 0:
        return notes
    nvlink_note = (
        "; within one NVLink domain this is as fast as within a node"
        if LINK_LEVEL in build_topology_tree(fleet).levels
        else ""
    )
    if span > per_node:
        return [
            *notes,
            f"tensor parallel over {span} ranks crosses nodes: a node of this job has {per_node}{nvlink_note}",
        ]
    return [
        *notes,
        f"{per_node} ranks per node are not a multiple of the tensor group size {span}: some groups cross nodes{nvlink_note}",
    ]


def _per_node(role: Role, fleet: Sequence[Node]) -> int | None:
    """Ranks on each node; None if not determined yet."""
    if role.launch is LaunchMode.FIXED:
        return role.tasks_per_node
    if role.gpus.per_node is not None:
        return role.gpus.per_node
    try:
        return preferred_shape(role, fleet).devices if fleet else None
    except NeverFits:
        return None


def _with_whole_nodes(role: Role, span: int) -> Iterator[Role]:
    """The role on 1, 2, ... nodes, with whole groups on each."""
    total = role.gpus.total
    for nodes in range(1, total // span + 1):
        if total % nodes == 0 and total // nodes % span == 0:
            yield replace(role, gpus=replace(role.gpus, nodes=nodes, per_node=total // nodes))


def _fits(role: Role, summary: FleetSummary) -> bool:
    try:
        preferred_shape(role, summary)
    except NeverFits:
        return False
    return True
