"""Terminal line charts: points on a grid of braille dots. A cell has the style of the series drawn last. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

_DOTS: Final = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # [row][column] of one braille cell, Unicode 1.1
_LABEL_COLUMNS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """Points in ascending x. `joined` connects them with lines; `glyph` replaces the dots of a cell."""

    points: Sequence[tuple[float, float]]
    style: str
    joined: bool = True
    glyph: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMarker:
    """A vertical line at x with a label above it."""

    x: float
    style: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLimits:
    """The visible range of both axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float


class BrailleCanvas:
    """A grid of cells with 2 x 4 dots each."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = [[0] * width for _ in range(height)]
        self._glyphs = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str, glyph: str = "") -> None:
        """Set one dot; ignore positions outside the grid."""
        if 0 <= x < self.width * 2 and 0 <= y < self.height * 4:
            row, column = y // 4, x // 2
            self._dots[row][column] |= _DOTS[y % 4][x % 2]
            self._styles[row][column] = style
            self._glyphs[row][column] = glyph or self._glyphs[row][column]

    def line(self, x0: int, y0: int, x1: int, y1: int, style: str) -> None:
        """Draw a line between two points."""
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            self.dot(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count), style)

    def row(self, number: int, *, braille: bool) -> Text:
        """Return one row of cells as text."""
        text = Text()
        for dots, glyph, style in zip(self._dots[number], self._glyphs[number], self._styles[number], strict=True):
            plain = "*" if dots else " "
            cell = glyph if glyph and braille else chr(0x2800 + dots) if dots and braille else plain
            text.append(cell, style)
        return text


def plot(
    series: Sequence[ChartSeries],
    window: AxisLimits,
    *,
    width: int,
    height: int,
    marks: Sequence[ChartMarker] = (),
    braille: bool = True,
) -> list[Text]:
    """Draw a chart of `width` columns and `height` rows, axes and labels included. Later series lie on top."""
    columns, rows = max(4, width - _LABEL_COLUMNS - 1), max(2, height - 1 - bool(marks))
    canvas = BrailleCanvas(columns, rows)

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - window.x_low) / (window.x_high - window.x_low or 1.0)
        down = (window.y_high - y) / (window.y_high - window.y_low or 1.0)
        return round(across * (columns * 2 - 1)), round(min(max(down, 0.0), 1.0) * (rows * 4 - 1))

    for mark in marks:
        x, _ = place(mark.x, window.y_low)
        for y in range(0, rows * 4, 2):
            canvas.dot(x, y, mark.style)
    for each in series:
        dots = [(*place(x, y), each) for x, y in each.points if math.isfinite(y)]
        for i, (x, y, _) in enumerate(dots):
            if each.joined and i:
                canvas.line(dots[i - 1][0], dots[i - 1][1], x, y, each.style)
            canvas.dot(x, y, each.style, each.glyph)
    lines = [_marker_labels(marks, place, columns)] if marks else []
    for number in range(rows):
        label = {0: window.y_high, rows // 2: (window.y_high + window.y_low) / 2, rows - 1: window.y_low}.get(number)
        axis = ("" if label is None else f"{label:.2f}").rjust(_LABEL_COLUMNS - 1) + (" │" if braille else " |")
        lines.append(Text().append(axis, "dim").append_text(canvas.row(number, braille=braille)))
    lines.append(_x_labels(window, columns))
    return lines


def _marker_labels(marks: Sequence[ChartMarker], place: object, columns: int) -> Text:
    assert callable(place)
    text = Text(" " * (_LABEL_COLUMNS + 1))
    used = 0
    for mark in sorted(marks, key=lambda mark: mark.x):
        column = max(used, min(place(mark.x, 0.0)[0] // 2, columns - len(mark.label)))
        if column + len(mark.label) <= columns:
            text.append(" " * (column - used)).append(mark.label, mark.style)
            used = column + len(mark.label)
    return text


def _x_labels(window: AxisLimits, columns: int) -> Text:
    low, middle, high = (f"{value:.0f}" for value in (window.x_low, (window.x_low + window.x_high) / 2, window.x_high))
    left = columns // 2 - len(low) - len(middle) // 2
    right = columns - len(low) - left - len(middle) - len(high)
    return Text(" " * (_LABEL_COLUMNS + 1) + low + " " * max(1, left) + middle + " " * max(1, right) + high, "dim")
