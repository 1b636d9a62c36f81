"""Charts and diagrams as files and inline SVG, drawn by matplotlib. The only module that imports it, and only to draw.

It uses no window and no global figure. A picture is a column of panels, each 1000 units wide; a unit is a CSS pixel.
Colours are names of the theme: a file has the light colours, and a page follows the reader's light or dark theme.
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from typing import TypeAlias

    import matplotlib.axes
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    Axes: TypeAlias = matplotlib.axes.Axes  # for the modules that draw charts

WIDTH: Final = 1000.0
SERIES: Final = 8  # colours s0 to s7; a chart of more series repeats them
_LIGHT: Final = {
    "page": "#f6f6f4",
    "card": "#ffffff",
    "ink": "#16181d",
    "soft": "#5c626d",
    "line": "#c9cdd4",
    "grid": "#ebecef",
    "best": "#e5f3ec",
    "s0": "#2a6fd0",
    "s1": "#e0930a",
    "s2": "#2e9c6a",
    "s3": "#d8433d",
    "s4": "#8b63d1",
    "s5": "#14a3b8",
    "s6": "#b0578d",
    "s7": "#7a7f32",
    "idle": "#b3b8c2",
    "peer": "#9aa1ad",
}
_DARK: Final = {
    "page": "#111317",
    "card": "#191c22",
    "ink": "#e9ebef",
    "soft": "#9aa2af",
    "line": "#3a404b",
    "grid": "#242932",
    "best": "#1b3429",
    "s0": "#5b9cf2",
    "s1": "#f3b340",
    "s2": "#4cc38a",
    "s3": "#f0706a",
    "s4": "#ab8af0",
    "s5": "#4fc6d8",
    "s6": "#d98bb8",
    "s7": "#b3b860",
    "idle": "#545c6b",
    "peer": "#6d7686",
}
_UNITS_PER_INCH: Final = 96.0
_POINTS: Final = 72.0 / _UNITS_PER_INCH  # one unit in points, the unit of fonts and lines
_DOTS_PER_INCH: Final = 192  # two dots a unit: sharp on a wide screen
_FONT, _FONT_STRONG = 13.0, 15.0
_MARGIN, _GAP = 20.0, 22.0  # of a file: around the picture, and between panels
_RIGHT: Final = 14.0  # of a chart: room for half a label
_TIP: Final = "tip: "
_METADATA: Final[Mapping[str, Mapping[str, None]]] = {  # equal charts give equal files
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle, with an outline if `edge` is a colour. `tip` is shown under the mouse pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    edge: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Text on the baseline `y`. `anchor`: "left", "center" or "right"."""

    x: float
    y: float
    text: str
    colour: str = "soft"
    anchor: str = "left"
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Diagram:
    """Boxes and labels without axes; y grows downwards from 0 to `height`."""

    boxes: Sequence[Box]
    labels: Sequence[Label]
    height: float


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with axes, drawn by `plot`, and the room for labels around the axes."""

    plot: Callable[[Axes], None]
    height: float = 300.0
    left: float = 72.0
    top: float = 30.0
    bottom: float = 46.0


Panel = Diagram | Chart


def picture_format(path: str, formats: Sequence[str]) -> str:
    """Return the format that the ending of `--plot FILE` names; called before the work whose result is drawn.

    Raises:
        BadRequest: the format is not one of `formats`, or the path cannot be written.
    """
    kind = PurePath(path).suffix.lower().removeprefix(".")
    if kind not in formats:
        known = ", ".join(f".{each}" for each in formats[:-1])
        raise BadRequest(
            f"--plot {path}: the name must end in {known} or .{formats[-1]}", hint=f"--plot out.{formats[0]}"
        )
    check_writable("--plot", path)
    return kind


def check_writable(option: str, path: str) -> None:
    """Check the path of an option.

    Raises:
        BadRequest: its folder does not exist, or it is a folder.
    """
    if not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"{option} {path}: folder {Path(path).parent} does not exist", hint="create it first")
    if Path(path).is_dir():
        raise BadRequest(f"{option} {path} is a folder, not a file")


def render(panels: Sequence[Panel], kind: str, *, title: str, lines: Sequence[str]) -> bytes:
    """Draw the panels below each other, under a title and lines of text. `kind`: "png", "svg" or "pdf"."""
    labels, y = [], 0.0
    for line in textwrap.wrap(title, 105):
        y += 21.0
        labels.append(Label(0, y, line, "ink", strong=True))
    y += 6.0
    for line in (part for text in lines for part in textwrap.wrap(text, 140)):
        y += 19.0
        labels.append(Label(0, y, line))
    drawn = _drawn([Diagram((), labels, y), *panels], kind, margin=_MARGIN, background="card")
    if kind != "svg":
        return drawn
    return drawn.replace(b"<svg ", f'<svg role="img" aria-label="{escape(title)}" '.encode(), 1)


def inline_svg(panel: Panel, name: str) -> str:
    """Draw a panel as SVG for a page that has `theme_css`."""
    text = _drawn([panel], "svg", margin=0.0, background="none").decode()
    text = text[text.index("<svg ") :]
    for colour, value in _LIGHT.items():
        text = text.replace(value, f"var(--{colour})")
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page has its own font
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    return f'<svg role="img" aria-label="{escape(name)}" {box[0]}>{text[text.index(">") + 1 :]}'


def theme_css() -> str:
    """Return the colours of both themes as style sheet variables."""
    light, dark = ("; ".join(f"--{name}: {value}" for name, value in each.items()) for each in (_LIGHT, _DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def colour(name: str) -> str:
    """Return the value of a theme colour."""
    return _LIGHT[name]


def series_colour(number: int) -> str:
    """Return the name of the colour of a series."""
    return f"s{number % SERIES}"


def style_axes(axes: Axes, title: str = "", *, y_label: str = "") -> None:
    """Give a chart the look of all charts: a title, horizontal grid lines, and only the lower axis."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=_FONT_STRONG * _POINTS, color=colour("ink"))
    axes.set_ylabel(y_label, color=colour("soft"))
    axes.xaxis.label.set_color(colour("soft"))
    axes.grid(visible=True, axis="y", color=colour("grid"), linewidth=_POINTS)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colour("soft"), length=0, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colour("line"))


def legend(axes: Axes, entries: Iterable[tuple[str, str]], *, below: bool = False) -> None:
    """Add a legend of (text, colour name): above the right end of the chart, or beside the label of its x axis."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour(name), label=text) for text, name in entries],
        loc="upper right" if below else "lower right",
        bbox_to_anchor=(1.02, 0.0) if below else (1.0, 1.0),
        ncols=SERIES,
        frameon=False,
        labelcolor=colour("soft"),
        borderaxespad=1.8 if below else 0.2,
        handlelength=1.0,
        handleheight=1.0,
    )


def tooltip(artist: Artist, text: str) -> None:
    """Show a text under the mouse pointer, in SVG."""
    artist.set_gid(_TIP + text)


def _drawn(panels: Sequence[Panel], kind: str, *, margin: float, background: str) -> bytes:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces its font cache on standard error
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width = WIDTH + 2 * margin
    height = sum(panel.height for panel in panels) + (len(panels) - 1) * _GAP + 2 * margin
    file = io.BytesIO()
    settings = rc_context(
        {
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
            "font.size": _FONT * _POINTS,
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "phalanx",
            "text.parse_math": False,  # a dollar sign is a price
        }
    )
    with settings:
        figure = Figure(figsize=(width / _UNITS_PER_INCH, height / _UNITS_PER_INCH), dpi=_DOTS_PER_INCH)
        top = margin
        for panel in panels:
            _draw(figure, panel, margin, top)
            top += panel.height + _GAP
        ground = "none" if background == "none" else colour(background)
        figure.savefig(file, format=kind, facecolor=ground, metadata=dict(_METADATA[kind]))
    if kind != "svg":
        return file.getvalue()
    text = file.getvalue().decode()
    text = re.sub(rf'<g id="{_TIP}([^"]*)"', r"<g><title>\1</title", text)
    return re.sub(r'<g id="[^"]*"', "<g", text).encode()  # ids would repeat on a page


def _draw(figure: Figure, panel: Panel, left: float, top: float) -> None:
    """Add the panel at a position in units from the figure's upper left corner."""
    whole_width, whole_height = (inches * _UNITS_PER_INCH for inches in figure.get_size_inches())

    def place(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        bottom = whole_height - top - y - height
        return (left + x) / whole_width, bottom / whole_height, width / whole_width, height / whole_height

    if isinstance(panel, Diagram):
        axes = figure.add_axes(place(0.0, 0.0, WIDTH, panel.height))
        axes.set_axis_off()
        axes.set_xlim(0.0, WIDTH)
        axes.set_ylim(panel.height, 0.0)
        _draw_diagram(axes, panel)
    else:
        inner = WIDTH - panel.left - _RIGHT, panel.height - panel.top - panel.bottom
        axes = figure.add_axes(place(panel.left, panel.top, *inner), facecolor="none")
        panel.plot(axes)


def _draw_diagram(axes: Axes, diagram: Diagram) -> None:
    from matplotlib.collections import PolyCollection

    plain = [box for box in diagram.boxes if not box.tip]
    # One collection of thousands of boxes is ten times as fast as one artist for each.
    for boxes in (plain, *([box] for box in diagram.boxes if box.tip)):
        drawn = PolyCollection(
            [_corners(box) for box in boxes],
            facecolors=[(colour(box.colour), box.opacity) for box in boxes],
            edgecolors=[colour(box.edge) if box.edge else "none" for box in boxes],
            linewidths=[1.2 * _POINTS if box.edge else 0.0 for box in boxes],
            clip_on=False,
        )
        axes.add_collection(drawn, autolim=False)
        if boxes and boxes[0].tip:
            tooltip(drawn, boxes[0].tip)
    for label in diagram.labels:
        axes.text(
            label.x,
            label.y,
            label.text,
            color=colour(label.colour),
            ha=label.anchor,
            va="baseline",
            fontsize=(_FONT_STRONG if label.strong else _FONT) * _POINTS,
            fontweight="bold" if label.strong else "normal",
        )


def _corners(box: Box) -> list[tuple[float, float]]:
    right, bottom = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, bottom), (box.x, bottom)]
