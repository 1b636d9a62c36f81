"""Checks at submit that the topology a job requires exists. The pool decides where a gang goes.

`within` is required: a level that the fleet lacks, or whose largest domain is too small even when empty, never fits. `prefer` is optional:
it is ignored with a note. Slices are required too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.topology import NODE_LEVEL, Tree, tree_of
from phalanx.core.scheduling.shape import Shape
from phalanx.core.work.spec import Spread

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
