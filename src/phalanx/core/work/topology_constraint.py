"""Parses the topology constraint of a job from its keys `within`, `prefer`, `slice` and `slice_within`."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.topology import LEVELS, NODE_LEVEL
from phalanx.core.work.gpus import GpuRequest, map_choices
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.spec import JobSpec, TopologyConstraint


def parse_topology_constraint(
    gpus: GpuRequest, *, within: str, prefer: str, slice_nodes: int, slice_within: str
) -> TopologyConstraint:
    """The topology constraint that the four keys give. `within: node` is expressed by the shape (`fixed_to_one_node`); `prefer: node` has no effect.

    Raises:
        InvalidKey: no such level.
        BadRequest: the keys contradict each other, or slices do not divide the nodes.
    """
    required, preferred, slice_level = (
        _level(within, "within"),
        _level(prefer, "prefer"),
        _level(slice_within, "slice_within"),
    )
    if required and preferred:
        raise BadRequest(
            f"within {required} and prefer {preferred} contradict",
            hint="give one: within is required, prefer is optional",
        )
    if bool(slice_nodes) != bool(slice_level):
        missing = "slice_within" if slice_nodes else "slice"
        raise BadRequest(
            f"slices need both slice and slice_within: {missing} is missing",
            hint="write slice: 4 and slice_within: rack",
        )
    if slice_level == NODE_LEVEL:
        raise InvalidKey(
            "slice_within: a slice of several nodes cannot lie within one node",
            key="slice_within",
            hint=f"the levels are {', '.join(LEVELS)}",
        )
    for nodes in [nodes for one in gpus.choices for nodes in (one.nodes, one.nodes_max)]:
        if slice_nodes and nodes is not None and nodes % slice_nodes:
            raise BadRequest(
                f"{nodes} nodes do not divide into slices of {slice_nodes}",
                hint=f"ask for {nodes - nodes % slice_nodes or slice_nodes} or {nodes + slice_nodes - nodes % slice_nodes} nodes",
            )
    level = required or preferred
    return TopologyConstraint(
        within="" if level == NODE_LEVEL else level,
        required=bool(required) and required != NODE_LEVEL,
        slice_nodes=slice_nodes,
        slice_within=slice_level,
    )


def constraint_texts(spec: JobSpec) -> list[str]:
    """The job's further constraints and preferences in words: `within one rack`, `not stopped for other jobs`."""
    spread = spec.topology
    said = []
    if spread.within:
        said.append(f"within one {spread.within}" + ("" if spread.required else " if possible"))
    if spread.slice_nodes:
        said.append(f"every {spread.slice_nodes} nodes within one {spread.slice_within}")
    if not spec.preemptible:
        said.append("not stopped for other jobs")
    if spec.reservation:
        said.append(f"inside reservation {spec.reservation}")
    return said


def fixed_to_one_node(gpus: GpuRequest) -> GpuRequest:
    """The request with its shape fixed to one node, in each alternative.

    Raises:
        BadRequest: it asks for several.
    """
    if gpus.alternatives:
        return map_choices(gpus, fixed_to_one_node)
    if gpus.nodes is None:
        return replace(gpus, nodes=1, per_node=gpus.total)
    if gpus.nodes > 1 or gpus.nodes_max is not None:
        raise BadRequest(
            f"within: node needs all GPUs on one node, but gpus is {gpus}",
            hint="request the GPUs of one node, or remove within",
        )
    return gpus


def _level(text: str, key: str) -> str:
    word = text.strip().lower()
    if not word or word in LEVELS or word == NODE_LEVEL:
        return word
    levels = (*LEVELS, NODE_LEVEL)
    hint = suggestion(word, levels, f"the levels are {', '.join(levels)}")
    raise InvalidKey(f"{key}: unknown level {word[:40]!r}", key=key, hint=hint)
