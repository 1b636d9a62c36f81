"""Pictures of commands: an image file, or one self-contained HTML page in the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from phalanx.cli.figure_files import Panel, inline_svg, picture_format, render, theme_css

FORMATS: Final = ("svg", "png", "html")


def write_picture(path: str, panels: Sequence[tuple[str, Panel]], *, title: str, lead: str, command: str) -> None:
    """Draw the panels, each given with its name, below each other.

    Raises:
        BadRequest: as `picture_format`.
        OSError: the file cannot be written.
    """
    kind = picture_format(path, FORMATS)
    if kind == "html":
        drawn = build_figure_page(panels, title=title, lead=lead, command=command).encode()
    else:
        drawn = render([panel for _, panel in panels], kind, title=title, lines=[lead])
    Path(path).write_bytes(drawn)


def build_figure_page(
    panels: Sequence[tuple[str, Panel]], *, title: str, lead: str, command: str, table: str = "", texts: str = ""
) -> str:
    """Return the page as HTML: the rows of a table if there is one, then each panel, given with its name, then paragraphs."""
    from phalanx import __version__

    sections = [f"<table>{table}</table>"] if table else []
    sections += [inline_svg(panel, name) for name, panel in panels]
    sections += [texts] if texts else []
    return Template(files("phalanx.cli").joinpath("figure_page.html").read_text(encoding="utf-8")).substitute(
        theme=theme_css(),
        title=escape(title),
        lead=escape(lead),
        sections="\n".join(f"<section>{each}</section>" for each in sections),
        footer=f"Phalanx {escape(__version__)}. Command: <code>{escape(command)}</code>",
    )
