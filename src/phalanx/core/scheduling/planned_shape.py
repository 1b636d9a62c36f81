"""The shape of a job with a plan: its tensor groups must not cross nodes, since they exchange activations in every layer.

Called once, at submit, with the present fleet: the shape is fixed then, so that a later cycle cannot divide a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, summary_of
from phalanx.core.fleet.topology import tree_of
from phalanx.core.scheduling.shape import shape_of
from phalanx.core.work.planned import layout_of, tensor_span
from phalanx.core.work.spec import JobSpec, Launch, Role
from phalanx.core.work.surroundings import LINK_LEVEL


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
