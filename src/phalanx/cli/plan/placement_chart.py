"""The placement of a layout as shapes: nodes as boxes, devices as cells in rank order, and a legend of stages and axes. Pure.

Units as in `cli.simulate.charts`: a sheet 1000 wide, y grows downwards. Colours show the pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.cli.simulate.charts import (
    SERIES,
    WIDTH,
    ChartArea,
    ChartLine,
    ChartShape,
    TextLabel,
)
from phalanx.core.work.layout import Axis, Layout
from phalanx.core.work.layout_split import layers_per_chunk

DETAILED_MAX: Final = 8  # nodes drawn with every rank; a larger fleet shows the first four, plus a map of all
DETAILED_OF_MANY: Final = 4
MAP_MAX: Final = 512  # nodes on the map
CELL_WIDTH, CELL_HEIGHT = 104.0, 46.0  # minimum width; cells are widened to fill the sheet
_PAD, _GAP, _TITLE = 10.0, 14.0, 24.0
_LETTERS: Final = {Axis.TENSOR: "T", Axis.CONTEXT: "C", Axis.SHARD: "F", Axis.REPLICATE: "D", Axis.PIPELINE: "P"}
_LINE_HEIGHT: Final = 20.0
_DOT: Final = 11.0  # a device on the map


@dataclass(frozen=True, slots=True)
class ChartSheet:
    """Shapes and their total height."""

    shapes: tuple[ChartShape, ...]
    height: float


def placement_sheet(layout: Layout, *, layers: int, nodes: int, gpus_per_node: int, gpu: str) -> ChartSheet:
    """Draw the layout on its nodes in rank order, with a legend of what each rank holds."""
    title = f"{layout.ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'} x {gpus_per_node} {gpu}"
    shapes: list[ChartShape] = [TextLabel(4, 18, title, "ink", strong=True)]
    detailed = nodes if nodes <= DETAILED_MAX else DETAILED_OF_MANY
    bottom = _rank_by_rank(shapes, 34.0, layout, detailed, gpus_per_node)
    if detailed < nodes and layout.pipeline == 1:
        shapes.append(TextLabel(4, bottom + 12, f"and {nodes - detailed} more equal nodes"))
        bottom += _LINE_HEIGHT
    elif detailed < nodes:
        bottom = _map(shapes, bottom + 18.0, layout, nodes, gpus_per_node)
    return _with_legend(shapes, bottom, layout, layers)


def _rank_by_rank(shapes: list[ChartShape], top: float, layout: Layout, nodes: int, gpus_per_node: int) -> float:
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
        shapes += _frame(x, y, box_width, box_height)
        shapes.append(TextLabel(x + _PAD, y + 17, f"node {node}", "ink"))
        for place in range(gpus_per_node):
            rank = node * gpus_per_node + place
            if rank < layout.ranks:
                left, upper = x + _PAD + place % across * cell_width, y + _TITLE + place // across * CELL_HEIGHT
                shapes += _cell(left, upper, cell_width, rank, layout)
    return top + -(-nodes // per_row) * (box_height + _GAP)


def _map(shapes: list[ChartShape], top: float, layout: Layout, nodes: int, gpus_per_node: int) -> float:
    """Add all nodes as small boxes coloured by stage; return the y below them."""
    shown = min(nodes, MAP_MAX)
    rest = f"; {nodes - shown} more continue the pattern" if shown < nodes else ""
    shapes.append(TextLabel(4, top, f"nodes 0 to {shown - 1}, coloured by pipeline stage{rest}"))
    across = min(gpus_per_node, 4)
    width, height = across * _DOT + 8, -(-gpus_per_node // across) * _DOT + 8
    per_row = int((WIDTH + 6) // (width + 6))
    for node in range(shown):
        x, y = (node % per_row) * (width + 6) + 1, top + 12 + (node // per_row) * (height + 6)
        shapes += _frame(x, y, width, height)
        for place in range(gpus_per_node):
            rank = node * gpus_per_node + place
            if rank < layout.ranks:
                left, upper = x + 4 + place % across * _DOT, y + 4 + place // across * _DOT
                colour = _stage_colour(layout.coordinates(rank)[Axis.PIPELINE])
                shapes.append(
                    ChartArea(((left + 1, upper + 1), (left + _DOT - 1, upper + 1)), upper + _DOT - 1, colour, 0.8)
                )
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
        yield _stage_colour(stage), f"{named}layers {', '.join(runs)}" + "".join(f", {end}" for end in ends)
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


def _with_legend(shapes: list[ChartShape], bottom: float, layout: Layout, layers: int) -> ChartSheet:
    y = bottom + 16
    lines = list(axis_legend(layout, layers))
    most = 12  # stages listed individually
    if layout.pipeline > most:
        lines = [*lines[: most - 1], ("", "..."), *lines[layout.pipeline - 1 :]]
    for colour, text in lines:
        if colour:
            shapes.append(ChartArea(((4.0, y - 11), (18.0, y - 11)), y + 2, colour, 0.75))
        shapes.append(TextLabel(26, y, text))
        y += _LINE_HEIGHT
    return ChartSheet(tuple(shapes), y)


def _cell(x: float, y: float, width: float, rank: int, layout: Layout) -> list[ChartShape]:
    at = layout.coordinates(rank)
    colour = _stage_colour(at[Axis.PIPELINE])
    place = " ".join(f"{_LETTERS[axis]}{at[axis]}" for axis in _LETTERS if layout.size(axis) > 1) or "all"
    return [
        ChartArea(((x + 2, y + 2), (x + width - 2, y + 2)), y + CELL_HEIGHT - 4, colour, 0.28),
        ChartArea(((x + 2, y + 2), (x + 6, y + 2)), y + CELL_HEIGHT - 4, colour),
        TextLabel(x + 13, y + 19, f"rank {rank}", "ink"),
        TextLabel(x + 13, y + 36, place),
    ]


def _frame(x: float, y: float, width: float, height: float) -> list[ChartShape]:
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
    return [ChartLine(corners, "line", 1.2)]


def _stage_colour(stage: int) -> str:
    return f"s{stage % SERIES}"
