"""The page Use and waste: what the usage report and the list of waste say, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.money.cost import price_book, project_budgets
from phalanx.api.routes.money.usage import UsageBucket
from phalanx.api.routes.money.waste import waste_view
from phalanx.api.runtime import runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.turns import in_turn
from phalanx.api.views.failures import failures_by_node
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.accounting.cost_report import CostKey, CostRow, IdleRule, Metered, cost_rows, meter, meter_by_period
from phalanx.core.accounting.project_spending import first_hour_s
from phalanx.core.accounting.usage_report import UsageKey, sum_by_period, sum_usage
from phalanx.core.errors import BadRequest
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.core.work.usage.waste_terms import WASTE_STATES
from phalanx.core.work.users import Action
from phalanx.web.html import Html
from phalanx.web.use_page import Costs, Use, UseAsked, use_page
from phalanx.wire.api.cost import BudgetView

DAYS: Final = (1, 7, 30, 90)
HOURLY_UP_TO: Final = 2  # days; more are shown by day
ROWS_MAX: Final = 20  # of each table
MONTH_FROM: Final = 30  # days: so many touch all hours of a month, so that its spending costs no more reading
JOBS_MAX: Final = 1000  # that are read for the failures of nodes: 30 ms in all on SQLite

routes = RouteTable()


@routes.get("/use", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_use(request: Request, days: int = 30, by: UsageKey = UsageKey.USER) -> Response:
    """Show GPU-hours by state and money by project over time, waste now, and the largest wasters and failing nodes of a period."""
    if days not in DAYS:
        raise BadRequest(f"days: {days} is not one", hint=f"use one of {', '.join(map(str, DAYS))}")
    services, viewer = runtime_of(request).services, viewer_of(request)
    asked = UseAsked(days=days, by=by.value, hourly=days <= HOURLY_UP_TO)

    def read() -> Html:
        now_s = services.clock.now_s()
        period = LedgerPeriod(max(0.0, now_s - days * 86400.0), None)
        months = days >= MONTH_FROM
        first_s, _ = period.bounds_s(now_s)
        read = LedgerPeriod(min(period.since_s, first_hour_s(now_s)), None) if months else period
        every = list(read.hours(services))
        hours = [hour for hour in every if int(hour.id) >= first_s]
        bucket = UsageBucket.HOUR if asked.hourly else UsageBucket.DAY
        failed = sum_usage(hours, UsageKey.JOB, rows_max=ROWS_MAX, first=frozenset({"lost"})).rows
        nodes, is_cut = failures_by_node(services, *period.bounds_s(now_s), jobs_max=JOBS_MAX)
        use = Use(
            series=sum_by_period(hours, bucket.seconds),
            wasters=sum_usage(hours, by, rows_max=ROWS_MAX, first=frozenset(WASTE_STATES)),
            failed=[one for one in failed if not one.merged],
            waste=waste_view(services.waste(), {}, None, early=True, limit=ROWS_MAX),
            costs=_costs(services, hours, bucket.seconds),
            spending=_spending(services, every) if months else None,
            nodes=[(one.node, one.failures, one.jobs) for one in nodes[:ROWS_MAX]],
            nodes_of_jobs=JOBS_MAX if is_cut else None,
        )
        return use_page(asked, use, DAYS, [one.value for one in UsageKey], viewer)

    return page_response(request, await in_turn(read))


def _spending(services: HeadServices, hours: Sequence[UsageHour]) -> list[BudgetView]:
    """Return what projects spent this month, the most used budget first; nothing without prices."""
    found = project_budgets(services, services.store.projects(), hours)
    spent = [one for one in found if one.currency and (one.spent_cents or one.budget)]
    return sorted(spent, key=lambda one: (-(one.percent or 0), -one.spent_cents, one.project))


def _costs(services: HeadServices, hours: Sequence[UsageHour], period_s: int) -> Costs | None:
    """Return what projects cost; None without prices."""
    currency, book = price_book(services)
    if not currency:
        return None

    def by_project(found: Metered) -> list[CostRow]:
        return cost_rows(found, CostKey.PROJECT, IdleRule.NONE, quotas={}, rows_max=ROWS_MAX)

    periods = [(since_s, by_project(found)) for since_s, found in meter_by_period(hours, book, period_s)]
    return Costs(currency=currency, rows=by_project(meter(hours, book)), series=periods)
