"""Line charts and bar charts for the terminal, drawn by plotext. Pure: lines of text for a given size.

plotext draws on one figure of the module, so a chart is complete when its function returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.text import Text

_ASCII: Final = str.maketrans("┤├│└┬┴┼─•█", "|||++++-o#")  # for encodings without box drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """Points in ascending x. `joined` connects them with lines, else each point is a dot."""

    points: Sequence[tuple[float, float]]
    colour: str
    joined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMarker:
    """A vertical line at x with a label beside it."""

    x: float
    colour: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLimits:
    """The visible range of both axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBar:
    """A horizontal bar with a name before it and a text behind it."""

    name: str
    value: float
    colour: str
    text: str


def line_chart(
    series: Sequence[ChartSeries],
    limits: AxisLimits,
    *,
    width: int,
    height: int,
    marks: Sequence[ChartMarker] = (),
    blocks: bool = True,
    x_text: Callable[[float], str] = "{:.0f}".format,
    y_text: Callable[[float], str] = "{:.2f}".format,
) -> list[Text]:
    """Draw a chart of `width` columns and `height` rows, axes included. Later series lie on top.

    `blocks`: whether the encoding has braille and box characters; otherwise the chart is ASCII. `x_text`, `y_text`: the labels of the axes.
    """
    plotext = _cleared(width, height)
    plotext.xlim(limits.x_low, limits.x_high)
    plotext.ylim(limits.y_low, limits.y_high)
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    middle = (limits.x_low + limits.x_high) / 2
    ticks = sorted({round(x) for x in (limits.x_low, middle, limits.x_high)})
    plotext.xticks(ticks, [x_text(x) for x in ticks])
    labelled = [limits.y_low, (limits.y_low + limits.y_high) / 2, limits.y_high]
    plotext.yticks(labelled, [y_text(y) for y in labelled])
    rows = max(1, height - 2)  # without the axis and its labels
    for number, mark in enumerate(marks):
        plotext.vline(mark.x, _colour(mark.colour))
        left = mark.x < middle
        beside = mark.x + (1 if left else -1) * (limits.x_high - limits.x_low) / width
        below = number % rows * (limits.y_high - limits.y_low) / max(1, rows - 1)  # one label a row
        plotext.text(
            mark.label,
            beside,
            limits.y_high - below,
            color=_colour(mark.colour),
            alignment="left" if left else "right",
        )
    for each in series:
        points = [point for point in each.points if math.isfinite(point[1])]
        if points:
            draw, marker, plain = (plotext.plot, "braille", "*") if each.joined else (plotext.scatter, "•", "o")
            draw(*zip(*points, strict=True), color=_colour(each.colour), marker=marker if blocks else plain)
    return _lines(plotext.build(), blocks=blocks)


def bar_chart(bars: Sequence[ChartBar], *, width: int, blocks: bool = True) -> list[Text]:
    """Draw one line per bar on one linear scale from 0. The text of the longest bar fits beside it."""
    plotext = _cleared(width, len(bars))
    longest = max(bars, key=lambda bar: bar.value)
    canvas = width - max(len(bar.name) for bar in bars) - 1
    column = longest.value / max(1, canvas - len(longest.text) - 2)
    plotext.xlim(0.0, column * (canvas - 1))
    plotext.ylim(1, max(2, len(bars)))
    plotext.xfrequency(0)
    plotext.xaxes(False, False)
    plotext.yaxes(True, False)
    places = range(len(bars), 0, -1)
    for y, bar in zip(places, bars, strict=True):
        if bar.value > 0:
            plotext.bar([y], [bar.value], orientation="horizontal", color=_colour(bar.colour), width=0.1)
        plotext.text(bar.text, bar.value + 2 * column, y, color=_colour(bar.colour), alignment="left")
    plotext.yticks(list(places), [bar.name for bar in bars])  # `bar` has replaced them
    return _lines(plotext.build(), blocks=blocks)


def _cleared(width: int, height: int) -> Any:
    """Return plotext with an empty figure of this size, in the terminal's own colours."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    return plotext


def _colour(name: str) -> int:
    """Return the terminal's number of a colour that rich knows by name."""
    from rich.color import Color

    return Color.parse(name).number or 0


def _lines(drawn: str, *, blocks: bool) -> list[Text]:
    from rich.text import Text

    return list(Text.from_ansi(drawn if blocks else drawn.translate(_ASCII)).split("\n"))
