"""Pictures of pages as inline SVG of rectangles, in classes of the style sheet: they need no script, and print.

A picture stretches with its column, so it has no text inside: names and numbers are in the table or list beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.web.html import Html, element, join

WIDTH: Final = 1000.0  # units of a picture across
_COLUMNS_LEAST: Final = 24  # so that a few are not as wide as the page
_LEAST: Final = 1.5  # units, so that a small part is seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPart:
    """A part of a bar. `start` and `size` in the unit of the whole; `kind`: class of its colour; `tip`: shown under the pointer."""

    start: float
    size: float
    kind: str
    tip: str = ""


def strip(parts: Sequence[ChartPart], whole: float, *, name: str) -> Html:
    """Return a bar of parts along `whole`. `name` describes it to a screen reader."""
    scale = WIDTH / whole if whole > 0 else 0.0
    drawn = [
        _box(part.start * scale, 0.0, max(_LEAST, part.size * scale), 20.0, part.kind, part.tip)
        for part in parts
        if part.size > 0
    ]
    return _picture(drawn, 20.0, "strip", name)


def stacked_bar(amounts: Sequence[tuple[str, float, str]], whole: float, *, name: str) -> Html:
    """Return a bar of amounts one after the other: (kind, amount, tip) each. What is left of `whole` stays empty."""
    parts, start = [], 0.0
    for kind, amount, tip in amounts:
        parts.append(ChartPart(start=start, size=amount, kind=kind, tip=tip))
        start += amount
    return strip(parts, max(whole, start), name=name)


def stacked_columns(
    columns: Sequence[Sequence[tuple[str, float, str]]], *, height: float, most: float, name: str
) -> Html:
    """Return columns side by side, each of amounts from below to above, as in `stacked_bar`; `most` is the top of the picture."""
    drawn = []
    wide = WIDTH / max(_COLUMNS_LEAST, len(columns))
    for place, amounts in enumerate(columns):
        below = 0.0
        for kind, amount, tip in amounts:
            if amount <= 0 or most <= 0:
                continue
            size = amount / most * height
            top = height - below - size
            drawn.append(_box(place * wide + 0.08 * wide, top, 0.84 * wide, size, kind, tip))
            below += size
    return _picture(drawn, height, "columns", name)


def key(kind: str, words: str) -> Html:
    """Return an entry of a legend: the colour of a kind, and its words."""
    square = element("rect", class_=kind, width="12", height="12")
    box = element("svg", square, class_="key", viewBox="0 0 12 12", aria_hidden="true")
    return join(box, f" {words}")


def _picture(drawn: Sequence[Html], height: float, class_: str, name: str) -> Html:
    return element(
        "svg",
        *drawn,
        class_=class_,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=name,
    )


def _box(x: float, y: float, width: float, height: float, kind: str, tip: str) -> Html:
    title = element("title", tip) if tip else None
    return element("rect", title, class_=kind, x=f"{x:.2f}", y=f"{y:.2f}", width=f"{width:.2f}", height=f"{height:.2f}")
