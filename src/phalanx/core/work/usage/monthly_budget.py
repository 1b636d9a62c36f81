"""What a project may cost in a month (UTC), in the currency of the prices. It warns, and ends renting; it stops no job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

WARN_AT: Final = (80, 100)
"""Percent of a budget at which the head writes a history line, once a month each."""
_BUDGET: Final = re.compile(r"(\d{1,12})(?:\.(\d{1,2}))?\s*([A-Z]{3})\s*(?:/|per)\s*month", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlyBudget:
    """An amount for each month, in hundredths of a currency (ISO 4217)."""

    cents: int
    currency: str

    def __str__(self) -> str:
        """`5000 EUR/month`, as it is typed."""
        return f"{cents_text(self.cents).removesuffix('.00')} {self.currency}/month"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetWarning:
    """So many percent of the budget of a month, such as 2026-11, are spent, and the history has a line on it."""

    month: str
    percent: int


def parse_budget(text: str) -> MonthlyBudget:
    """Parse `5000 EUR/month`.

    Raises:
        BadRequest: it is not an amount with a currency for a month, or nothing at all.
    """
    found = _BUDGET.fullmatch(text.strip())
    cents = 0 if found is None else int(found[1]) * 100 + int((found[2] or "").ljust(2, "0"))
    if found is None or not cents:
        raise BadRequest(f"budget: {text[:60]!r} is not a budget", hint='write "5000 EUR/month"')
    return MonthlyBudget(cents=cents, currency=found[3])


def cents_text(cents: int) -> str:
    """Hundredths of a currency as a decimal number."""
    sign, cents = "-" if cents < 0 else "", abs(cents)
    return f"{sign}{cents // 100}.{cents % 100:02d}"
