"""Reports of gateways."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.access.people import check_name
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.api.views.service_use import added_hour, is_countable
from phalanx.api.views.token_report import token_report
from phalanx.core.access.caller import Caller, may_access_job
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import ServiceId
from phalanx.core.state.events import RecordServiceUse
from phalanx.core.state.records import GATEWAY_MARKS, SERVICES
from phalanx.core.state.reports import LoadObserved
from phalanx.core.work.users import Action
from phalanx.ports.store import Store
from phalanx.wire.api.cost import TokenReportView
from phalanx.wire.api.gateways import DemandReport, LimitShares, LoadReply, LoadReport, UsageReceipt, UsageReport

Since = Annotated[float, Query(ge=0, le=1e11)]
Until = Annotated[float | None, Query(ge=0, le=1e11)]
USES_MAX: Final = 20_000  # of one hour: the record is written as a whole
routes = RouteTable()


@routes.post("/v1/gateways/{gateway_id}/demand", Action.OPERATE, body=DemandReport, reply=LimitShares, transient=True)
async def report_demand(request: Request, gateway_id: str) -> Response:
    """Report what was asked of limits at a gateway, once a second; returns its shares of them."""
    runtime = runtime_of(request)
    body = await read_record(request, DemandReport, runtime.services.limits.body_bytes)
    now_s = runtime.services.clock.boottime_s()
    count, even, shares = runtime.gateway_demands.report(check_name(gateway_id, "gateway"), body.demand, now_s)
    return json_response(LimitShares(gateways=count, even=even, shares=shares))


@routes.post("/v1/gateways/{gateway_id}/usage", Action.OPERATE, body=UsageReport, reply=UsageReceipt)
async def report_usage(request: Request, gateway_id: str) -> Response:
    """Report what a gateway has counted of services. A report whose number is counted already changes nothing.

    Gateways report every six seconds while they are used: one line an hour in the audit trail says that they do.
    """
    runtime = runtime_of(request)
    services = runtime.services
    body = await read_record(request, UsageReport, services.limits.body_bytes)
    name, now_s = check_name(gateway_id, "gateway"), services.clock.now_s()
    with runtime.hourly_calls.serving():
        async with runtime.service_use_lock:  # reports of other gateways change the same hours
            known = await run_in_thread(services.store.record, GATEWAY_MARKS, name)
            if known is not None and known.sequence >= body.sequence:
                return json_response(UsageReceipt(sequence=known.sequence))
            counted = [one for one in body.hours if is_countable(one.id, now_s)]
            hours = await run_in_thread(lambda: tuple(added_hour(services.store, one, USES_MAX) for one in counted))
            sequence = await runtime.request(RecordServiceUse(gateway_id=name, sequence=body.sequence, hours=hours))
    return json_response(UsageReceipt(sequence=sequence, ignored=len(body.hours) - len(counted)))


@routes.get("/v1/token-usage", Action.VIEW, reply=TokenReportView)
async def report_tokens(request: Request, since_s: Since, until_s: Until = None) -> Response:
    """Report requests, tokens and cost of services in a period, by service and project."""
    return json_response(
        await run_in_thread(token_report, runtime_of(request).services, LedgerPeriod(since_s, until_s))
    )


# Transient: decisions are in the history, and a line in the audit trail each second would be a commit each second.
@routes.post(
    "/v1/gateways/load",
    Action.CHANGE_OWN,
    body=LoadReport,
    reply=LoadReply,
    scope=AccessScope.UNOWNED,
    transient=True,
)
async def report_load(request: Request) -> Response:
    """Report the load of services at a gateway, once a second. Figures of services that the caller may not change are ignored."""
    runtime = runtime_of(request)
    body = await read_record(request, LoadReport, runtime.services.limits.body_bytes)
    caller, store = caller_of(request), runtime.services.store
    taken = {one.service: one.load() for one in body.services if _may_report(store, caller, one.service)}
    (answer,) = await runtime.report([LoadObserved(user=caller.user, gateway=body.gateway, loads=tuple(taken.items()))])
    if isinstance(answer, PhalanxError):
        raise answer
    ignored = sorted({one.service for one in body.services} - taken.keys())
    return json_response(LoadReply(ignored=ignored))


def _may_report(store: Store, caller: Caller, service_id: ServiceId) -> bool:
    service = store.record(SERVICES, service_id)
    return service is not None and may_access_job(
        caller, Action.CHANGE_OWN, owner=service.user, project=service.project
    )
