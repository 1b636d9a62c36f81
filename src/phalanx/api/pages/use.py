"""The page Use and waste: what the usage report and the list of waste say, as HTML."""

from __future__ import annotations

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.cost import price_book
from phalanx.api.routes.usage import UsageBucket
from phalanx.api.routes.waste import waste_view
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.turns import in_turn
from phalanx.api.views.failures import failed_attempts
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.accounting.cost_report import CostKey, CostRow, IdleRule, Metered, cost_rows, meter, meter_by_period
from phalanx.core.accounting.failure_report import FailedAttempt, FailureKey, sum_failures
from phalanx.core.accounting.usage_report import UsageKey, sum_by_period, sum_usage
from phalanx.core.errors import BadRequest
from phalanx.core.work.users import Action
from phalanx.core.work.waste_terms import WASTE_STATES
from phalanx.web.html import Html
from phalanx.web.use_page import Costs, Use, UseAsked, use_page

DAYS: Final = (1, 7, 30, 90)
HOURLY_UP_TO: Final = 2  # days; more are shown by day
ROWS_MAX: Final = 20  # of each table

routes = RouteTable()


@routes.get("/use", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_use(request: Request, days: int = 30, by: UsageKey = UsageKey.USER) -> Response:
    """Show GPU-hours by state and money by project over time, waste now, and the largest wasters and failing nodes of a period."""
    if days not in DAYS:
        raise BadRequest(f"days: {days} is not one", hint=f"use one of {', '.join(map(str, DAYS))}")
    runtime, viewer = runtime_of(request), viewer_of(request)
    services = runtime.services
    asked = UseAsked(days=days, by=by.value, hourly=days <= HOURLY_UP_TO)
    bucket = UsageBucket.HOUR if asked.hourly else UsageBucket.DAY
    period = LedgerPeriod(max(0.0, services.clock.now_s() - days * 86400.0), None)

    def read_costs() -> tuple[Costs, Metered]:
        currency, book = price_book(services)
        hours = list(period.hours(services))
        metered = meter(hours, book)

        def by_project(found: Metered) -> list[CostRow]:
            return cost_rows(found, CostKey.PROJECT, IdleRule.NONE, quotas={}, rows_max=ROWS_MAX)

        periods = [(since_s, by_project(found)) for since_s, found in meter_by_period(hours, book, bucket.seconds)]
        return Costs(currency=currency, rows=by_project(metered), series=periods), metered

    def read(costs: Costs, attempts: list[FailedAttempt]) -> Html:
        hours = list(period.hours(services))
        failed = sum_usage(hours, UsageKey.JOB, rows_max=ROWS_MAX, first=frozenset({"lost"})).rows
        use = Use(
            series=sum_by_period(hours, bucket.seconds),
            wasters=sum_usage(hours, by, rows_max=ROWS_MAX, first=frozenset(WASTE_STATES)),
            failed=[one for one in failed if not one.merged],
            waste=waste_view(services.waste(), {}, None, early=True, limit=ROWS_MAX),
            costs=costs,
            nodes=sum_failures(attempts, FailureKey.NODE, rows_max=ROWS_MAX)[0],
        )
        return use_page(asked, use, DAYS, [one.value for one in UsageKey], viewer)

    costs, metered = await run_in_thread(read_costs)
    attempts, _ = await failed_attempts(runtime, *period.bounds_s(services.clock.now_s()), metered)
    return page_response(request, await in_turn(partial(read, costs, attempts)))
