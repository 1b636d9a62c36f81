"""Gateways report the load of services, which the number of replicas follows."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.access.caller import Caller, may_access_job
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import ServiceId
from phalanx.core.state.records import SERVICES
from phalanx.core.state.reports import LoadObserved
from phalanx.core.work.users import Action
from phalanx.ports.store import Store
from phalanx.wire.api.gateway import LoadReply, LoadReport

routes = RouteTable()


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
