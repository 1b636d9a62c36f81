"""The charts of demo.html as inline SVG. Pure; the page's style sheet colours them by class, for light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from phalanx.cli.demo.loss_curve import LossPoint, RepeatedStep
from phalanx.core.accounting.receipt import AttemptSummary, GpuSeconds
from phalanx.core.ids import NodeId
from phalanx.wire.api.nodes import NodeView

_WIDTH: Final = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 26, 24
_LANE: Final = 15  # height of one device's lane


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartFrame:
    """Maps values to drawing units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int

    def x(self, value: float) -> float:
        """Map a value to a horizontal position."""
        share = (value - self.x_low) / (self.x_high - self.x_low or 1.0)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 2)

    def y(self, value: float) -> float:
        """Map a value to a vertical position."""
        share = (self.y_high - value) / (self.y_high - self.y_low or 1.0)
        return round(_TOP + share * (self.height - _TOP - _BOTTOM), 2)


def loss_chart(
    kept: Sequence[LossPoint],
    redone: Sequence[RepeatedStep],
    *,
    steps: int,
    kills: Sequence[tuple[float, str]],
    published: Sequence[int],
) -> str:
    """Draw the whole run: kept losses as a line, first losses of repeated steps, and second losses as dots on them."""
    losses = [point.loss for point in kept] + [each.first for each in redone]
    if not losses:
        return ""
    frame = ChartFrame(x_low=1, x_high=max(2, steps), y_low=min(0.0, *losses), y_high=max(losses) * 1.03, height=320)
    parts = [_axes(frame, "step")]
    if redone:
        left, right = frame.x(redone[0].step), frame.x(redone[-1].step)
        parts.append(
            f'<rect class="band" x="{left}" y="{_TOP}" width="{max(2.0, right - left)}" height="{frame.height - _TOP - _BOTTOM}"/>'
        )
    parts.append(_path("curve", [(frame.x(point.step), frame.y(point.loss)) for point in kept]))
    parts += _redone(frame, redone, radius=2.2)
    for step in published:
        x, y = frame.x(step), frame.height - _BOTTOM
        parts.append(
            f'<path class="published" d="M{x} {y} l-4.5 -8 h9 z"><title>checkpoint of step {step} published</title></path>'
        )
    parts += [_killed(frame.x(step), name, frame.height) for step, name in kills]
    return _svg(frame.height, parts)


def repeated_steps_chart(redone: Sequence[RepeatedStep]) -> str:
    """Draw the repeated steps alone."""
    values = [loss for each in redone for loss in (each.first, each.second)]
    margin = (max(values) - min(values)) * 0.08 or 0.01
    frame = ChartFrame(
        x_low=redone[0].step,
        x_high=max(redone[-1].step, redone[0].step + 1),
        y_low=min(values) - margin,
        y_high=max(values) + margin,
        height=230,
    )
    return _svg(frame.height, [_axes(frame, "step"), *_redone(frame, redone, radius=4.0)])


def timeline(
    nodes: Sequence[NodeView],
    attempts: Sequence[AttemptSummary],
    *,
    start_s: float,
    end_s: float,
    kills: Sequence[tuple[float, str]],
) -> str:
    """Draw one lane per device over time, grouped by node, with the activity of each attempt."""
    lanes: dict[tuple[NodeId, int], int] = {}
    parts: list[str] = []
    y = _TOP
    for node in nodes:
        parts.append(f'<text class="strong" x="4" y="{y + _LANE * len(node.devices) / 2 + 4}">{escape(node.id)}</text>')
        for device in node.devices:
            lanes[node.id, device.index] = y
            parts.append(
                f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE - 3}" rx="2"/>'
            )
            y += _LANE
        y += 8
    height = y + _BOTTOM
    frame = ChartFrame(x_low=0, x_high=max(1.0, end_s - start_s), y_low=0, y_high=1, height=height)
    for attempt in attempts:
        for kind, begin_s, stop_s in activity_spans(attempt, end_s=end_s):
            x0, x1 = frame.x(begin_s - start_s), frame.x(stop_s - start_s)
            word = f"attempt {attempt.epoch}: {_SPAN_WORDS[kind]}, {stop_s - begin_s:.1f} s"
            held = [(share.node, index) for share in attempt.nodes for index in share.devices]
            parts += [
                f'<rect class="{kind}" x="{x0}" y="{lanes[lane]}" width="{max(0.8, x1 - x0):.2f}" height="{_LANE - 3}" rx="2">'
                f"<title>{escape(lane[0])} device {lane[1]}, {word}</title></rect>"
                for lane in held
                if lane in lanes
            ]
    parts.append(_x_axis(frame, "s"))
    parts += [_killed(frame.x(at_s - start_s), name, height) for at_s, name in kills]
    return _svg(height, parts)


_SPAN_WORDS: Final = {
    "restarting": "starting",
    "kept": "training, kept",
    "lost": "training, repeated later",
    "idle": "after its last step",
}


def activity_spans(attempt: AttemptSummary, *, end_s: float) -> list[tuple[str, float, float]]:
    """Return the activities of an attempt as (class, begin, end), without gaps from placement to end."""
    found: list[tuple[str, float, float]] = []
    ended_s = end_s if attempt.ended_s is None else attempt.ended_s
    at_s = attempt.placed_s
    for each in attempt.generations:
        if each.first_step_s is None or each.last_step_s is None:
            continue
        found.append(("restarting", at_s, each.first_step_s))
        kept_s = min(max(attempt.kept_until_s or each.first_step_s, each.first_step_s), each.last_step_s)
        found += [("kept", each.first_step_s, kept_s), ("lost", kept_s, each.last_step_s)]
        at_s = each.last_step_s
    found.append(("idle" if attempt.first_step_s is not None else "restarting", at_s, ended_s))
    return [(kind, begin_s, stop_s) for kind, begin_s, stop_s in found if stop_s > begin_s]


def recovery_bars(figures: Sequence[tuple[str, float, str]]) -> str:
    """Draw horizontal bars of (name, seconds, note) on one linear scale; the first is Phalanx."""
    longest = max(seconds for _, seconds, _ in figures)
    parts = []
    for i, (name, seconds, words) in enumerate(figures):
        y, width = 8 + i * 34, max(2.0, seconds / longest * (_WIDTH - 230))
        parts.append(f'<text class="strong" x="4" y="{y + 17}">{escape(name)}</text>')
        parts.append(
            f'<rect class="{"peer" if i else "ours"}" x="110" y="{y}" width="{width:.1f}" height="24" rx="3"/>'
        )
        parts.append(f'<text class="strong" x="{110 + width + 10:.1f}" y="{y + 17}">{seconds:.1f} s</text>')
        parts.append(f'<text x="{110 + width + 62:.1f}" y="{y + 17}">{escape(words)}</text>')
    return _svg(8 + 34 * len(figures), parts)


def usage_bar(spent: GpuSeconds) -> str:
    """Draw GPU-seconds as one stacked bar by category."""
    parts, x = [], 0.0
    names = (
        ("kept", spent.productive),
        ("lost", spent.lost),
        ("saving", spent.saving),
        ("restarting", spent.restarting),
        ("idle", spent.idle),
    )
    for kind, seconds in names:
        width = seconds / spent.total * _WIDTH if spent.total else 0.0
        if width:
            parts.append(
                f'<rect class="{kind}" x="{x:.2f}" y="0" width="{max(1.0, width - 2):.2f}" height="34"><title>{kind}: {seconds:.1f}</title></rect>'
            )
        x += width
    return _svg(36, parts, kind="narrow")


def _redone(frame: ChartFrame, redone: Sequence[RepeatedStep], *, radius: float) -> list[str]:
    if not redone:
        return []
    first = _path("first", [(frame.x(each.step), frame.y(each.first)) for each in redone])
    rings = "".join(
        f'<circle class="first" cx="{frame.x(each.step)}" cy="{frame.y(each.first)}" r="{radius * 1.7:.1f}"/>'
        for each in redone
    )
    dots = "".join(
        f'<circle class="again" cx="{frame.x(each.step)}" cy="{frame.y(each.second)}" r="{radius}">'
        f"<title>step {each.step}: first {each.first:.6f}, again {each.second:.6f}</title></circle>"
        for each in redone
    )
    return [first, rings, dots]


def _axes(frame: ChartFrame, unit: str) -> str:
    lines = []
    for value in _ticks(frame.y_low, frame.y_high, 5):
        y = frame.y(value)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    return "".join(lines) + _x_axis(frame, unit)


def _x_axis(frame: ChartFrame, unit: str) -> str:
    base = frame.height - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    ticks = _ticks(frame.x_low, frame.x_high, 10)
    for value in ticks:
        x, last = frame.x(value), value == ticks[-1]
        word = f"{value:g} {unit}" if last else f"{value:g}"
        anchor = "end" if last and x > _WIDTH - 40 else "middle"
        parts.append(f'<text x="{x}" y="{frame.height - 6}" text-anchor="{anchor}">{word}</text>')
    return "".join(parts)


def _killed(x: float, name: str, height: int) -> str:
    anchor, shift = ("end", -6) if x > _WIDTH * 0.8 else ("start", 6)
    return (
        f'<line class="killed" x1="{x}" x2="{x}" y1="6" y2="{height - _BOTTOM}"/>'
        f'<text class="kill" x="{x + shift}" y="17" text-anchor="{anchor}">{escape(name)} killed</text>'
    )


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values within the range."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** (len(f"{raw:.0f}") - 1) if raw >= 1 else 10.0 ** -(len(f"{1 / raw:.0f}")) if raw > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5, 10, 20, 50) if power * factor >= raw), power * 50)
    first = int(low // step) + (low % step > 0)
    return [round(i * step, 10) for i in range(first, int(high // step) + 1)]


def _path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{kind}" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>' if points else ""


def _svg(height: float, parts: Sequence[str], *, kind: str = "wide") -> str:
    return f'<svg class="{kind}" role="img" viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg>'
