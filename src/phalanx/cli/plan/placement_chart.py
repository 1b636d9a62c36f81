"""The placement of a layout as a diagram: nodes as boxes, devices as cells in rank order, and a legend. Pure.

Colours show the pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from phalanx.cli.figure_files import WIDTH, Box, Diagram, Label, series_colour
from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.core.work.layouts.layout_split import layers_per_chunk

DETAILED_MAX: Final = 8  # nodes drawn with every rank; a larger fleet shows the first four, plus a map of all
DETAILED_OF_MANY: Final = 4
MAP_MAX: Final = 512  # nodes on the map
CELL_WIDTH, CELL_HEIGHT = 104.0, 46.0  # minimum width; cells are widened to fill the sheet
_PAD, _GAP, _TITLE = 10.0, 14.0, 24.0
_LETTERS: Final = {Axis.TENSOR: "T", Axis.CONTEXT: "C", Axis.SHARD: "F", Axis.REPLICATE: "D", Axis.PIPELINE: "P"}
_LINE_HEIGHT: Final = 20.0
_DOT: Final = 11.0  # a device on the map


def placement_diagram(layout: Layout, *, layers: int, nodes: int, gpus_per_node: int, gpu: str) -> Diagram:
    """Draw the layout on its nodes in rank order, with a legend of what each rank holds."""
    title = f"{layout.ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'} x {gpus_per_node} {gpu}"
    boxes: list[Box] = []
    labels = [Label(4, 18, title, "ink", strong=True)]
    detailed = nodes if nodes <= DETAILED_MAX else DETAILED_OF_MANY
    bottom = _rank_by_rank(boxes, labels, 34.0, layout, detailed, gpus_per_node)
    if detailed < nodes and layout.pipeline == 1:
        labels.append(Label(4, bottom + 12, f"and {nodes - detailed} more equal nodes"))
        bottom += _LINE_HEIGHT
    elif detailed < nodes:
        bottom = _map(boxes, labels, bottom + 18.0, layout, nodes, gpus_per_node)
    height = _add_legend(boxes, labels, bottom + 16, layout, layers)
    return Diagram(boxes, labels, height)


def _rank_by_rank(
    boxes: list[Box], labels: list[Label], top: float, layout: Layout, nodes: int, gpus_per_node: int
) -> float:
    """Add the first nodes with every rank's coordinates; return the y below them."""
    across = min(gpus_per_node, 4)
    down = -(-gpus_per_node // across)
    per_row = max(1, int((WIDTH + _GAP) // (across * CELL_WIDTH + 2 * _PAD + _GAP)))
    box_width = (WIDTH - 2 - (per_row - 1) * _GAP) / per_row
    cell_width = (box_width - 2 * _PAD) / across
    box_height = down * CELL_HEIGHT + _TITLE + _PAD
    for node in range(nodes):
        x = (node % per_row) * (box_width + _GAP) + 1
        y = top + (node // per_row) * (box_height + _GAP)
        boxes.append(_frame(x, y, box_width, box_height))
        labels.append(Label(x + _PAD, y + 17, f"node {node}", "ink"))
        for place in range(gpus_per_node):
            rank = node * gpus_per_node + place
            if rank < layout.ranks:
                left, upper = x + _PAD + place % across * cell_width, y + _TITLE + place // across * CELL_HEIGHT
                _add_cell(boxes, labels, (left, upper, cell_width), rank, layout)
    return top + -(-nodes // per_row) * (box_height + _GAP)


def _map(boxes: list[Box], labels: list[Label], top: float, layout: Layout, nodes: int, gpus_per_node: int) -> float:
    """Add all nodes as small boxes coloured by stage; return the y below them."""
    shown = min(nodes, MAP_MAX)
    rest = f"; {nodes - shown} more continue the pattern" if shown < nodes else ""
    labels.append(Label(4, top, f"nodes 0 to {shown - 1}, coloured by pipeline stage{rest}"))
    across = min(gpus_per_node, 4)
    width, height = across * _DOT + 8, -(-gpus_per_node // across) * _DOT + 8
    per_row = int((WIDTH + 6) // (width + 6))
    for node in range(shown):
        x, y = (node % per_row) * (width + 6) + 1, top + 12 + (node // per_row) * (height + 6)
        boxes.append(_frame(x, y, width, height))
        for place in range(gpus_per_node):
            rank = node * gpus_per_node + place
            if rank < layout.ranks:
                left, upper = x + 4 + place % across * _DOT, y + 4 + place // across * _DOT
                colour = series_colour(layout.coordinates(rank)[Axis.PIPELINE])
                boxes.append(Box(left + 1, upper + 1, _DOT - 2, _DOT - 2, colour, 0.8))
    return top + 12 + -(-shown // per_row) * (height + 6)


def axis_legend(layout: Layout, layers: int) -> Iterator[tuple[str, str]]:
    """Return the legend as (colour, text): pipeline stages first, then the other axes."""
    chunks = layers_per_chunk(layers, layout.pipeline * layout.interleave)
    starts = [sum(chunks[:number]) for number in range(len(chunks) + 1)]
    for stage in range(layout.pipeline):
        runs = [_layers(starts[number], starts[number + 1]) for number in range(stage, len(chunks), layout.pipeline)]
        ends = [
            *(["the embedding"] if stage == 0 else []),
            *(["the output and the loss"] if stage == layout.pipeline - 1 else []),
        ]
        named = f"P{stage}: " if layout.pipeline > 1 else "every rank: "
        yield series_colour(stage), f"{named}layers {', '.join(runs)}" + "".join(f", {end}" for end in ends)
    if layout.tensor > 1:
        split = " and of the sequence between them" if layout.sequence else ""
        yield "", f"T0..T{layout.tensor - 1}: 1/{layout.tensor} of the heads and columns of every matrix{split}"
    if layout.context > 1:
        yield "", f"C0..C{layout.context - 1}: 1/{layout.context} of every sequence"
    if layout.expert > 1:
        yield "", f"experts: 1/{layout.expert} of them on each of {layout.expert} neighbouring ranks"
    shards = layout.shard * layout.context if layout.zero else 1
    sharded = ("", "optimizer states", "gradients and optimizer states", "parameters, gradients and optimizer states")
    held = f"1/{shards} of the {sharded[layout.zero]}" if shards > 1 else "all states"
    if layout.shard > 1:
        yield "", f"F0..F{layout.shard - 1}: other samples" + (f", {held}" if layout.context == 1 else "")
    if layout.context > 1 and shards > 1:
        yield "", f"{'C and F' if layout.shard > 1 else 'C'} together: each {held}"
    if layout.replicate > 1:
        yield "", f"D0..D{layout.replicate - 1}: other samples, a full replica"


def _layers(start: int, end: int) -> str:
    return f"{start}" if end - start == 1 else f"{start} to {end - 1}"


def _add_legend(boxes: list[Box], labels: list[Label], y: float, layout: Layout, layers: int) -> float:
    """Add the legend from `y` on; return the y below it."""
    lines = list(axis_legend(layout, layers))
    most = 12  # stages listed individually
    if layout.pipeline > most:
        lines = [*lines[: most - 1], ("", "..."), *lines[layout.pipeline - 1 :]]
    for colour, text in lines:
        if colour:
            boxes.append(Box(4, y - 11, 14, 13, colour, 0.75))
        labels.append(Label(26, y, text))
        y += _LINE_HEIGHT
    return y


def _add_cell(
    boxes: list[Box], labels: list[Label], place: tuple[float, float, float], rank: int, layout: Layout
) -> None:
    """Add one rank at (x, y, width)."""
    x, y, width = place
    at = layout.coordinates(rank)
    colour = series_colour(at[Axis.PIPELINE])
    position = " ".join(f"{_LETTERS[axis]}{at[axis]}" for axis in _LETTERS if layout.size(axis) > 1) or "all"
    boxes += [
        Box(x + 2, y + 2, width - 4, CELL_HEIGHT - 6, colour, 0.28),
        Box(x + 2, y + 2, 4, CELL_HEIGHT - 6, colour),
    ]
    labels += [Label(x + 13, y + 19, f"rank {rank}", "ink"), Label(x + 13, y + 36, position)]


def _frame(x: float, y: float, width: float, height: float) -> Box:
    return Box(x, y, width, height, "card", 0.0, edge="line")
