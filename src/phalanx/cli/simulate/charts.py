"""The charts of a replay as shapes, for `render_svg` and `render_png`. Pure; colours are names that a theme defines.

The sheet is 1000 units wide; y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.cli.simulate.chart_data import (
    FleetTimeSeries,
    PolicyRun,
    fleet_time_series,
    log_ticks,
    ticks,
    waits_by_size,
)

WIDTH: Final = 1000.0
HEIGHT: Final = 300.0
SERIES: Final = 8  # colours; more policies than this share them
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 44.0, 34.0
_STEPS: Final = 460  # about two units each; more detail is not visible
_DAY_S: Final = 86_400.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A polyline."""

    points: tuple[Point, ...]
    colour: str
    width: float = 2.0


@dataclass(frozen=True, slots=True)
class ChartArea:
    """The area between a polyline, ascending in x, and the height `base`."""

    points: tuple[Point, ...]
    base: float
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class TextLabel:
    """Text on the baseline `y`. `anchor`: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    colour: str = "soft"
    anchor: str = "start"
    strong: bool = False


ChartShape = ChartLine | ChartArea | TextLabel


def draw_charts(runs: Sequence[PolicyRun]) -> list[list[ChartShape]]:
    """Draw utilisation, queue depth, and waits by size."""
    start_s, end_s = min(run.start_s for run in runs), max(run.end_s for run in runs)
    courses = [fleet_time_series(run, start_s=start_s, end_s=end_s, steps=_STEPS) for run in runs]
    return [
        _over_time("GPUs held", runs, courses, [each.gpu_share for each in courses], top=1.0, percent=True),
        _over_time(
            "Jobs waiting",
            runs,
            courses,
            [each.waiting for each in courses],
            top=max(1.0, *(value for each in courses for value in each.waiting)) * 1.04,
            percent=False,
        ),
        _waits(runs),
    ]


def _over_time(
    title: str,
    runs: Sequence[PolicyRun],
    courses: Sequence[FleetTimeSeries],
    values: Sequence[Sequence[float]],
    *,
    top: float,
    percent: bool,
) -> list[ChartShape]:
    start_s = courses[0].times_s[0] - (courses[0].times_s[1] - courses[0].times_s[0]) / 2
    days = (courses[0].times_s[-1] + courses[0].times_s[0] - 2 * start_s) / _DAY_S

    def x(time_s: float) -> float:
        return _LEFT + (time_s - start_s) / _DAY_S / (days or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    shapes: list[ChartShape] = []
    for value in [0.0, 0.25, 0.5, 0.75, 1.0] if percent else ticks(0.0, top, 4):
        shapes.append(ChartLine(((_LEFT, y(value)), (WIDTH - _RIGHT, y(value))), "grid", 1.0))
        shapes.append(TextLabel(_LEFT - 10, y(value) + 5, f"{value:.0%}" if percent else f"{value:,.0f}", anchor="end"))
    unit, scale = (1.0, "days") if days >= 3 else (24.0, "hours")
    marks = ticks(0.0, days * unit, 10)
    for value in marks:
        at = x(start_s + value / unit * _DAY_S)
        if at < WIDTH - _RIGHT - 60 or value != marks[-1]:
            shapes.append(TextLabel(at, HEIGHT - 10, f"{value:g}", anchor="middle"))
    shapes.append(TextLabel(WIDTH - _RIGHT, HEIGHT - 10, scale, anchor="end"))
    for number, (own, series) in enumerate(zip(courses, values, strict=True)):
        points = tuple((x(time_s), y(min(value, top))) for time_s, value in zip(own.times_s, series, strict=True))
        if len(runs) == 1:
            shapes.append(ChartArea(points, y(0.0), _colour(number), 0.18))
        shapes.append(ChartLine(points, _colour(number), 2.0 if len(runs) == 1 else 1.6))
    shapes.append(ChartLine(((_LEFT, y(0.0)), (WIDTH - _RIGHT, y(0.0))), "line", 1.0))
    return [
        *shapes,
        *_title(title, [(run.policy, _colour(at)) for at, run in enumerate(runs)] if len(runs) > 1 else []),
    ]


def _waits(runs: Sequence[PolicyRun]) -> list[ChartShape]:
    """Draw bars on a logarithmic axis: mean and 99th percentile of one policy, or the means of several."""
    tables = [waits_by_size(run) for run in runs]
    names = [waits.sizes for waits in max(tables, key=len)]
    if len(runs) == 1:
        bars = [([waits.mean_s for waits in tables[0]], "s0"), ([waits.p99_s for waits in tables[0]], "s1")]
        key = [("mean", "s0"), ("99th percentile", "s1")]
    else:
        bars = [([waits.mean_s for waits in table], _colour(number)) for number, table in enumerate(tables)]
        key = [(run.policy, _colour(number)) for number, run in enumerate(runs)]
    marks = log_ticks([value for values, _ in bars for value in values])
    top = math.log10(marks[-1]) or 1.0

    def y(seconds: float) -> float:
        return HEIGHT - _BOTTOM - math.log10(max(1.0, seconds)) / top * (HEIGHT - _TOP - _BOTTOM)

    shapes: list[ChartShape] = []
    for mark in marks:
        shapes.append(ChartLine(((_LEFT, y(mark)), (WIDTH - _RIGHT, y(mark))), "grid", 1.0))
        shapes.append(TextLabel(_LEFT - 10, y(mark) + 5, format_short(mark), anchor="end"))
    room = (WIDTH - _LEFT - _RIGHT) / len(names)
    width = min(46.0, room * 0.8 / len(bars))
    for place, name in enumerate(names):
        middle = _LEFT + (place + 0.5) * room
        for number, (values, colour) in enumerate(bars):
            if values[place] >= 1.0:
                left = middle + (number - len(bars) / 2) * width
                shapes.append(
                    ChartArea(((left + 1, y(values[place])), (left + width - 1, y(values[place]))), y(1.0), colour)
                )
        shapes.append(TextLabel(middle, HEIGHT - 10, f"{name} GPU{'' if name == '1' else 's'}", anchor="middle"))
    shapes.append(ChartLine(((_LEFT, y(1.0)), (WIDTH - _RIGHT, y(1.0))), "line", 1.0))
    title = "Wait by size" if len(runs) == 1 else "Mean wait by size"
    return [*shapes, *_title(title, key)]


def _title(title: str, key: Sequence[tuple[str, str]]) -> list[ChartShape]:
    shapes: list[ChartShape] = [TextLabel(4, 18, title, "ink", strong=True)]
    at = WIDTH - _RIGHT
    for name, colour in reversed(key):
        at -= 8.0 * len(name)
        shapes.append(TextLabel(at, 17, name))
        shapes.append(ChartArea(((at - 18, 7.0), (at - 6, 7.0)), 19.0, colour))
        at -= 34.0
    return shapes


def format_short(seconds: float) -> str:
    """Format a time in at most six characters: 45 s, 10 min, 6 h, 7 d."""
    for size, unit in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _colour(number: int) -> str:
    return f"s{number % SERIES}"
