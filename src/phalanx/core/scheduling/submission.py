"""Checks at submit, against the present fleet, and the notes that the submitter sees. The pool decides later where a gang goes.

Topology: `within` is required: a level that the fleet lacks, or whose largest domain is too small even when empty, never fits. `prefer` is
optional: it is ignored with a note. Slices are required too.

Plans: tensor groups must not cross nodes, since they exchange activations in every layer. The shape is fixed at submit, so that a later
cycle cannot divide a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, summary_of
from phalanx.core.fleet.topology import NODE_LEVEL, Tree, tree_of
from phalanx.core.scheduling.shape import Shape, shape_of
from phalanx.core.work.planned import layout_of, tensor_span
from phalanx.core.work.spec import JobSpec, Launch, Role, Spread
from phalanx.core.work.surroundings import LINK_LEVEL

_HINT = "see phalanx topology"


def refuse_spread(spread: Spread, shapes: Sequence[Shape], fleet: Iterable[Node]) -> None:
    """Reject constraints that no domain can satisfy, in any of the shapes. Free if no level is required, else nodes x devices.

    Raises:
        NeverFits: names the existing levels, or the largest domain. A fleet without nodes rejects nothing.
    """
    if not (spread.required or spread.slice_nodes):
        return
    nodes = tuple(fleet)
    if not nodes:
        return
    tree = tree_of(nodes)
    for level in (spread.within if spread.required else "", spread.slice_within):
        if level and level not in tree.levels:
            raise NeverFits(
                f"no node is labelled with its {level}, so no job can be kept within one", hint=_levels_text(tree)
            )
    refusals = [refusal for shape in shapes if (refusal := _refusal(spread, shape, nodes, tree)) is not None]
    if len(refusals) == len(shapes):
        raise refusals[0]


def spread_notes(spread: Spread, fleet: Iterable[Node]) -> list[str]:
    """Notes for the submitter: a preference that has no effect on this fleet."""
    if not spread.within or spread.required:
        return []
    tree = tree_of(tuple(fleet))
    if not tree.node_ids or spread.within in tree.levels:
        return []
    return [f"no node is labelled with its {spread.within}, so preferring one has no effect ({_levels_text(tree)})"]


def _levels_text(tree: Tree) -> str:
    known = (
        f"this fleet has the levels {', '.join(tree.levels)}"
        if tree.levels
        else f"this fleet has no level but {NODE_LEVEL}"
    )
    return f"{known}; to define levels: phalanx topology set FILE"


def _refusal(spread: Spread, shape: Shape, nodes: Sequence[Node], tree: Tree) -> NeverFits | None:
    if spread.slice_nodes and (shape.nodes % spread.slice_nodes or shape.tail):
        return NeverFits(
            f"{shape.nodes} nodes do not divide into slices of {spread.slice_nodes}",
            hint=f"set --nodes to a multiple of {spread.slice_nodes}",
        )
    usable = [position for position, node in enumerate(nodes) if _holds(shape, node)]
    parts = shape.nodes + bool(shape.tail)
    if not spread.required:
        return _slice_refusal(spread, shape, tree, usable, "the fleet")
    domains = tree.domains[tree.level(spread.within)]
    inside: dict[int, list[int]] = {}
    for position in usable:
        inside.setdefault(domains[position], []).append(position)
    largest = max(inside.values(), key=len, default=[])
    if len(largest) < parts:
        named = tree.names[tree.level(spread.within)]
        where = f", the largest is {named[domains[largest[0]]]} with {len(largest)}" if largest else ""
        return NeverFits(
            f"{shape} within one {spread.within} can never fit: no {spread.within} has {parts} such nodes{where}",
            hint=f"use --prefer {spread.within} to accept other placements; {_HINT}",
        )
    refusals = [_slice_refusal(spread, shape, tree, one, f"one {spread.within}") for one in inside.values()]
    return None if None in refusals else refusals[0]


def _slice_refusal(spread: Spread, shape: Shape, tree: Tree, usable: Sequence[int], where: str) -> NeverFits | None:
    """A slice must lie in one domain: a domain with 7 nodes can hold one slice of 4."""
    if not spread.slice_nodes:
        return None
    domains = tree.domains[tree.level(spread.slice_within)]
    room = sum(count // spread.slice_nodes for count in Counter(domains[position] for position in usable).values())
    wanted = shape.nodes // spread.slice_nodes
    if room >= wanted:
        return None
    return NeverFits(
        f"{wanted} slices of {spread.slice_nodes} nodes, each within one {spread.slice_within}, can never fit: {where} can hold {room}",
        hint=f"use smaller or fewer slices; {_HINT}",
    )


def _holds(shape: Shape, node: Node) -> bool:
    if node.cpus < shape.cpus or node.memory_bytes < shape.memory_bytes:
        return False
    return sum(shape.takes(device) for device in node.devices) >= shape.devices


def with_whole_groups(spec: JobSpec, fleet: Sequence[Node]) -> JobSpec:
    """The job with its shape fixed to whole tensor groups on each node, fewest nodes first; unchanged if impossible or unnecessary.

    Unchanged too if the user fixed the shape, for an elastic job, and while the fleet has no node.
    """
    layout, request = layout_of(spec.plan), spec.role.gpus
    if layout is None or layout.tensor == 1 or not fleet or not request.total or request.nodes is not None:
        return spec
    if spec.role.launch is Launch.FIXED:
        return spec
    summary = summary_of(fleet)
    role = next((role for role in _with_whole_nodes(spec.role, tensor_span(layout)) if _fits(role, summary)), spec.role)
    return replace(spec, role=role)


def plan_notes(spec: JobSpec, fleet: Sequence[Node]) -> list[str]:
    """Notes for the submitter: the layout in words, and whether a tensor group crosses nodes."""
    if spec.plan == "auto":
        return ["plan auto: the ranks choose the layout once the script provides its model"]
    layout = layout_of(spec.plan)
    if layout is None:
        return []
    notes = [f"layout {layout}: {layout.ranks} ranks"]
    per_node = _per_node(spec.role, fleet)
    span = tensor_span(layout)
    if layout.tensor == 1 or per_node is None or per_node % span == 0:
        return notes
    nvlink_note = (
        "; within one NVLink domain this is as fast as within a node" if LINK_LEVEL in tree_of(fleet).levels else ""
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
    if role.launch is Launch.FIXED:
        return role.tasks_per_node
    if role.gpus.per_node is not None:
        return role.gpus.per_node
    try:
        return shape_of(role, fleet).devices if fleet else None
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
        shape_of(role, summary)
    except NeverFits:
        return False
    return True
