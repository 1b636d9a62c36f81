"""The energy report: what the GPUs of the fleet drew, for whom, what it cost, and its CO2."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.money.prices import electricity_views
from phalanx.api.routes.money.usage import HOUR_US, ROWS_MAX
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.accounting.energy_report import KWH_MJ, EnergySum, sum_energy
from phalanx.core.accounting.usage_report import UsageKey
from phalanx.core.state.records import PRICE_LISTS
from phalanx.core.work.usage.price_list import PRICES, micro_text
from phalanx.core.work.users import Action
from phalanx.wire.api.energy import EnergyReportView, EnergyRowView

routes = RouteTable()


@routes.get("/v1/energy", Action.VIEW, reply=EnergyReportView)
async def energy_report(
    request: Request,
    since_s: Annotated[float, Query(ge=0, le=1e11)],
    until_s: Annotated[float | None, Query(ge=0, le=1e11)] = None,
    by: UsageKey = UsageKey.PROJECT,
    limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_MAX,
) -> Response:
    """Report the energy of GPUs in the hours that a period of Unix times touches; all rows add up to what the devices counted."""
    period = LedgerPeriod(since_s, until_s)
    return json_response(await run_in_thread(_report, runtime_of(request).services, period, by, limit))


def _report(services: HeadServices, period: LedgerPeriod, by: UsageKey, limit: int) -> EnergyReportView:
    known = services.store.record(PRICE_LISTS, PRICES)
    rates = () if known is None else known.electricity
    found = sum_energy(period.hours(services), by, rates, rows_max=limit)
    since_s, until_s = period.bounds_s(services.clock.now_s())
    return EnergyReportView(
        by=by.value,
        since_s=since_s,
        until_s=until_s,
        rows=[_row(one) for one in found.rows],
        total=_row(found.total),
        metered_mj=found.metered_mj,
        currency="" if known is None else known.currency,
        rates=electricity_views(found.rates),
        unpriced_kwh=found.total.unpriced_mj / KWH_MJ,
        unrated_kwh=found.total.unrated_mj / KWH_MJ,
    )


def _row(one: EnergySum) -> EnergyRowView:
    cost_micro = one.cost_micro
    return EnergyRowView(
        key=one.key,
        kwh=one.millijoules / KWH_MJ,
        counter_mj=one.counter_mj,
        integrated_mj=one.integrated_mj,
        mean_w=one.mean_w,
        gpu_hours=one.gpu_us / HOUR_US,
        unknown_gpu_hours=one.unknown / HOUR_US,
        cost=None if cost_micro is None else micro_text(cost_micro),
        gco2=one.gco2,
        merged=one.merged,
        throttled={cause: amount / HOUR_US for cause, amount in sorted(one.throttled.items())},
    )
