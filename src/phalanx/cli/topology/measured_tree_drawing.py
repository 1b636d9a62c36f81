"""A measured topology as a diagram: domains as nested boxes, nodes as cells, slow nodes marked. Pure.

Each level has a colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.cli.figure_files import WIDTH, Box, Diagram, Label
from phalanx.cli.topology.measured_tree_table import format_gbit_per_s, slow_link_text
from phalanx.planner.calibration.network_levels import MeasuredTopology

_PAD, _GAP, _TITLE = 12.0, 12.0, 24.0
_CELL_WIDTH, _CELL_HEIGHT = 74.0, 28.0
_COLOURS: Final = ("s0", "s2", "s1")
_BAD: Final = "s3"
_CHARACTERS: Final = 9  # of a node's name in a cell
_SLOW_SHOWN: Final = 20  # lines of text; the others are only coloured


def tree_diagram(found: MeasuredTopology) -> Diagram:
    """Return the diagram of the whole tree, and a text line for each slow link."""
    boxes: list[Box] = []
    labels: list[Label] = []
    slow = {name for one in found.slow for name in (one.first, one.second) if name}
    lead = "all nodes, between domains: " if found.levels else "no levels, all nodes are equally near: "
    title = lead + format_gbit_per_s(found.bytes_per_s)
    bottom = _add_domain(boxes, labels, found, found.nodes, 0, title, (1.0, 0.0, WIDTH - 2), slow)
    for one in found.slow[:_SLOW_SHOWN]:
        bottom += 20.0
        labels.append(Label(4, bottom, f"slow: {slow_link_text(one)}", _BAD))
    return Diagram(boxes, labels, bottom + 6.0)


def _add_domain(
    boxes: list[Box],
    labels: list[Label],
    found: MeasuredTopology,
    inside: Sequence[str],
    depth: int,
    title: str,
    place: tuple[float, float, float],
    slow: set[str],
) -> float:
    """Add a domain with its content at (x, y, width); return its bottom. Subdomains are side by side where they fit, else below each other."""
    x, y, width = place
    at = len(boxes)
    labels.append(Label(x + _PAD, y + 17, title, "ink", strong=depth == 0))
    top = y + _TITLE + 4
    level = found.levels[depth] if depth < len(found.levels) else None
    groups = [] if level is None else [(n, one) for n, one in enumerate(level.domains) if one[0] in inside]
    rest = [node for node in inside if not any(node in one for _, one in groups)]
    across = min(len(groups), _across(found, depth, width)) or 1
    box_width = (width - 2 * _PAD - (across - 1) * _GAP) / across
    bottoms = [top]
    for index, (number, domain) in enumerate(groups):
        assert level is not None
        if index and index % across == 0:
            top = max(bottoms) + _GAP
        words = f"{level.name} m{number}: {format_gbit_per_s(level.bytes_per_s)}"
        left = x + _PAD + (index % across) * (box_width + _GAP)
        bottoms.append(_add_domain(boxes, labels, found, domain, depth + 1, words, (left, top, box_width), slow))
    bottom = max(bottoms) + (_GAP if groups and rest else 0.0)
    bottom = _add_nodes(boxes, labels, rest, (x + _PAD, bottom, width - 2 * _PAD), slow)
    end = bottom + _PAD
    colour = "line" if depth == 0 else _COLOURS[(depth - 1) % len(_COLOURS)]
    boxes.insert(at, Box(x, y, width, end - y, colour, 0.10 if depth else 0.0, edge=colour))
    return end


def _across(found: MeasuredTopology, depth: int, width: float) -> int:
    """Return how many domains fit side by side if each has room for three cells at every inner level."""
    least = 3 * _CELL_WIDTH + 2 * _PAD * (len(found.levels) - depth)
    return max(1, int((width - 2 * _PAD + _GAP) // (least + _GAP)))


def _add_nodes(
    boxes: list[Box], labels: list[Label], nodes: Sequence[str], place: tuple[float, float, float], slow: set[str]
) -> float:
    """Add nodes in rows; return the bottom of the last row."""
    x, y, width = place
    across = max(1, int(width // _CELL_WIDTH))
    for index, node in enumerate(nodes):
        left, top = x + (index % across) * _CELL_WIDTH, y + (index // across) * _CELL_HEIGHT
        colour = _BAD if node in slow else "soft"
        boxes.append(Box(left, top, _CELL_WIDTH - 6, _CELL_HEIGHT - 6, colour, 0.35 if node in slow else 0.15))
        name = node if len(node) <= _CHARACTERS else node[: _CHARACTERS - 2] + ".."
        labels.append(Label(left + (_CELL_WIDTH - 6) / 2, top + 16, name, "ink", anchor="center"))
    return y + -(-len(nodes) // across) * _CELL_HEIGHT
