"""A step as shapes: the pipeline timeline and the parts of the step. Pure; units as in `fleetview`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from phalanx.cli.plan.amounts import format_seconds
from phalanx.cli.plan.pipeline_schedule import PipelineSlot, pipeline_schedule
from phalanx.cli.plan.placement_chart import ChartSheet
from phalanx.cli.simulate.chart_data import ticks
from phalanx.cli.simulate.charts import (
    SERIES,
    WIDTH,
    ChartArea,
    ChartLine,
    ChartShape,
    TextLabel,
)
from phalanx.core.work.layout import Layout, Recompute

SLOTS_MAX: Final = 192  # of one stage, about five units wide each; limits the number of drawn micro-batches
SHARE_MIN: Final = 0.001  # share of the total below which an item is omitted
STAGES_MAX: Final = 16  # lanes; with more stages, the first and the last half
FORWARD_SHARE: Final = 1 / 3
"""Forward share of a micro-batch's time without recomputation: backward has two products for each forward one. Source: J. Kaplan et al., 2020."""
_LEFT, _RIGHT, _LANE = 64.0, 16.0, 26.0
_LEGEND_ROW: Final = 20.0

ITEMS_AFTER_PIPELINE: Final = frozenset(
    {"gradients", "optimizer", "per step"}
)  # parts of a step after its last micro-batch
NamedAmount = tuple[str, float]  # name and seconds or bytes
ToX = Callable[[float], float]  # maps seconds to x on the sheet


def schedule_sheet(layout: Layout, *, step_s: float, after_s: float) -> ChartSheet:
    """Draw the stages as lanes over one step.

    Args:
        layout: pipeline and micro-batches.
        step_s: total time of the step.
        after_s: the part after the pipeline: gradient exchange and optimizer.
    """
    stages, chunks = layout.pipeline, layout.interleave
    most = max(4 * stages, SLOTS_MAX // (2 * chunks) // stages * stages)
    shown = min(layout.micro_batches, most)
    forward = FORWARD_SHARE if layout.recompute is not Recompute.FULL else 1 / 4
    slots = pipeline_schedule(stages, chunks, shown, forward_s=forward, backward_s=1.0 - forward)
    end = max(slot.end_s for slot in slots)  # in units of one forward and backward pass through one chunk
    scale = (step_s - after_s) / (end + (layout.micro_batches - shown) * chunks)
    width_s = end * scale + after_s
    title = f"One step of {format_seconds(step_s)}" + (", stage by stage" if stages > 1 else "")
    if shown < layout.micro_batches:
        title += f": {shown} of {layout.micro_batches} micro-batches, the rest repeat the middle"
    shapes: list[ChartShape] = [TextLabel(4, 18, title, "ink", strong=True)]

    def x(seconds: float) -> float:
        return _LEFT + seconds / width_s * (WIDTH - _LEFT - _RIGHT)

    lanes = _lanes(stages)
    top = 34.0
    for place, stage in enumerate(lanes):
        y = top + place * _LANE
        shapes.append(TextLabel(_LEFT - 10, y + 15, f"P{stage}" if stages > 1 else "rank", anchor="end"))
        shapes.append(ChartArea(((x(0.0), y), (x(width_s), y)), y + _LANE - 6, "grid", 0.8))
        shapes += [_box(slot, x, scale, y, chunks) for slot in slots if slot.stage == stage]
        if after_s > 0:
            shapes.append(ChartArea(((x(width_s - after_s), y), (x(width_s), y)), y + _LANE - 6, "s3", 0.85))
    bottom = top + len(lanes) * _LANE
    shapes += _axis(width_s, bottom, x)
    key = [("forward", "s0"), ("backward", "s2"), ("gradients and optimizer", "s3"), ("idle (bubble)", "grid")]
    return ChartSheet((*shapes, *_key(key, bottom + 44)), bottom + 54)


def items_sheet(title: str, items: Sequence[NamedAmount], unit: str, *, whole: float = 0.0) -> ChartSheet:
    """Draw one bar of items, the largest first, with a legend; `unit` follows the numbers.

    `whole` is the total if it exceeds the sum of the items; the rest of the bar stays empty.
    """
    total = max(whole, sum(value for _, value in items)) or 1.0
    ordered = sorted((item for item in items if item[1] >= SHARE_MIN * total), key=lambda item: (-item[1], item[0]))
    shapes: list[ChartShape] = [TextLabel(4, 18, title, "ink", strong=True)]
    if whole:
        shapes += [ChartLine(((4, 34), (WIDTH - 4, 34), (WIDTH - 4, 62), (4, 62), (4, 34)), "line", 1.0)]
    at = 4.0
    for number, (_, value) in enumerate(ordered):
        end = at + value / total * (WIDTH - 8)
        shapes.append(
            ChartArea(((at, 34.0), (max(at + 0.5, end - 1), 34.0)), 62.0, f"s{number % SERIES}", _shade(number))
        )
        at = end
    y = 86.0
    for number, (name, value) in enumerate(ordered):
        left = 4.0 if number % 2 == 0 else WIDTH / 2
        shapes.append(ChartArea(((left, y - 11), (left + 14, y - 11)), y + 2, f"s{number % SERIES}", _shade(number)))
        shapes.append(TextLabel(left + 22, y, name))
        shapes.append(TextLabel(left + 440, y, f"{value:,.3g} {unit}  {value / total:.0%}", "ink", anchor="end"))
        y += _LEGEND_ROW * (number % 2)
    return ChartSheet(tuple(shapes), y + _LEGEND_ROW * (len(ordered) % 2))


def _shade(number: int) -> float:
    """Return the opacity: colours repeat after eight, then paler."""
    return 0.9 if number < SERIES else 0.45


def _lanes(stages: int) -> list[int]:
    if stages <= STAGES_MAX:
        return list(range(stages))
    half = STAGES_MAX // 2
    return [*range(half), *range(stages - half, stages)]


def _box(slot: PipelineSlot, x: ToX, scale: float, y: float, chunks: int) -> ChartArea:
    left, right = x(slot.start_s * scale), x(slot.end_s * scale)
    edge = min(0.6, (right - left) / 5)
    paler = 0.95 - 0.5 * slot.work.chunk / max(1, chunks)
    colour = "s0" if slot.work.forward else "s2"
    return ChartArea(((left + edge, y), (right - edge, y)), y + _LANE - 6, colour, paler)


def _axis(width_s: float, bottom: float, x: ToX) -> list[ChartShape]:
    shapes: list[ChartShape] = [ChartLine(((_LEFT, bottom), (WIDTH - _RIGHT, bottom)), "line", 1.0)]
    unit, size = ("s", 1.0) if width_s >= 2 else ("ms", 1e-3)
    marks = ticks(0.0, width_s / size, 8)
    shapes += [
        TextLabel(x(value * size), bottom + 16, f"{value:g}", anchor="middle")
        for value in marks
        if x(value * size) < WIDTH - _RIGHT - 24
    ]
    return [*shapes, TextLabel(WIDTH - _RIGHT, bottom + 16, unit, anchor="end")]


def _key(key: Sequence[tuple[str, str]], y: float) -> list[ChartShape]:
    shapes: list[ChartShape] = []
    at = _LEFT
    for name, colour in key:
        shapes.append(ChartArea(((at, y - 11), (at + 14, y - 11)), y + 2, colour, 0.9))
        shapes.append(TextLabel(at + 20, y, name))
        at += 42.0 + 6.8 * len(name)
    return shapes
