"""Reports of gateways."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.people import check_name
from phalanx.api.runtime import runtime_of
from phalanx.core.work.users import Action
from phalanx.wire.api.gateways import DemandReport, LimitShares

routes = RouteTable()


@routes.post("/v1/gateways/{gateway_id}/demand", Action.OPERATE, body=DemandReport, reply=LimitShares)
async def report_demand(request: Request, gateway_id: str) -> Response:
    """Report what was asked of limits at a gateway, once a second; returns its shares of them."""
    runtime = runtime_of(request)
    body = await read_record(request, DemandReport, runtime.services.limits.body_bytes)
    now_s = runtime.services.clock.boottime_s()
    count, even, shares = runtime.gateway_demands.report(check_name(gateway_id, "gateway"), body.demand, now_s)
    return json_response(LimitShares(gateways=count, even=even, shares=shares))
