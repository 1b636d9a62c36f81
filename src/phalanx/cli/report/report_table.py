"""One report as a table, and its four forms: text, JSON, CSV and a self-contained HTML page."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from phalanx.cli.list_output import to_json
from phalanx.cli.report.period import utc_text
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal


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
        (),
        title=found.title,
        lead=f"From {utc_text(found.since_s)} to {utc_text(found.until_s)}.",
        command=command,
        table=f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>" if found.rows else "",
        texts=notes if found.rows else f"<p>{escape(found.empty)}</p>{notes}",
    )


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
