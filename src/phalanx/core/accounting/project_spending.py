"""What projects have spent in the month (UTC), and a forecast of its end.

The forecast is what was spent, plus the larger of two amounts for the rest of the month: what the project costs if it goes on as in the last
seven days, and what its running jobs cost until their time limits (or the end of the month) at the prices of now.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.accounting.cost_report import priced, to_cents
from phalanx.core.months import DAY_S, month_bounds_s, month_of
from phalanx.core.work.usage.price_list import HOUR_S, PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour

WINDOW_S: Final = 7 * DAY_S
"""A week has the same mix of workdays and weekends as the next one."""
_US_PER_MILLI_S: Final = 1000  # GPU-microseconds of a thousandth of a GPU in a second


class ForecastMethod(enum.StrEnum):
    """Which amount the forecast adds for the rest of the month: the larger one."""

    RUN_RATE = "at the rate of the last 7 days"
    RUNNING_JOBS = "if its running jobs run to their time limits, or to the month's end"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningUse:
    """What a running job holds of one GPU model in one pool. `until_s`: its time limit in Unix seconds; None for none."""

    project: str
    model: str
    pool: str
    milli: int
    until_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSpending:
    """A project in a month; amounts are hundredths of the currency."""

    project: str
    month: str
    spent_cents: int
    forecast_cents: int
    method: ForecastMethod


def first_hour_s(now_s: float) -> int:
    """From which Unix second `project_spending` needs the hours of the ledger."""
    return min(month_bounds_s(month_of(now_s))[0], int(now_s) - WINDOW_S)


def project_spending(
    hours: Iterable[UsageHour], book: PriceBook, running: Iterable[RunningUse], *, now_s: float
) -> dict[str, ProjectSpending]:
    """The spending of each project that has used or holds a GPU. `hours`: from `first_hour_s` on, in the order of time."""
    month = month_of(now_s)
    spent: dict[str, int] = {}
    recent: dict[str, int] = {}
    window_begin_s = int(now_s - WINDOW_S) // HOUR_S * HOUR_S
    counted_from_s: int | None = None
    for hour in hours:
        hour_s = int(hour.id)
        costs = project_costs(hour, book)
        if month_of(hour_s) == month:
            _add(spent, costs)
        if hour_s >= window_begin_s:
            counted_from_s = hour_s if counted_from_s is None else counted_from_s
            _add(recent, costs)
    end_s = month_bounds_s(month)[1]
    left_s, window_s = max(0, int(end_s - now_s)), max(1, int(now_s) - (counted_from_s or 0))
    held = _running_costs(running, book, now_s, end_s)
    return {
        project: _forecast(project, month, spent.get(project, 0), recent.get(project, 0) * left_s // window_s, held)
        for project in sorted({*spent, *recent, *held})
        if project
    }


def project_costs(hour: UsageHour, book: PriceBook) -> dict[str, int]:
    """The exact cost of each project in one hour, in units of `cost_report.CENT`."""
    found: dict[str, int] = {}
    for row in hour.rows:
        if row.project:
            exact = priced(row, book.price(row.model, row.pool, int(hour.id))).exact
            found[row.project] = found.get(row.project, 0) + exact
    return found


def _forecast(project: str, month: str, spent: int, by_rate: int, held: Mapping[str, int]) -> ProjectSpending:
    by_jobs = held.get(project, 0)
    return ProjectSpending(
        project=project,
        month=month,
        spent_cents=to_cents(spent),
        forecast_cents=to_cents(spent + max(by_rate, by_jobs)),
        method=ForecastMethod.RUNNING_JOBS if by_jobs > by_rate else ForecastMethod.RUN_RATE,
    )


def _running_costs(running: Iterable[RunningUse], book: PriceBook, now_s: float, end_s: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in running:
        price = book.price(use.model, use.pool, int(now_s) // HOUR_S * HOUR_S)
        until_s = end_s if use.until_s is None else min(end_s, use.until_s)
        gpu_us = use.milli * _US_PER_MILLI_S * max(0, int(until_s - now_s))
        found[use.project] = found.get(use.project, 0) + (0 if price is None else gpu_us * price.micro)
    return found


def _add(sums: dict[str, int], costs: Mapping[str, int]) -> None:
    for project, exact in costs.items():
        sums[project] = sums.get(project, 0) + exact
