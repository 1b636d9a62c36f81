"""The training steps that a job's ranks reported, in pages over all attempts."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_job
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import QUERY_DIGITS_MAX, RouteTable
from phalanx.api.live.cursor import Cursor, read_cursor, write_cursor
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadRequest
from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.jsonline import finite_float, parse_object
from phalanx.core.work.users import Action
from phalanx.ports.logs import StreamKey
from phalanx.wire.api.output import StepsReply, StepView
from phalanx.wire.rank import REPORT_BYTES_MAX, ReportKind

STEPS_MAX: Final = 10_000
STEPS_ANSWERED: Final = 2500  # in one answer: a step is numbers alone, at most 350 bytes of JSON
_READ_BYTES: Final = 1 << 18
_STREAM: Final = "steps-0"  # of node rank 0, which has rank 0

routes = RouteTable()


@routes.get("/v1/jobs/{job_id}/steps", Action.VIEW, reply=StepsReply)
async def job_steps(
    request: Request,
    job_id: JobId,
    after: str = "",
    rank: str = "0",
    limit: Annotated[int, Query(ge=1, le=STEPS_MAX)] = STEPS_MAX,
) -> Response:
    """List steps by attempt, in the order reported; `rank` is a number, or `all` for the ranks of the first node. Continue with `after=cursor`."""
    services = runtime_of(request).services
    require_job(services.store, job_id)
    if rank != "all" and (not rank.isdecimal() or len(rank) > QUERY_DIGITS_MAX):
        raise BadRequest(f"rank: {rank[:60]!r} is not valid", hint="use a number, or all")
    return json_response(
        await run_in_thread(read_steps, services, job_id, read_cursor(after), rank, min(limit, STEPS_ANSWERED))
    )


def read_steps(services: HeadServices, job_id: JobId, place: Cursor, rank: str, limit: int) -> StepsReply:
    """Read at most `limit` steps past `place`."""
    steps: list[StepView] = []
    for key in services.logs.streams(services.store.attempts(job_id)):
        if key.stream == _STREAM:
            _read_stream(services, key, place, rank, limit, steps)
    return StepsReply(steps=steps, cursor=write_cursor(place), more=len(steps) >= limit)


def _read_stream(
    services: HeadServices, key: StreamKey, place: Cursor, rank: str, limit: int, steps: list[StepView]
) -> None:
    while len(steps) < limit:
        offset = place.get((key.epoch, key.stream), 0)
        data = services.logs.read(key, offset, _READ_BYTES)
        if b"\n" not in data:
            if len(data) > REPORT_BYTES_MAX:  # longer than any report: skip it
                place[key.epoch, key.stream] = offset + len(data)
                continue
            return
        for line in data[: data.rindex(b"\n") + 1].splitlines(keepends=True):
            offset += len(line)
            step = _step_of(key.epoch, line, rank)
            if step is not None:
                steps.append(step)
            if len(steps) >= limit:
                break
        place[key.epoch, key.stream] = offset


def _step_of(epoch: Epoch, line: bytes, rank: str) -> StepView | None:
    report = parse_object(line)
    if report is None or report.get("k") != ReportKind.STEP or not isinstance(report.get("step"), int):
        return None
    if rank != "all" and report.get("rank") != int(rank):
        return None
    return StepView(
        epoch=epoch,
        generation=Generation(_int_or_none(report.get("generation")) or 0),
        step=report["step"],
        rank=_int_or_none(report.get("rank")) or 0,
        tokens=_int_or_none(report.get("tokens")),
        loss=finite_float(report.get("loss")),
        begin_ns=_int_or_none(report.get("begin_ns")) or 0,
        end_ns=_int_or_none(report.get("end_ns")) or 0,
        at_s=finite_float(report.get("at_s")) or 0.0,
    )


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None
