"""Where in the network a job may lie, from the words of its keys: `within`, `prefer`, `slice` and `slice_within`."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.topology import LEVELS, NODE_LEVEL
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.keys import BadKey
from phalanx.core.work.nearest import nearest
from phalanx.core.work.spec import JobSpec, Spread


def read_spread(gpus: GpuRequest, *, within: str, prefer: str, slice_nodes: int, slice_within: str) -> Spread:
    """What the four keys say together. `within: node` is said by the shape (`on_one_node`) and `prefer: node` goes without saying.

    Raises:
        BadKey: no such level.
        BadRequest: the keys contradict each other, or slices do not divide the nodes.
    """
    must, wish, inside = _level(within, "within"), _level(prefer, "prefer"), _level(slice_within, "slice_within")
    if must and wish:
        raise BadRequest(f"within {must} and prefer {wish} at once", hint="within is a must, prefer a wish: give one")
    if bool(slice_nodes) != bool(inside):
        lacking = "slice_within" if slice_nodes else "slice"
        raise BadRequest(
            f"slices need their size and their level: {lacking} is missing",
            hint="write slice: 4 and slice_within: rack",
        )
    if inside == NODE_LEVEL:
        raise BadKey("slice_within: a slice is whole nodes, so that one node holds none of several", key="slice_within",
                     hint=f"the levels are {', '.join(LEVELS)}")  # fmt: skip
    for nodes in (gpus.nodes, gpus.nodes_max):
        if slice_nodes and nodes is not None and nodes % slice_nodes:
            raise BadRequest(
                f"{nodes} nodes do not divide into slices of {slice_nodes}",
                hint=f"ask for {nodes - nodes % slice_nodes or slice_nodes} or {nodes + slice_nodes - nodes % slice_nodes} nodes",
            )
    level = must or wish
    return Spread(
        within="" if level == NODE_LEVEL else level, required=bool(must) and must != NODE_LEVEL, slice_nodes=slice_nodes,
        slice_within=inside,
    )  # fmt: skip


def terms(spec: JobSpec) -> list[str]:
    """What the job insists on or wishes beyond its GPUs, in words: `within one rack`, `not stopped for others`."""
    spread = spec.spread
    said = []
    if spread.within:
        said.append(f"within one {spread.within}" + ("" if spread.required else " if it can be"))
    if spread.slice_nodes:
        said.append(f"every {spread.slice_nodes} nodes within one {spread.slice_within}")
    if not spec.preemptible:
        said.append("not stopped for others")
    if spec.reservation:
        said.append(f"inside reservation {spec.reservation}")
    return said


def on_one_node(gpus: GpuRequest) -> GpuRequest:
    """The request with its shape fixed to one node.

    Raises:
        BadRequest: it asks for several.
    """
    if gpus.nodes is None:
        return replace(gpus, nodes=1, per_node=gpus.total)
    if gpus.nodes > 1 or gpus.nodes_max is not None:
        raise BadRequest(f"within node, and {gpus} on several nodes", hint="leave one of the two out")
    return gpus


def _level(text: str, key: str) -> str:
    word = text.strip().lower()
    if not word or word in LEVELS or word == NODE_LEVEL:
        return word
    near = nearest(word, (*LEVELS, NODE_LEVEL))
    hint = f"did you mean {near}?" if near else f"the levels are {', '.join((*LEVELS, NODE_LEVEL))}"
    raise BadKey(f"{key}: there is no level {word[:40]!r}", key=key, hint=hint)
