"""Write the picture of a plan as SVG, PNG or HTML page, by the file's ending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath
from string import Template
from typing import Final

from phalanx.cli.plan.amounts import gb_shown, seconds_shown
from phalanx.cli.plan.figures import Figures, Told
from phalanx.cli.plan.fleetview import Sheet, fleet_sheet
from phalanx.cli.simulate.charts import WIDTH, Area, Line, Shape, Words
from phalanx.cli.simulate.svg import svg
from phalanx.core.errors import BadRequest

KINDS: Final = ("svg", "png", "html")
_GAP: Final = 22.0  # between sheets
_MARGIN: Final = 20.0
# The light colours of cli/simulate/page.html: a picture file cannot follow the reader's theme.
_THEME: Final = {
    "ink": "#16181d",
    "soft": "#5c626d",
    "line": "#c9cdd4",
    "grid": "#ebecef",
    "s0": "#2a6fd0",
    "s1": "#e0930a",
    "s2": "#2e9c6a",
    "s3": "#d8433d",
    "s4": "#8b63d1",
    "s5": "#14a3b8",
    "s6": "#b0578d",
    "s7": "#7a7f32",
}


def check_picture(path: str) -> str:
    """Return the picture format of the path.

    Raises:
        BadRequest: the format is unknown or unavailable, or the path cannot be written.
    """
    kind = PurePath(path).suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise BadRequest(f"--plot {path}: the name must end in one of {', '.join(KINDS)}", hint="--plot plan.html")
    if kind == "png" and find_spec("matplotlib") is None:
        raise BadRequest(
            "--plot: PNG needs matplotlib, which is not installed",
            hint="pip install '.[plot]' in the checkout, or use plan.svg or plan.html",
        )
    if not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"--plot {path}: folder {Path(path).parent} does not exist", hint="create it first")
    if Path(path).is_dir():
        raise BadRequest(f"--plot {path} is a folder, not a file")
    return kind


def write_picture(path: str, sheets: Sequence[Sheet], *, title: str, lead: str, command: str, version: str) -> None:
    """Draw the sheets below each other.

    Raises:
        OSError: the file cannot be written.
    """
    kind = check_picture(path)
    if kind == "html":
        text = _page(sheets, title=title, lead=lead, command=command, version=version)
        Path(path).write_text(text, encoding="utf-8")
        return
    whole = stacked(sheets, title, lead)
    if kind == "svg":
        Path(path).write_text(_alone(whole, title), encoding="utf-8")
        return
    from phalanx.cli.plan.png import png

    Path(path).write_bytes(png(whole, _THEME))


def stacked(sheets: Sequence[Sheet], title: str, lead: str) -> Sheet:
    """Combine all sheets into one, below title and lead."""
    shapes: list[Shape] = []
    y = 2.0
    for line in _wrapped(title, 110):
        y += 20.0
        shapes.append(Words(4, y, line, "ink", strong=True))
    y += 8.0
    for line in _wrapped(lead, 150):
        y += 18.0
        shapes.append(Words(4, y, line))
    y += _GAP
    for sheet in sheets:
        shapes += [_moved(shape, y) for shape in sheet.shapes]
        y += sheet.height + _GAP
    return Sheet(tuple(shapes), y)


def _page(sheets: Sequence[Sheet], *, title: str, lead: str, command: str, version: str) -> str:
    template = Template(files("phalanx.cli.simulate").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(title),
        lead=escape(lead),
        table="",
        charts="".join(f"<section>{svg(sheet.shapes, title, sheet.height)}</section>" for sheet in sheets),
        footer=f"Phalanx {escape(version)}. Command: <code>{escape(command)}</code>",
    )
    return page.replace("<section><table></table></section>", "")  # a plan has no table


def _alone(sheet: Sheet, title: str) -> str:
    """Return a standalone SVG with its own colours and font."""
    drawn = svg(sheet.shapes, title, sheet.height)
    for name, colour in _THEME.items():
        drawn = drawn.replace(f"var(--{name})", colour)
    body = drawn[drawn.index(">") + 1 :]
    box = f"{-_MARGIN:g} {-_MARGIN:g} {WIDTH + 2 * _MARGIN:g} {sheet.height + 2 * _MARGIN:g}"
    size = f'width="{WIDTH + 2 * _MARGIN:g}" height="{sheet.height + 2 * _MARGIN:g}"'
    style = "text{font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}text.strong{font-weight:600;font-size:15px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" viewBox="{box}" {size}>'
        f'<style>{style}</style><rect x="{-_MARGIN:g}" y="{-_MARGIN:g}" width="100%" height="100%" fill="#ffffff"/>{body}'
    )


def _moved(shape: Shape, by: float) -> Shape:
    match shape:
        case Line(points, colour, width):
            return Line(tuple((x, y + by) for x, y in points), colour, width)
        case Area(points, base, colour, opacity):
            return Area(tuple((x, y + by) for x, y in points), base + by, colour, opacity)
        case Words(x, y, text, colour, anchor, strong):
            return Words(x, y + by, text, colour, anchor, strong)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)


def draw(path: str, answer: Told, *, command: str) -> None:
    """Write the picture of the best layout, or of the first one that does not fit.

    Raises:
        BadRequest: there is no layout.
        OSError: the file cannot be written.
    """
    from phalanx import __version__
    from phalanx.cli.plan.page import headline

    shown = (*answer.layouts, *answer.losers)
    if not shown:
        raise BadRequest(f"--plot {path}: there is no layout to draw", hint="see the reason with --json")
    write_picture(
        path,
        list(sheets_of(answer, shown[0])),
        title=answer.asked,
        lead=headline(answer),
        command=command,
        version=__version__,
    )


def sheets_of(answer: Told, one: Figures) -> Iterator[Sheet]:
    """Draw the placement, the timeline of a step, and the parts of step and memory."""
    from phalanx.cli.plan.timeline import AFTER, items_sheet, schedule_sheet

    yield fleet_sheet(
        one.layout, layers=answer.layers, nodes=answer.nodes, gpus_per_node=answer.gpus_per_node, gpu=answer.gpu
    )
    if answer.fits:
        after_s = sum(seconds for name, seconds in one.step_items_s if name in AFTER)
        yield schedule_sheet(one.layout, step_s=one.step_s.mid, after_s=after_s)
        yield items_sheet(f"Parts of the step: {seconds_shown(one.step_s.mid)}", one.step_items_s, "s")
    title = f"Memory of the fullest GPU: {gb_shown(one.used_bytes)} of {gb_shown(one.usable_bytes)}"
    yield items_sheet(
        title, [(name, value / 1e9) for name, value in one.memory_bytes], "GB", whole=one.usable_bytes / 1e9
    )
