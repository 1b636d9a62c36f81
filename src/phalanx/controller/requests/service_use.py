"""Requests that record the use of services, by gateways and by batches."""

from __future__ import annotations

from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.state.events import RecordBatchUse, RecordServiceUse
from phalanx.core.state.records import GATEWAY_MARKS
from phalanx.core.work.services.service_use import KEPT_S, GatewayMark
from phalanx.core.work.users import Action

handlers: Final = RequestHandlers()


@handlers.add(
    RecordServiceUse,
    Action.OPERATE,
    audit=lambda request, _: f"use of services up to report {request.sequence} of gateway {request.gateway_id}",
)
def record_service_use(context: StepContext, request: RecordServiceUse) -> int:
    """Replace the hours, unless a report with this number is counted already. Returns the number up to which reports are counted."""
    marks = context.world.table(GATEWAY_MARKS)
    known = marks.get(request.gateway_id)
    if known is not None and known.sequence >= request.sequence:
        return known.sequence
    for hour in request.hours:
        context.change.put(hour)
    now_s = context.now.wall_s
    context.change.put(GatewayMark(id=request.gateway_id, sequence=request.sequence, at_s=now_s))
    for mark in [one for one in marks.values() if now_s - one.at_s > KEPT_S and one.id != request.gateway_id]:
        context.change.remove(GATEWAY_MARKS, mark.id)
    return request.sequence


@handlers.add(
    RecordBatchUse, None, audit=lambda request, _: f"use of services by batches in {len(request.hours)} hours"
)
def record_batch_use(context: StepContext, request: RecordBatchUse) -> None:
    """Replace the hours."""
    for hour in request.hours:
        context.change.put(hour)
