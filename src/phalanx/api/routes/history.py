"""The history of nodes, devices and jobs: how it was last night, last month, and in the course of a training. Answers are below 1 MB."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import numpy as np
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_job
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, NodeId
from phalanx.core.work.users import Action
from phalanx.ports.history import HistoryUnavailable
from phalanx.store.history.job_curves import CurvePoint, goodput
from phalanx.store.history.levels import DAY_S
from phalanx.store.history.metrics import DEVICE_METRICS, NODE_METRICS, Codes, Metric, decode, reasons_named
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.store.history.rollups import COUNT, MAXIMUM, MEAN, MINIMUM, Rollups
from phalanx.wire.api.history import Column, HistoryColumn, HistoryStatus, JobCurves, NodeHistory

_UNKNOWN_NODE_DEVICES: Final = 128  # of a node that is no longer known: at most, for the size of the answer
_DIGITS: Final = {"utilization": 4, "cpu_utilization": 4, "throttled": 4, "power_w": 1, "temperature_c": 1}

UnixTime = Annotated[float | None, Query(ge=0, le=1e11)]
Seconds = Annotated[float | None, Query(ge=1, le=1e9)]
routes = RouteTable()


@routes.get("/v1/history", Action.VIEW, reply=HistoryStatus)
async def history_status(request: Request) -> Response:
    """Show whether history is stored, and the space that it takes."""
    return json_response(await run_in_thread(_status, runtime_of(request).services))


@routes.get("/v1/history/devices", Action.VIEW, reply=NodeHistory)
async def device_history(
    request: Request,
    node: str = "",
    device: Annotated[int | None, Query(ge=0, le=65_535)] = None,
    since_s: UnixTime = None,
    until_s: UnixTime = None,
    step_s: Seconds = None,
) -> Response:
    """Return utilization, memory, power, temperature and throttling of a node's devices, or their mean over the fleet. The default is a day."""
    services = runtime_of(request).services
    span = _span(services, since_s, until_s)
    return json_response(await run_in_thread(_device_history, services, NodeId(node), device, span, step_s))


@routes.get("/v1/history/nodes", Action.VIEW, reply=NodeHistory)
async def node_history(
    request: Request,
    node: str = "",
    since_s: UnixTime = None,
    until_s: UnixTime = None,
    step_s: Seconds = None,
) -> Response:
    """Return CPU, memory and network of a node, or their mean over the fleet. The default is a day."""
    services = runtime_of(request).services
    span = _span(services, since_s, until_s)
    return json_response(await run_in_thread(_node_history, services, NodeId(node), span, step_s))


@routes.get("/v1/jobs/{job_id}/history", Action.VIEW, reply=JobCurves)
async def job_curves(request: Request, job_id: JobId) -> Response:
    """Return loss, step time and goodput of a job, in at most 256 points that keep spikes visible."""
    services = runtime_of(request).services
    require_job(services.store, job_id)
    return json_response(await run_in_thread(_job_curves, services, job_id))


def _status(services: HeadServices) -> HistoryStatus:
    found = _recorder(services).health()
    return HistoryStatus(problem=found.problem, size_bytes=found.size_bytes, stored_s=found.stored_s, lost=found.lost)


def _recorder(services: HeadServices) -> HistoryRecorder:
    if services.history is None:
        raise HistoryUnavailable("this head records no history")
    return services.history


def _span(services: HeadServices, since_s: float | None, until_s: float | None) -> tuple[float, float]:
    """The span that is asked for.

    Raises:
        BadRequest: it ends before it begins.
    """
    now_s = services.clock.now_s()
    end_s = now_s if until_s is None else until_s
    begin_s = end_s - DAY_S if since_s is None else since_s
    if end_s <= begin_s:
        raise BadRequest("until_s is not later than since_s", hint="give a span of time in Unix seconds")
    return begin_s, end_s


def _device_history(
    services: HeadServices, node: NodeId, device: int | None, span: tuple[float, float], step_s: float | None
) -> NodeHistory:
    if not node and device is not None:
        raise BadRequest("device without a node", hint="give the node too: ?node=NODE&device=0")
    known = _device_count(services, node)
    found = _recorder(services).rollups(node or None, *span, step_s, devices=known or _UNKNOWN_NODE_DEVICES)
    columns = []
    for number, index in enumerate(found.devices):
        if device in (None, index):
            first = len(NODE_METRICS) + number * len(DEVICE_METRICS)
            columns += _columns(found, first, DEVICE_METRICS, index if node else None)
    _require_some(node, known, columns)
    return _reply(node, found, columns)


def _node_history(services: HeadServices, node: NodeId, span: tuple[float, float], step_s: float | None) -> NodeHistory:
    known = _device_count(services, node)
    found = _recorder(services).rollups(node or None, *span, step_s, devices=1)
    columns = _columns(found, 0, NODE_METRICS, None)
    _require_some(node, known, columns)
    return _reply(node, found, columns)


def _device_count(services: HeadServices, node: NodeId) -> int | None:
    """The number of devices of a node; None if it is not known, or no longer."""
    if not node:
        return 1
    return next((max(1, len(one.devices)) for one in services.store.nodes() if one.id == node), None)


def _require_some(node: NodeId, known: int | None, columns: list[HistoryColumn]) -> None:
    if known is None and not columns:
        raise NotFound(f"no node {node!r}, and no history of one in this span", hint=Hint(HintCode.LIST_NODES))


def _reply(node: NodeId, found: Rollups, columns: list[HistoryColumn]) -> NodeHistory:
    points = int(found.cells_FRT.shape[2])
    return NodeHistory(node=node, begin_s=found.begin_s, step_s=found.step_s, points=points, columns=columns)


def _columns(found: Rollups, first: int, metrics: tuple[Metric, ...], device: int | None) -> list[HistoryColumn]:
    cells = found.cells_FRT[:, first : first + len(metrics)]
    known = cells[COUNT].sum(axis=1) > 0
    mean, least, most = (decode(cells[field], metrics) for field in (MEAN, MINIMUM, MAXIMUM))
    return [
        HistoryColumn(
            metric=metric.name,
            device=device,
            mean=_column(mean[row], metric),
            min=[] if metric.reasons else _column(least[row], metric),
            max=[] if metric.reasons else _column(most[row], metric),
            reasons=_reasons(cells[MAXIMUM, row]) if metric.reasons else {},
        )
        for row, metric in enumerate(metrics)
        if known[row]
    ]


def _column(values: Any, metric: Metric) -> Column:
    digits = _DIGITS.get(metric.name)
    rounded = np.round(values, digits or 0).tolist()
    whole = digits is None
    return [None if math.isnan(value) else int(value) if whole else value for value in rounded]


def _reasons(codes: Codes) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for point in np.flatnonzero(codes > 0).tolist():
        for reason in reasons_named(int(codes[point])):
            found.setdefault(reason, []).append(point)
    return found


def _job_curves(services: HeadServices, job_id: JobId) -> JobCurves:
    curve = _recorder(services).job_curve(job_id)
    points = [] if curve is None else curve.points
    now_s = services.clock.now_s()
    attempts = services.store.attempts(job_id)
    held = [(one.placed_s, now_s if one.ended_s is None else one.ended_s) for one in attempts]

    def column(name: str) -> Column:
        return [_number(getattr(point, name)) for point in points]

    return JobCurves(
        job_id=job_id,
        steps_per_point=1 if curve is None else curve.width,
        step=[int(point.last_step) for point in points],
        end_s=[round(point.end_s, 3) for point in points],
        loss_first=column("loss_first"),
        loss_last=column("loss_last"),
        loss_min=column("loss_min"),
        loss_max=column("loss_max"),
        step_s=[_step_s(point) for point in points],
        step_s_min=column("step_s_min"),
        step_s_max=column("step_s_max"),
        goodput=[None if share is None else round(share, 4) for share in goodput(points, held)],
    )


def _step_s(point: CurvePoint) -> float | None:
    return _number(point.seconds / point.timed) if point.timed else None


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
