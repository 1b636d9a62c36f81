"""Read the table of failure rules: the cause and the remedy for each failure sign, each row with its source. The head reads it at start.

The rules of an operator (`phalanx rules apply`) precede these; a rule with the same name replaces the shipped one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.recovery.failure_rules import FailureRule, parse_rule
from phalanx.planner.facts.table import TableColumns, TableRow, read_named_records
from phalanx.planner.facts.table_files import shipped_text

COLUMNS: Final = TableColumns(
    required=("name", "blame", "remedy"),
    optional=("codes", "signals", "xids", "pattern", "oom", "cause", "charge", "weight", "says"),
)
_NUMBERS: Final = ("codes", "xids")


@cache
def shipped_rules() -> tuple[FailureRule, ...]:
    """Return the shipped rules, in their order.

    Raises:
        BadFile: the table is invalid; line and column are named.
    """
    return parse_failure_rules(shipped_text("failures.csv"), "failures.csv")


def parse_failure_rules(text: str, where: str) -> tuple[FailureRule, ...]:
    """Return the rules in the text of a table.

    Raises:
        BadFile: as for `shipped_rules`.
    """
    return read_named_records(text, where, COLUMNS, _entry, lambda rule: rule.name)


def _entry(row: TableRow) -> FailureRule:
    value: dict[str, Any] = {name: row.text(name) for name in ("name", "blame", "remedy", "pattern", "cause", "says")}
    for column in _NUMBERS:
        value[column] = [_whole(row, column, word) for word in row.words(column)]
    value["signals"] = [
        word.upper() if word.startswith("sig") else _whole(row, "signals", word) for word in row.words("signals")
    ]
    value["oom"] = row.boolean("oom")
    value["weight"] = row.number("weight", default=0.0)
    if row.text("charge"):
        value["charge"] = row.text("charge")
    try:
        rule = parse_rule(value, f"{row.where} line {row.line}")
    except BadRequest as error:
        raise row.error("name", error.message, hint=error.hint) from None
    fact = row.fact()
    return replace(rule, source=fact.source, date=fact.date)


def _whole(row: TableRow, column: str, word: str) -> int:
    if not word.isdecimal():
        raise row.error(column, f"{word!r} is not a whole number", hint="separate several numbers by semicolons")
    return int(word)
