"""Render chart shapes as inline SVG. Pure; the page's style sheet defines the colours for both themes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import assert_never

from phalanx.cli.simulate.charts import (
    HEIGHT,
    WIDTH,
    ChartArea,
    ChartLine,
    ChartShape,
    TextLabel,
)


def render_svg(shapes: Sequence[ChartShape], title: str, height: float = HEIGHT) -> str:
    """Render one chart."""
    drawn = "".join(_drawn(shape) for shape in shapes)
    return f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH:g} {height:g}">{drawn}</svg>'


def _drawn(shape: ChartShape) -> str:
    match shape:
        case ChartLine(points, colour, width):
            return f'<path fill="none" stroke="var(--{colour})" stroke-width="{width:g}" stroke-linejoin="round" d="M{_path(points)}"/>'
        case ChartArea(points, base, colour, opacity):
            corners = (*points, (points[-1][0], base), (points[0][0], base))
            return f'<path fill="var(--{colour})" opacity="{opacity:g}" d="M{_path(corners)}Z"/>'
        case TextLabel(x, y, text, colour, anchor, strong):
            kind = ' class="strong"' if strong else ""
            return f'<text{kind} fill="var(--{colour})" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        case _:
            assert_never(shape)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
