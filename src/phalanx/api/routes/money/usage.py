"""The usage report: what every GPU-second of the fleet was used for."""

from __future__ import annotations

import enum
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.access.caller import Caller
from phalanx.core.accounting.state_ledger import UsageSpan
from phalanx.core.accounting.usage_report import UsageKey, UsageSum, sum_by_period, sum_usage
from phalanx.core.accounting.usage_states import UsageState
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId
from phalanx.core.work.usage.waste_terms import WASTE_STATES
from phalanx.core.work.users import Action
from phalanx.wire.api.usage import (
    NodeUsageView,
    UsagePeriodView,
    UsageReportView,
    UsageRowView,
    UsageSpanView,
    UsageTotalView,
)

ROWS_MAX: Final = 1000  # in one answer: at most half a megabyte
HOUR_US: Final = 3_600_000_000
PERIODS_MAX: Final = 400  # of a series: a year by day, two weeks by hour
routes = RouteTable()


class UsageBucket(enum.StrEnum):
    """Length of the periods of a series."""

    HOUR = "hour"
    DAY = "day"

    @property
    def seconds(self) -> int:
        """The length."""
        return 3600 if self is UsageBucket.HOUR else 86_400

    def check(self, since_s: float, until_s: float) -> None:
        """Check the number of periods.

        Raises:
            BadRequest: there are too many.
        """
        if (until_s - since_s) / self.seconds > PERIODS_MAX:
            raise BadRequest(f"bucket: more than {PERIODS_MAX} {self}s", hint="use bucket=day, or a shorter period")


@routes.get("/v1/usage", Action.VIEW, reply=UsageReportView)
async def usage_report(
    request: Request,
    since_s: Annotated[float, Query(ge=0, le=1e11)],
    until_s: Annotated[float | None, Query(ge=0, le=1e11)] = None,
    by: UsageKey = UsageKey.PROJECT,
    label: str = "",
    limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_MAX,
    waste_first: bool = False,
    bucket: UsageBucket | None = None,
) -> Response:
    """Report the GPU-hours of the fleet by state, in the hours that a period of Unix times touches; they add up to fleet x time.

    With `label`, the jobs are grouped by their value of that label. The largest rows come first; with `waste_first`, those that waste most. `bucket` adds a series of the fleet by hour or day of UTC.
    """
    services, period = runtime_of(request).services, LedgerPeriod(since_s, until_s, label)
    by = UsageKey.JOB if label else by
    first = frozenset(WASTE_STATES) if waste_first else None
    if bucket is not None:
        bucket.check(*period.bounds_s(services.clock.now_s()))
    return json_response(await run_in_thread(_report, services, caller_of(request), period, by, limit, first, bucket))


@routes.get("/v1/nodes/{node_id}/usage", Action.VIEW, reply=NodeUsageView)
async def node_usage(request: Request, node_id: NodeId) -> Response:
    """Return what each device of a node was used for lately: its newest states, at most 64 and those of now."""
    return json_response(await run_in_thread(_node_usage, runtime_of(request).services, node_id))


def _node_usage(services: HeadServices, node_id: NodeId) -> NodeUsageView:
    spans = services.usage_spans(node_id)
    if not spans:
        raise NotFound(f"node {node_id} is not known", hint=Hint(HintCode.LIST_NODES))
    return NodeUsageView(node=node_id, spans=[_span(index, span) for index, span in spans])


def _span(index: int, span: UsageSpan) -> UsageSpanView:
    return UsageSpanView(
        device=index,
        job=span.key,
        milli=span.milli,
        state=span.state.state.value,
        note=span.state.note,
        begin_s=span.begin_ms / 1000,
        end_s=span.end_ms / 1000,
    )


def _report(
    services: HeadServices,
    caller: Caller,
    period: LedgerPeriod,
    by: UsageKey,
    limit: int,
    first: frozenset[str] | None,
    bucket: UsageBucket | None,
) -> UsageReportView:
    hours = period.hours_by(services, caller)
    counted = hours if bucket is None else list(hours)  # the series and the rows add up to the same
    found = sum_usage(counted, by, rows_max=limit, first=first)
    series = [] if bucket is None else sum_by_period(counted, bucket.seconds)
    since_s, until_s = period.bounds_s(services.clock.now_s())
    by_state_us = {state.value: found.total.by_state.get(state.value, 0) for state in UsageState}
    return UsageReportView(
        by=period.grouping(by.value),
        since_s=since_s,
        until_s=until_s,
        rows=[_row(one) for one in found.rows],
        total=UsageTotalView(
            fleet_gpu_hours=found.fleet / HOUR_US,
            fleet_gpu_us=found.fleet,
            by_state={state: amount / HOUR_US for state, amount in by_state_us.items()},
            by_state_us=by_state_us,
            by_note=_hours_by_note(found.total),
        ),
        series=[
            UsagePeriodView(since_s=one.since_s, fleet_gpu_us=one.fleet, by_state_us=one.by_state) for one in series
        ],
    )


def _row(one: UsageSum) -> UsageRowView:
    return UsageRowView(
        key=one.key,
        gpu_hours=one.total / HOUR_US,
        gpu_us=one.total,
        by_state={state: amount / HOUR_US for state, amount in one.by_state.items()},
        by_state_us=one.by_state,
        by_note=_hours_by_note(one),
        merged=one.merged,
    )


def _hours_by_note(one: UsageSum) -> dict[str, dict[str, float]]:
    return {state: {note: amount / HOUR_US for note, amount in notes.items()} for state, notes in one.by_note.items()}
