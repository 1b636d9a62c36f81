"""Read the table of failure rules: the cause and the remedy for each failure sign, each row with its source. The head reads it at start.

The rules of an operator (`phalanx rules apply`) precede these; a rule with the same name replaces the shipped one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.recovery.rules import Rule, rule_from
from phalanx.facts.files import shipped_text
from phalanx.facts.table import Columns, Row, named_of

COLUMNS: Final = Columns(
    needed=("name", "blame", "remedy"),
    free=("codes", "signals", "xids", "pattern", "oom", "cause", "charge", "weight", "says"),
)
_NUMBERS: Final = ("codes", "xids")


@cache
def shipped_rules() -> tuple[Rule, ...]:
    """Return the shipped rules, in their order.

    Raises:
        BadFile: the table is invalid; line and column are named.
    """
    return rules_in(shipped_text("failures.csv"), "failures.csv")


def rules_in(text: str, where: str) -> tuple[Rule, ...]:
    """Return the rules in the text of a table.

    Raises:
        BadFile: as for `shipped_rules`.
    """
    return named_of(text, where, COLUMNS, _entry, lambda rule: rule.name)


def _entry(row: Row) -> Rule:
    value: dict[str, Any] = {name: row.text(name) for name in ("name", "blame", "remedy", "pattern", "cause", "says")}
    for column in _NUMBERS:
        value[column] = [_whole(row, column, word) for word in row.words(column)]
    value["signals"] = [
        word.upper() if word.startswith("sig") else _whole(row, "signals", word) for word in row.words("signals")
    ]
    value["oom"] = row.truth("oom")
    value["weight"] = row.number("weight", default=0.0)
    if row.text("charge"):
        value["charge"] = row.text("charge")
    try:
        rule = rule_from(value, f"{row.where} line {row.line}")
    except BadRequest as error:
        raise row.wrong("name", error.message, hint=error.hint) from None
    fact = row.fact()
    return replace(rule, source=fact.source, date=fact.date)


def _whole(row: Row, column: str, word: str) -> int:
    if not word.isdecimal():
        raise row.wrong(column, f"{word!r} is not a whole number", hint="separate several numbers by semicolons")
    return int(word)
