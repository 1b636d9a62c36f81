"""Compares what projects have spent in the month (UTC) with their budgets. The usage recorder calls it once a minute, on its thread."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.controller.usage.shared_hours import shared_hour
from phalanx.core.accounting.cost_report import CENT, to_cents
from phalanx.core.accounting.project_spending import project_costs
from phalanx.core.months import month_bounds_s, month_of
from phalanx.core.state.records import PRICE_LISTS, USAGE_HOURS
from phalanx.core.state.reports import BudgetReached
from phalanx.core.work.queue import Project
from phalanx.core.work.usage.monthly_budget import WARN_AT, BudgetWarning
from phalanx.core.work.usage.price_list import HOUR_S, PRICES, PriceBook, PriceList
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.ports.store import Store


class BudgetWatch:
    """See the module. Each stored hour is read once in a month, and again only if the prices change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._basis: tuple[str, PriceList] | None = None  # month and prices of the sums
        self._spent: dict[str, int] = {}
        self._counted: set[int] = set()

    def check(self, newest: Sequence[UsageHour], now_s: float) -> list[BudgetReached]:
        """The warnings that are due. `newest`: the hours that may still change; earlier ones are read from the store."""
        budgeted = [project for project in self._store.projects() if project.budget is not None]
        prices = self._store.record(PRICE_LISTS, PRICES) if budgeted else None
        if prices is None:
            return []
        month, book = month_of(now_s), PriceBook(prices.prices)
        if self._basis != (month, prices):
            self._basis, self._spent, self._counted = (month, prices), {}, set()
        begin_s, end_s = month_bounds_s(month)
        changing = {int(hour.id): hour for hour in newest if begin_s <= int(hour.id) < end_s}
        self._count_stored(begin_s, min([int(now_s) // HOUR_S * HOUR_S, *(int(hour.id) for hour in newest)]), book)
        spent = dict(self._spent)
        for hour in changing.values():
            _add(spent, shared_hour(self._store, hour), book)
        due = (_warning(project, spent.get(project.id, 0), month, prices.currency) for project in budgeted)
        return [one for one in due if one is not None]

    def _count_stored(self, begin_s: int, end_s: int, book: PriceBook) -> None:
        for hour_s in range(begin_s, end_s, HOUR_S):
            if hour_s not in self._counted:
                stored = self._store.record(USAGE_HOURS, str(hour_s))
                if stored is not None:
                    _add(self._spent, shared_hour(self._store, stored), book)
                self._counted.add(hour_s)


def _add(spent: dict[str, int], hour: UsageHour, book: PriceBook) -> None:
    for project, exact in project_costs(hour, book).items():
        spent[project] = spent.get(project, 0) + exact


def _warning(project: Project, exact: int, month: str, currency: str) -> BudgetReached | None:
    budget = project.budget
    if budget is None or budget.currency != currency:
        return None
    percent = max((level for level in WARN_AT if exact * 100 >= budget.cents * CENT * level), default=0)
    known = project.budget_warned
    if not percent or (known is not None and (known.month, known.percent) >= (month, percent)):
        return None
    warning = BudgetWarning(month=month, percent=percent)
    return BudgetReached(project_id=project.id, budget=budget, warning=warning, spent_cents=to_cents(exact))
