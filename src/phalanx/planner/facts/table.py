"""Read fact tables: CSV with a header, one fact per row, each with its source and date.

Validation is strict: a mistake is an error with line and column, never a silently wrong plan. Empty lines and lines that begin with #
are skipped.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import FactSource

E = TypeVar("E")

ROWS_MAX: Final = 10_000  # a price list of all cloud regions has a few thousand rows
_DATE: Final = re.compile(r"(20[0-9]{2})(?:-(0[1-9]|1[0-2])(?:-(0[1-9]|[12][0-9]|3[01]))?)?")
_DIGITS_MAX: Final = 18  # of a number in a list; far above any
_BOOLEANS: Final = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}
_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """The columns of a table: `required` ones must be filled in each row, `optional` ones may be empty. `source` and `date` are always required."""

    required: Sequence[str]
    optional: Sequence[str] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every column, in the order of the file."""
        return (*self.required, *self.optional, "source", "date")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of a table. Each method reads one column; its error names file, line and column."""

    where: str
    line: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return the text without surrounding spaces."""
        return self.values.get(column, "").strip()

    def number(self, column: str, *, least: float = 0.0, default: float | None = None) -> float:
        """Return a decimal number of at least `least`."""
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is not a number") from None
        if not math.isfinite(value) or value < least:
            raise self.error(column, f"{text} must be {least:g} or more")
        return value

    def integer(self, column: str, *, least: int = 0, default: int | None = None) -> int:
        """Return a whole number of at least `least`; also reads `1.3e9`."""
        value = self.number(column, least=least, default=default)
        if value != int(value):
            raise self.error(column, f"{self.text(column)} is not a whole number")
        return int(value)

    def integers(self, column: str) -> tuple[int, ...]:
        """Return the whole numbers between semicolons."""
        words = self.words(column)
        for word in words:
            if not word.isdecimal() or len(word) > _DIGITS_MAX:
                raise self.error(column, f"{word!r} is not a whole number")
        return tuple(int(word) for word in words)

    def boolean(self, column: str, *, default: bool = False) -> bool:
        """Return a boolean: 1, yes or true; 0, no or false."""
        text = self.text(column).lower()
        if not text:
            return default
        if text not in _BOOLEANS:
            raise self.error(column, f"{text!r} is neither 1 nor 0")
        return _BOOLEANS[text]

    def choice(self, column: str, known: Sequence[str]) -> str:
        """Return one of the known words; case is ignored."""
        word = self.text(column).lower()
        if word not in known:
            raise self.error(column, f"{word!r} is not one of {', '.join(known)}")
        return word

    def words(self, column: str) -> tuple[str, ...]:
        """Return the words between semicolons, in lower case."""
        return tuple(word.strip().lower() for word in self.text(column).split(";") if word.strip())

    def fact(self, source: str = "source", date: str = "date") -> FactSource:
        """Return the source and the date of the row."""
        return FactSource(source=self.text(source), date=self.date(date))

    def date(self, column: str = "date") -> str:
        """Return an ISO date: year, month or day."""
        text = self.text(column)
        if not is_date(text):
            raise self.error(column, f"{text!r} is not a date", hint="write 2026, 2026-11 or 2026-11-21")
        return text

    def error(self, column: str, what: str, *, hint: str = "") -> BadFile:
        """Return the error for a column."""
        return BadFile(f"{self.where} line {self.line}, column {column}: {what}", hint=hint)


def is_date(text: str) -> bool:
    """Return whether `text` is an ISO year, month or day of this century."""
    found = _DATE.fullmatch(text)
    if found is None:
        return False
    year, month, day = int(found[1]), int(found[2] or 1), int(found[3] or 1)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return day <= (28 if month == 2 and not leap else _DAYS[month - 1])


def read_rows(text: str, where: str, columns: TableColumns) -> tuple[TableRow, ...]:
    """Return the rows of a table, in its order.

    Raises:
        BadFile: an unknown, duplicate or missing column, a row of the wrong length, an empty required column, or no source or date.
    """
    reader = csv.reader(_lines(text), strict=True)
    header: list[str] | None = None
    rows: list[TableRow] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells) and len(cells) <= 1:
                continue
            if header is None:
                header = _header([cell.strip() for cell in cells], where, columns)
                continue
            row = _row(cells, header, where, reader.line_num)
            rows.append(_filled(row, columns))
            if len(rows) > ROWS_MAX:
                raise BadFile(f"{where}: more than {ROWS_MAX} rows")
    except csv.Error as error:
        raise BadFile(f"{where} line {reader.line_num}: {error}") from None
    if header is None:
        raise BadFile(f"{where}: no header", hint=f"the first line is {','.join(columns.all)}")
    return tuple(rows)


def read_named_records(
    text: str, where: str, columns: TableColumns, entry: Callable[[TableRow], E], name: Callable[[E], str]
) -> tuple[E, ...]:
    """Return the records of a table whose rows have unique names, in its order.

    Raises:
        BadFile: as for `read_rows` and `entry`, or a duplicate name.
    """
    entries: dict[str, E] = {}
    for row in read_rows(text, where, columns):
        one = entry(row)
        if name(one) in entries:
            raise row.error("name", f"{name(one)} is listed twice")
        entries[name(one)] = one
    return tuple(entries.values())


def merge_tables(shipped: Iterable[E], own: Iterable[Iterable[E]], key: Callable[[E], Hashable]) -> tuple[E, ...]:
    """Merge tables of a user into the shipped records: a record with a known key replaces that one, a new one is appended."""
    return tuple({key(one): one for table in (shipped, *own) for one in table}.values())


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of the file. Comments become empty lines, so that line numbers match the file."""
    for line in text.splitlines():
        yield "" if line.lstrip().startswith("#") else line + "\n"


def _header(names: list[str], where: str, columns: TableColumns) -> list[str]:
    for name in names:
        if name not in columns.all:
            hint = suggestion(name, columns.all, f"known: {', '.join(columns.all)}", form="{!r}")
            raise BadFile(f"{where} line 1: unknown column {name!r}", hint=hint)
        if names.count(name) > 1:
            raise BadFile(f"{where} line 1: column {name!r} is listed twice")
    missing = [name for name in (*columns.required, "source", "date") if name not in names]
    if missing:
        raise BadFile(
            f"{where} line 1: missing column {missing[0]!r}",
            hint=f"required: {', '.join(columns.required)}, source, date",
        )
    return names


def _row(cells: list[str], header: list[str], where: str, line: int) -> TableRow:
    if len(cells) != len(header):
        raise BadFile(
            f"{where} line {line}: {len(cells)} cells, but the header has {len(header)}",
            hint="put double quotes around a cell that contains a comma",
        )
    return TableRow(where=where, line=line, values=dict(zip(header, cells, strict=True)))


def _filled(row: TableRow, columns: TableColumns) -> TableRow:
    for name in columns.required:
        if not row.text(name):
            raise row.error(name, "is empty")
    if not row.text("source"):
        raise row.error("source", "is empty; every fact needs a source")
    if not row.text("date"):
        raise row.error("date", "is empty; every fact needs a date", hint="write 2026, 2026-11 or 2026-11-21")
    row.date()
    return row
