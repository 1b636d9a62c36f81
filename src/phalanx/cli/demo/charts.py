"""The charts of demo.html: losses, devices over time, recovery times, and GPU time by category."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from phalanx.cli.demo.loss_curve import LossPoint, RepeatedStep
from phalanx.cli.figure_files import WIDTH, Box, Chart, Diagram, colour, style_axes, tooltip
from phalanx.core.accounting.usage_summary import AttemptSummary, GpuSeconds
from phalanx.core.ids import NodeId
from phalanx.wire.api.nodes import NodeView

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes

KEPT, LOST, AGAIN, SAVING, RESTARTING, IDLE = "s0", "s3", "s1", "s2", "s4", "idle"  # colours
_LANE: Final = 15.0  # height of one device's lane
_NODE_GAP: Final = 0.5  # lanes between two nodes
_SPAN_WORDS: Final = {
    RESTARTING: "starting",
    KEPT: "training, kept",
    LOST: "training, repeated later",
    IDLE: "after its last step",
}


def loss_chart(
    kept: Sequence[LossPoint],
    redone: Sequence[RepeatedStep],
    *,
    steps: int,
    kills: Sequence[tuple[float, str]],
    published: Sequence[int],
) -> Chart:
    """Draw the whole run: kept losses as a line, first losses of repeated steps, and second losses as dots on them."""
    losses = [loss for loss in (*(one.loss for one in kept), *(one.first for one in redone)) if math.isfinite(loss)]

    def plot(axes: Axes) -> None:
        axes.set_xlim(1, max(2, steps))
        axes.set_ylim(min([0.0, *losses]), max(losses, default=0.0) * 1.03 or 1.0)
        if redone:
            axes.axvspan(redone[0].step, redone[-1].step, color=colour(LOST), alpha=0.09, linewidth=0)
        axes.plot([one.step for one in kept], [one.loss for one in kept], color=colour(KEPT), linewidth=1.5)
        _plot_repeated(axes, redone, size=2.2)
        for step in published:
            (mark,) = axes.plot(
                step, 0.02, "^", color=colour(SAVING), transform=axes.get_xaxis_transform(), clip_on=False
            )
            tooltip(mark, f"checkpoint of step {step} published")
        _mark_kills(axes, kills)
        axes.set_xlabel("step")
        style_axes(axes, y_label="loss")

    return Chart(plot, height=330.0)


def repeated_steps_chart(redone: Sequence[RepeatedStep]) -> Chart:
    """Draw the repeated steps alone."""

    def plot(axes: Axes) -> None:
        _plot_repeated(axes, redone, size=6.0)
        axes.margins(x=0.02, y=0.08)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("step")
        style_axes(axes, y_label="loss")

    return Chart(plot, height=220.0, top=6.0)


def timeline_chart(
    nodes: Sequence[NodeView],
    attempts: Sequence[AttemptSummary],
    *,
    start_s: float,
    end_s: float,
    kills: Sequence[tuple[float, str]],
) -> Chart:
    """Draw one lane per device over time, grouped by node, with the activity of each attempt."""
    lanes: dict[tuple[NodeId, int], float] = {}
    middles: dict[NodeId, float] = {}
    y = 0.0
    for node in nodes:
        lanes |= {(node.id, device.index): y + number for number, device in enumerate(node.devices)}
        middles[node.id] = y + (len(node.devices) - 1) / 2
        y += len(node.devices) + _NODE_GAP

    def plot(axes: Axes) -> None:
        axes.barh(list(lanes.values()), max(1.0, end_s - start_s), height=0.8, color=colour("grid"))
        for attempt in attempts:
            held = [(share.node, index) for share in attempt.nodes for index in share.devices]
            for kind, begin_s, stop_s in activity_spans(attempt, end_s=end_s):
                text = f"attempt {attempt.epoch}: {_SPAN_WORDS[kind]}, {stop_s - begin_s:.1f} s"
                for lane in held:
                    if lane in lanes:
                        (bar,) = axes.barh(
                            lanes[lane], stop_s - begin_s, left=begin_s - start_s, height=0.8, color=colour(kind)
                        )
                        tooltip(bar, f"{lane[0]} device {lane[1]}, {text}")
        axes.set_xlim(0.0, max(1.0, end_s - start_s))
        axes.set_ylim(y - 1.0, -0.6)
        axes.set_yticks(list(middles.values()), list(middles))
        _mark_kills(axes, [(at_s - start_s, name) for at_s, name in kills])
        axes.set_xlabel("seconds since the start of the demo")
        style_axes(axes)
        axes.grid(visible=False)

    return Chart(plot, height=y * _LANE + 76.0, left=_room_for(list(middles)))


def activity_spans(attempt: AttemptSummary, *, end_s: float) -> list[tuple[str, float, float]]:
    """Return the activities of an attempt as (colour, begin, end), without gaps from placement to end."""
    found: list[tuple[str, float, float]] = []
    ended_s = end_s if attempt.ended_s is None else attempt.ended_s
    at_s = attempt.placed_s
    for each in attempt.generations:
        if each.first_step_s is None or each.last_step_s is None:
            continue
        found.append((RESTARTING, at_s, each.first_step_s))
        kept_s = min(max(attempt.kept_until_s or each.first_step_s, each.first_step_s), each.last_step_s)
        found += [(KEPT, each.first_step_s, kept_s), (LOST, kept_s, each.last_step_s)]
        at_s = each.last_step_s
    found.append((IDLE if attempt.first_step_s is not None else RESTARTING, at_s, ended_s))
    return [(kind, begin_s, stop_s) for kind, begin_s, stop_s in found if stop_s > begin_s]


def recovery_chart(figures: Sequence[tuple[str, float, str]]) -> Chart:
    """Draw horizontal bars of (name, seconds, note) on one linear scale; the first is Phalanx."""

    def plot(axes: Axes) -> None:
        names = [name for name, _, _ in figures]
        seconds = [value for _, value, _ in figures]
        bars = axes.barh(names, seconds, height=0.65, color=[colour("peer" if i else "s2") for i in range(len(names))])
        texts = [f"{value:.1f} s" + (f", {note}" if note else "") for _, value, note in figures]
        axes.bar_label(bars, texts, padding=6, color=colour("ink"))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        style_axes(axes)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])

    left = _room_for([name for name, _, _ in figures])
    return Chart(plot, height=34.0 * len(figures), left=left, top=0.0, bottom=0.0)


def usage_bar(spent: GpuSeconds) -> Diagram:
    """Draw GPU-seconds as one stacked bar by category."""
    parts = (
        ("kept", KEPT, spent.productive),
        ("lost", LOST, spent.lost),
        ("saving", SAVING, spent.saving),
        ("starting", RESTARTING, spent.restarting),
        ("idle", IDLE, spent.idle),
    )
    boxes, x = [], 0.0
    for name, kind, seconds in parts:
        width = seconds / spent.total * WIDTH if spent.total else 0.0
        if width:
            boxes.append(Box(x, 0.0, max(1.0, width - 2.0), 34.0, kind, tip=f"{name}: {seconds:.1f}"))
        x += width
    return Diagram(boxes, (), 36.0)


def _plot_repeated(axes: Axes, redone: Sequence[RepeatedStep], *, size: float) -> None:
    """Draw first losses as a line with rings, and second losses as dots in the rings."""
    steps = [each.step for each in redone]
    axes.plot(
        steps,
        [each.first for each in redone],
        "o-",
        color=colour(LOST),
        linewidth=1.2,
        markersize=size * 1.7,
        markerfacecolor="none",
    )
    for each in redone:
        (dot,) = axes.plot(each.step, each.second, "o", color=colour(AGAIN), markersize=size)
        tooltip(dot, f"step {each.step}: first {each.first:.6f}, again {each.second:.6f}")


def _mark_kills(axes: Axes, kills: Sequence[tuple[float, str]]) -> None:
    """Draw a dashed line at each kill, with the node's name above the chart."""
    low, high = axes.get_xlim()
    for x, name in kills:
        axes.axvline(x, color=colour(LOST), linewidth=1.2, linestyle="--")
        at_right = x > low + 0.8 * (high - low)
        axes.annotate(
            f"{name} killed",
            (x, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4 if at_right else 4, 4),
            textcoords="offset points",
            ha="right" if at_right else "left",
            color=colour(LOST),
            fontweight="bold",
        )


def _room_for(names: Sequence[str]) -> float:
    """Return the width of the names beside a chart."""
    return max([72.0, *(20.0 + 8.0 * len(name) for name in names)])
