"""Tables that fit the terminal: pure, from cells to lines.

A table that is too wide first shrinks columns down to their `least` width, the widest first; then it drops columns, the highest
`drop` first; then it cuts lines at the edge. Nothing wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.cli.terminal import (
    Terminal,
    display_width,
    strip_control,
    truncate,
)

_GAP: Final = 2


class Cell(NamedTuple):
    """Text and its style (see `terminal`)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        title: heading.
        right: whether the cells are aligned to the right.
        min_width: width down to which the column may shrink; 0 never shrinks it.
        max_width: width at which the column ends also where there is room, as in a file or pipe; 0 never cuts it.
        drop_order: the column with the highest value is dropped first when space is short; 0 is never dropped.
        hide_empty: whether the column is hidden when all its cells are empty.
    """

    title: str
    right: bool = False
    min_width: int = 0
    max_width: int = 0
    drop_order: int = 0
    hide_empty: bool = False


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], terminal: Terminal, *, titles: bool = True
) -> list[str]:
    """Return the lines of a table with its titles, at most `terminal.width` wide."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = _widths(columns, cells, terminal.width, titles=titles)
    shown = [index for index, width in enumerate(widths) if width > 0]
    lines = []
    if titles:
        heads = [Cell(column.title, "dim") for column in columns]
        lines.append(_line(columns, heads, widths, shown, terminal))
    lines.extend(_line(columns, row, widths, shown, terminal) for row in cells)
    return lines


def _cell(cell: Cell | str) -> Cell:
    return Cell(strip_control(cell)) if isinstance(cell, str) else Cell(strip_control(cell.text), cell.style)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], room: int, *, titles: bool) -> list[int]:
    """Return the width of each column; 0 for a hidden one."""
    natural = []
    for index, column in enumerate(columns):
        widest = max((display_width(row[index].text) for row in rows), default=0)
        widest = min(widest, column.max_width or widest)
        hidden = column.hide_empty and widest == 0
        natural.append(0 if hidden else max(widest, display_width(column.title) if titles else 0, 1))
    while True:
        widths = _shrunk(columns, natural, room)
        if _over(widths, room) <= 0:
            return widths
        droppable = [index for index, column in enumerate(columns) if column.drop_order and natural[index] > 0]
        if not droppable:
            return _cut_at_edge(widths, room)
        natural[max(droppable, key=lambda index: columns[index].drop_order)] = 0


def _shrunk(columns: Sequence[Column], natural: Sequence[int], room: int) -> list[int]:
    """Return the widths with shrinkable columns reduced to fit, the widest first and never below the next widest."""
    widths = list(natural)
    while (over := _over(widths, room)) > 0:
        cuttable = [
            index for index, column in enumerate(columns) if column.min_width and widths[index] > column.min_width
        ]
        if not cuttable:
            break
        index = max(cuttable, key=lambda index: widths[index])
        next_widest = max((widths[other] for other in cuttable if other != index), default=0)
        floor = max(columns[index].min_width, min(next_widest, widths[index] - 1))
        widths[index] -= min(over, widths[index] - floor)
    return widths


def _over(widths: Sequence[int], room: int) -> int:
    return sum(widths) + _GAP * (sum(width > 0 for width in widths) - 1) - room


def _cut_at_edge(widths: list[int], room: int) -> list[int]:
    used = 0
    for index, width in enumerate(widths):
        if width == 0:
            continue
        gap = _GAP if used else 0
        widths[index] = max(0, min(width, room - used - gap))
        used += gap + widths[index]
    return widths


def _line(
    columns: Sequence[Column], row: Sequence[Cell], widths: Sequence[int], shown: Sequence[int], terminal: Terminal
) -> str:
    parts = []
    for index in shown:
        text = truncate(row[index].text, widths[index])
        pad = " " * (widths[index] - display_width(text))
        painted = terminal.paint(text, row[index].style) if text else ""
        last = index == shown[-1]
        parts.append(pad + painted if columns[index].right else painted + ("" if last else pad))
    return (" " * _GAP).join(parts).rstrip()
