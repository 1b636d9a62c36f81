"""Whether the topology that a job asks for is there at all: asked once, at submit. Where a gang goes is the pool's affair.

`within` is a must: a level that the fleet lacks, or whose largest domain is too small even when empty, never fits. `prefer` is a wish: it
is passed over with a note. Slices are a must too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.topology import NODE_LEVEL, Tree, tree_of
from phalanx.core.scheduling.shape import Shape
from phalanx.core.work.spec import Spread

_HINT = "phalanx topology shows the tree"


def refuse_spread(spread: Spread, shapes: Sequence[Shape], fleet: Iterable[Node]) -> None:
    """Refuse what no domain holds, in any of the shapes. Costs nothing where no level is a must, else nodes x devices.

    Raises:
        NeverFits: names the levels there are, or the largest domain. A fleet without nodes refuses nothing.
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
                f"no node says in which {level} it is, so nothing can be kept within one", hint=_levels(tree)
            )
    refusals = [refusal for shape in shapes if (refusal := _refused(spread, shape, nodes, tree)) is not None]
    if len(refusals) == len(shapes):
        raise refusals[0]


def spread_notes(spread: Spread, fleet: Iterable[Node]) -> list[str]:
    """What the submitter is told: a wish that counts for nothing on this fleet."""
    if not spread.within or spread.required:
        return []
    tree = tree_of(tuple(fleet))
    if not tree.node_ids or spread.within in tree.levels:
        return []
    return [f"no node says in which {spread.within} it is, so preferring one counts for nothing ({_levels(tree)})"]


def _levels(tree: Tree) -> str:
    known = (
        f"this fleet knows {', '.join(tree.levels)}" if tree.levels else f"this fleet knows no level but {NODE_LEVEL}"
    )
    return f"{known}; phalanx topology set FILE describes it"


def _refused(spread: Spread, shape: Shape, nodes: Sequence[Node], tree: Tree) -> NeverFits | None:
    if spread.slice_nodes and (shape.nodes % spread.slice_nodes or shape.tail):
        return NeverFits(
            f"{shape.nodes} nodes do not divide into slices of {spread.slice_nodes}",
            hint=f"--nodes with a multiple of {spread.slice_nodes}",
        )
    able = [position for position, node in enumerate(nodes) if _holds(shape, node)]
    spots = shape.nodes + bool(shape.tail)
    if not spread.required:
        return _slices_refused(spread, shape, tree, able, "the fleet")
    domains = tree.domains[tree.level(spread.within)]
    inside: dict[int, list[int]] = {}
    for position in able:
        inside.setdefault(domains[position], []).append(position)
    largest = max(inside.values(), key=len, default=[])
    if len(largest) < spots:
        named = tree.names[tree.level(spread.within)]
        where = f", the largest is {named[domains[largest[0]]]} with {len(largest)}" if largest else ""
        return NeverFits(
            f"{shape} within one {spread.within} can never fit: no {spread.within} has {spots} such nodes{where}",
            hint=f"--prefer {spread.within} takes the nearest there are; {_HINT}",
        )
    refusals = [_slices_refused(spread, shape, tree, one, f"one {spread.within}") for one in inside.values()]
    return None if None in refusals else refusals[0]


def _slices_refused(spread: Spread, shape: Shape, tree: Tree, able: Sequence[int], where: str) -> NeverFits | None:
    """Slices fall into domains whole: a domain with 7 nodes has room for one slice of 4."""
    if not spread.slice_nodes:
        return None
    domains = tree.domains[tree.level(spread.slice_within)]
    room = sum(count // spread.slice_nodes for count in Counter(domains[position] for position in able).values())
    wanted = shape.nodes // spread.slice_nodes
    if room >= wanted:
        return None
    return NeverFits(
        f"{wanted} slices of {spread.slice_nodes} nodes, each within one {spread.slice_within}, can never fit: {where} has room for {room}",
        hint=f"smaller slices, or fewer; {_HINT}",
    )


def _holds(shape: Shape, node: Node) -> bool:
    if node.cpus < shape.cpus or node.memory_bytes < shape.memory_bytes:
        return False
    return sum(shape.takes(device) for device in node.devices) >= shape.devices
