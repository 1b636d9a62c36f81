"""Draw a sheet of shapes as PNG with matplotlib, an extra that only `--plot FILE.png` needs. No window, no global state."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Final, assert_never

from phalanx.cli.plan.placement_chart import ChartSheet
from phalanx.cli.simulate.charts import (
    WIDTH,
    ChartArea,
    ChartLine,
    TextLabel,
)

_MARGIN: Final = 20.0
_UNITS_PER_INCH: Final = 96.0  # a unit is a CSS pixel
_DOTS_PER_INCH: Final = 192  # two dots a unit: sharp on a wide screen
_POINTS: Final = 72.0 / _UNITS_PER_INCH  # one unit in points, the unit of fonts and lines
_ANCHORS: Final = {"start": "left", "middle": "center", "end": "right"}


def render_png(sheet: ChartSheet, theme: Mapping[str, str]) -> bytes:
    """Return the PNG. `theme` maps the colour names of the shapes to colours."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = WIDTH + 2 * _MARGIN, sheet.height + 2 * _MARGIN
    # Dollar signs are prices, not mathematics.
    with rc_context({"font.family": "DejaVu Sans", "text.parse_math": False}):
        size = (width / _UNITS_PER_INCH, height / _UNITS_PER_INCH)
        figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-_MARGIN, WIDTH + _MARGIN)
        axes.set_ylim(sheet.height + _MARGIN, -_MARGIN)
        axes.set_axis_off()
        for shape in sheet.shapes:
            match shape:
                case ChartLine(points, colour, thick):
                    axes.plot(*zip(*points, strict=True), color=theme[colour], linewidth=thick * _POINTS)
                case ChartArea(points, base, colour, opacity):
                    corners = (*points, (points[-1][0], base), (points[0][0], base))
                    axes.fill(*zip(*corners, strict=True), color=theme[colour], alpha=opacity, linewidth=0)
                case TextLabel(x, y, text, colour, anchor, strong):
                    axes.text(
                        x,
                        y,
                        text,
                        color=theme[colour],
                        ha=_ANCHORS[anchor],
                        va="baseline",
                        fontsize=(15 if strong else 12) * _POINTS,
                        fontweight="bold" if strong else "normal",
                    )
                case _:
                    assert_never(shape)
        file = io.BytesIO()
        figure.savefig(file, format="png", facecolor="white")
    return file.getvalue()
