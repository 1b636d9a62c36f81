"""The part of `top`'s screen with the fleet: draws lines of styled runs directly, since thousands of spans of text would take a second."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from phalanx.cli.top.fleet_grid import Run


class FleetView(Widget):
    """Lines of runs; `show` replaces them."""

    def __init__(self, **options: str) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # the names and classes of a widget
        self._lines: list[Strip] = []

    def show(self, lines: Sequence[Sequence[Run]]) -> None:
        """Show these lines, in as many rows."""
        strips = [Strip([_segment(*run) for run in line], sum(cell_len(text) for text, _ in line)) for line in lines]
        if len(strips) != len(self._lines):
            self.styles.height = len(strips)
        self._lines = strips
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        width = self.size.width
        line = self._lines[y] if y < len(self._lines) else Strip([])
        return line.adjust_cell_length(width)


@lru_cache(maxsize=4096)
def _segment(text: str, style: str) -> Segment:
    """Return a segment; most are one of a few letters in its colour."""
    return Segment(text, Style.parse(style or "none"))
