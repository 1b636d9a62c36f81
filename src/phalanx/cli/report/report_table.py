"""One report as a table, and its four forms: text, JSON, CSV and a self-contained HTML page."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

from phalanx.cli.list_output import to_json
from phalanx.cli.report.period import utc_text
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal, truncate

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes, Chart

_BARS_MAX: Final = 15  # rows that a page draws; its table has all
_NAME_CHARS: Final = 22  # of a row's name in the room beside the bars


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A report, ready to be printed.

    Attributes:
        title: of the page.
        since_s, until_s: the period, in Unix seconds.
        value: what `--json` prints.
        columns: of text and page.
        rows: the last is the total; none if there is nothing to report.
        csv_rows: the first has the titles, the last is the total. Numbers are exact.
        notes: sentences below the table.
        empty: the sentence in place of a table without rows.
        next_command: to try next.
        bars: of the page: the title of the axis, and for each row its name and its parts by legend, such as USED and IDLE.
    """

    title: str
    since_s: float
    until_s: float
    value: object
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    csv_rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())
    empty: str = "no GPU-hours in this period"
    next_command: str = ""
    bars: tuple[str, Sequence[tuple[str, Mapping[str, float]]]] = ("", ())

    def lines(self, screen: Terminal) -> list[str]:
        """The table as text, without its notes."""
        return table(self.columns, self.rows, screen) if self.rows else [self.empty]


def print_report(found: ReportTable, form: str, command: str) -> None:
    """Print a report. `form`: "text", "json", "csv" or "html"; `command`: the line that made it, for the page."""
    match form:
        case "json":
            print(to_json(found.value, indent=2))
        case "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerows([[_csv_cell(cell) for cell in row] for row in found.csv_rows])
        case "html":
            print(report_page(found, command))
        case _:
            screen = terminal()
            tail = [screen.paint(f"next: {found.next_command}", "dim")] if found.next_command else []
            print("\n".join([*found.lines(screen), *map(strip_control, found.notes), *tail]))


def report_page(found: ReportTable, command: str) -> str:
    """Return the report as an HTML page that needs no other file."""
    from phalanx.cli.figure_page import build_figure_page

    shown = [
        index for index, column in enumerate(found.columns) if not column.hide_empty or any(_filled(found.rows, index))
    ]
    heads = "".join(f'<th scope="col">{escape(found.columns[index].title)}</th>' for index in shown)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_text(row[index]))}</td>' for index in shown)}</tr>" for row in found.rows
    )
    notes = "".join(f"<p>{escape(strip_control(note))}</p>" for note in found.notes)
    return build_figure_page(
        [(found.title, _chart(*found.bars))] if found.bars[1] else (),
        title=found.title,
        lead=f"From {utc_text(found.since_s)} to {utc_text(found.until_s)}.",
        command=command,
        table=f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>" if found.rows else "",
        texts=notes if found.rows else f"<p>{escape(found.empty)}</p>{notes}",
    )


def _chart(axis: str, bars: Sequence[tuple[str, Mapping[str, float]]]) -> Chart:
    """One stacked bar for each of the first rows, the first on top."""
    from phalanx.cli.figure_files import Chart, colour, legend, series_colour, style_axes

    shown = [(truncate(strip_control(name), _NAME_CHARS), parts) for name, parts in bars[:_BARS_MAX]][::-1]
    series = list(dict.fromkeys(part for _, parts in bars[:_BARS_MAX] for part in parts))

    def plot(axes: Axes) -> None:
        places = range(len(shown))
        left = [0.0] * len(shown)
        for number, part in enumerate(series):
            widths = [parts.get(part, 0.0) for _, parts in shown]
            axes.barh(places, widths, left=left, height=0.62, color=colour(series_colour(number)))
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.set_yticks(places, [name for name, _ in shown])
        style_axes(axes)
        axes.set_xlabel(axis)
        legend(axes, [(part, series_colour(number)) for number, part in enumerate(series)])

    return Chart(plot, height=90.0 + 30.0 * len(shown), left=170.0)


def _filled(rows: Sequence[Sequence[Cell | str]], index: int) -> list[bool]:
    return [bool(_text(row[index])) for row in rows]


def _text(cell: Cell | str) -> str:
    return strip_control(cell.text if isinstance(cell, Cell) else cell)


def _csv_cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula: names of jobs and users may begin with anything."""
    text = strip_control(text)
    return f"'{text}" if text[:1] in ("=", "+", "@", "\t") or (text[:1] == "-" and not _is_number(text)) else text


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal()
