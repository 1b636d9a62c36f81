"""The charts of a step: the pipeline timeline, and the parts of a total as one bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from phalanx.cli.figure_files import (
    SERIES,
    WIDTH,
    Box,
    Chart,
    Diagram,
    Label,
    colour,
    legend,
    series_colour,
    style_axes,
)
from phalanx.cli.plan.pipeline_schedule import PipelineSlot, pipeline_schedule
from phalanx.core.work.layouts.layout import Layout, Recompute
from phalanx.plans.amounts import format_seconds

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes

SLOTS_MAX: Final = 192  # of one stage, about five units wide each; limits the number of drawn micro-batches
SHARE_MIN: Final = 0.001  # share of the total below which an item is omitted
STAGES_MAX: Final = 16  # lanes; with more stages, the first and the last half
FORWARD_SHARE: Final = 1 / 3
"""Forward share of a micro-batch's time without recomputation: backward has two products for each forward one. Source: J. Kaplan et al., 2020."""
_LANE: Final = 26.0
_LEGEND_ROW: Final = 20.0

ITEMS_AFTER_PIPELINE: Final = frozenset(
    {"gradients", "optimizer", "per step"}
)  # parts of a step after its last micro-batch
NamedAmount = tuple[str, float]  # name and seconds or bytes
_SCHEDULE_LEGEND: Final = (
    ("forward", "s0"),
    ("backward", "s2"),
    ("gradients and optimizer", "s3"),
    ("idle (bubble)", "grid"),
)


def schedule_chart(layout: Layout, *, step_s: float, after_s: float) -> Chart:
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
    unit, unit_s = ("seconds", 1.0) if width_s >= 2 else ("milliseconds", 1e-3)
    lanes = _lanes(stages)

    def plot(axes: Axes) -> None:
        for place, stage in enumerate(lanes):
            height = (place - 0.4, 0.8)
            own = [slot for slot in slots if slot.stage == stage]
            axes.broken_barh([(0.0, width_s / unit_s)], height, facecolors=colour("grid"))
            axes.broken_barh(
                [(slot.start_s * scale / unit_s, (slot.end_s - slot.start_s) * scale / unit_s) for slot in own],
                height,
                facecolors=[_slot_colour(slot, chunks) for slot in own],
                edgecolors=colour("card"),
                linewidths=0.4,
            )
            if after_s > 0:
                axes.broken_barh([((width_s - after_s) / unit_s, after_s / unit_s)], height, facecolors=colour("s3"))
        axes.set_xlim(0.0, width_s / unit_s)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_yticks(range(len(lanes)), [f"P{stage}" if stages > 1 else "rank" for stage in lanes])
        axes.set_xlabel(unit, loc="left")
        style_axes(axes, title)
        axes.grid(visible=False)
        legend(axes, _SCHEDULE_LEGEND, below=True)

    return Chart(plot, height=30.0 + len(lanes) * _LANE + 58.0, bottom=58.0)


def items_diagram(title: str, items: Sequence[NamedAmount], unit: str, *, whole: float = 0.0) -> Diagram:
    """Draw one bar of items, the largest first, with a legend; `unit` follows the numbers.

    `whole` is the total if it exceeds the sum of the items; the rest of the bar stays empty.
    """
    total = max(whole, sum(value for _, value in items)) or 1.0
    ordered = sorted((item for item in items if item[1] >= SHARE_MIN * total), key=lambda item: (-item[1], item[0]))
    boxes = [Box(4, 34, WIDTH - 8, 28, "card", 0.0, edge="line")] if whole else []
    labels = [Label(4, 18, title, "ink", strong=True)]
    x, y = 4.0, 86.0
    for number, (name, value) in enumerate(ordered):
        width = value / total * (WIDTH - 8)
        paint, opacity = series_colour(number), 0.9 if number < SERIES else 0.45  # colours repeat, then paler
        boxes.append(Box(x, 34, max(0.5, width - 1), 28, paint, opacity, tip=f"{name}: {value:,.3g} {unit}"))
        x += width
        left = 4.0 if number % 2 == 0 else WIDTH / 2
        boxes.append(Box(left, y - 11, 14, 13, paint, opacity))
        labels.append(Label(left + 22, y, name))
        labels.append(Label(left + 440, y, f"{value:,.3g} {unit}  {value / total:.0%}", "ink", anchor="right"))
        y += _LEGEND_ROW * (number % 2)
    return Diagram(boxes, labels, y + _LEGEND_ROW * (len(ordered) % 2))


def _lanes(stages: int) -> list[int]:
    if stages <= STAGES_MAX:
        return list(range(stages))
    half = STAGES_MAX // 2
    return [*range(half), *range(stages - half, stages)]


def _slot_colour(slot: PipelineSlot, chunks: int) -> tuple[str, float]:
    """Return colour and opacity: later chunks are paler."""
    return colour("s0" if slot.work.forward else "s2"), 0.95 - 0.5 * slot.work.chunk / max(1, chunks)
