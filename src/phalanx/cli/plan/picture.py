"""Write the picture of a plan as SVG, PNG or HTML page, by the file's ending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath
from string import Template
from typing import Final

from phalanx.cli.plan.amounts import format_decimal_bytes, format_seconds
from phalanx.cli.plan.placement_chart import ChartSheet, placement_sheet
from phalanx.cli.plan.records import LayoutFigures, PlanAnswer
from phalanx.cli.simulate.charts import (
    WIDTH,
    ChartArea,
    ChartLine,
    ChartShape,
    TextLabel,
)
from phalanx.cli.simulate.svg import render_svg
from phalanx.core.errors import BadRequest

PICTURE_FORMATS: Final = ("svg", "png", "html")
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


def picture_format(path: str) -> str:
    """Return the picture format of the path.

    Raises:
        BadRequest: the format is unknown or unavailable, or the path cannot be written.
    """
    kind = PurePath(path).suffix.lower().removeprefix(".")
    if kind not in PICTURE_FORMATS:
        raise BadRequest(
            f"--plot {path}: the name must end in one of {', '.join(PICTURE_FORMATS)}", hint="--plot plan.html"
        )
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


def write_picture(
    path: str, sheets: Sequence[ChartSheet], *, title: str, lead: str, command: str, version: str
) -> None:
    """Draw the sheets below each other.

    Raises:
        OSError: the file cannot be written.
    """
    kind = picture_format(path)
    if kind == "html":
        text = _page(sheets, title=title, lead=lead, command=command, version=version)
        Path(path).write_text(text, encoding="utf-8")
        return
    whole = stack_sheets(sheets, title, lead)
    if kind == "svg":
        Path(path).write_text(_alone(whole, title), encoding="utf-8")
        return
    from phalanx.cli.plan.png import render_png

    Path(path).write_bytes(render_png(whole, _THEME))


def stack_sheets(sheets: Sequence[ChartSheet], title: str, lead: str) -> ChartSheet:
    """Combine all sheets into one, below title and lead."""
    shapes: list[ChartShape] = []
    y = 2.0
    for line in _wrapped(title, 110):
        y += 20.0
        shapes.append(TextLabel(4, y, line, "ink", strong=True))
    y += 8.0
    for line in _wrapped(lead, 150):
        y += 18.0
        shapes.append(TextLabel(4, y, line))
    y += _GAP
    for sheet in sheets:
        shapes += [_moved(shape, y) for shape in sheet.shapes]
        y += sheet.height + _GAP
    return ChartSheet(tuple(shapes), y)


def _page(sheets: Sequence[ChartSheet], *, title: str, lead: str, command: str, version: str) -> str:
    template = Template(files("phalanx.cli.simulate").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(title),
        lead=escape(lead),
        table="",
        charts="".join(f"<section>{render_svg(sheet.shapes, title, sheet.height)}</section>" for sheet in sheets),
        footer=f"Phalanx {escape(version)}. Command: <code>{escape(command)}</code>",
    )
    return page.replace("<section><table></table></section>", "")  # a plan has no table


def _alone(sheet: ChartSheet, title: str) -> str:
    """Return a standalone SVG with its own colours and font."""
    drawn = render_svg(sheet.shapes, title, sheet.height)
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


def _moved(shape: ChartShape, by: float) -> ChartShape:
    match shape:
        case ChartLine(points, colour, width):
            return ChartLine(tuple((x, y + by) for x, y in points), colour, width)
        case ChartArea(points, base, colour, opacity):
            return ChartArea(tuple((x, y + by) for x, y in points), base + by, colour, opacity)
        case TextLabel(x, y, text, colour, anchor, strong):
            return TextLabel(x, y + by, text, colour, anchor, strong)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)


def write_plan_picture(path: str, answer: PlanAnswer, *, command: str) -> None:
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
        list(layout_sheets(answer, shown[0])),
        title=answer.request,
        lead=headline(answer),
        command=command,
        version=__version__,
    )


def layout_sheets(answer: PlanAnswer, one: LayoutFigures) -> Iterator[ChartSheet]:
    """Draw the placement, the timeline of a step, and the parts of step and memory."""
    from phalanx.cli.plan.step_chart import ITEMS_AFTER_PIPELINE, items_sheet, schedule_sheet

    yield placement_sheet(
        one.layout, layers=answer.layers, nodes=answer.nodes, gpus_per_node=answer.gpus_per_node, gpu=answer.gpu
    )
    if answer.fits:
        after_s = sum(seconds for name, seconds in one.step_items_s if name in ITEMS_AFTER_PIPELINE)
        yield schedule_sheet(one.layout, step_s=one.step_s.mid, after_s=after_s)
        yield items_sheet(f"Parts of the step: {format_seconds(one.step_s.mid)}", one.step_items_s, "s")
    title = (
        f"Memory of the fullest GPU: {format_decimal_bytes(one.used_bytes)} of {format_decimal_bytes(one.usable_bytes)}"
    )
    yield items_sheet(
        title, [(name, value / 1e9) for name, value in one.memory_bytes], "GB", whole=one.usable_bytes / 1e9
    )
