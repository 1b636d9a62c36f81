"""Event streams of one job and of all jobs: history lines and state changes, in commit order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import may_see_all_of, reauthorize, require_job
from phalanx.api.auth.redaction import JobRedactor
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import (
    QUERY_DIGITS_MAX,
    MediaType,
    NonNegative,
    OptionalNonNegative,
    RouteTable,
)
from phalanx.api.live.event_framing import HEARTBEAT, encode_event
from phalanx.api.live.event_streams import EventStream
from phalanx.api.live.history_tail import newest_seq
from phalanx.api.routes.jobs import history_page
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.api.views.job_records import end_event, state_event
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId, NodeId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.users import Action
from phalanx.wire.api.output import HistoryReply, StateEvent

_PAGE: Final = 500

routes = RouteTable()


@routes.get("/v1/jobs/{job_id}/events", Action.VIEW, reply=MediaType.EVENTS)
async def job_events(request: Request, job_id: JobId, after: NonNegative = 0) -> Response:
    """Follow one job: `story` and `state` events, and `end` when it has ended. An event's id is the line's seq."""
    runtime = runtime_of(request)
    require_job(runtime.services.store, job_id)
    caller = caller_of(request)
    source = _follow_job(runtime, caller, job_id, _after(request, after))
    return EventStream(runtime, caller.user, source, _permission_check(request))


@routes.get("/v1/events", Action.VIEW, reply=MediaType.EVENTS)
async def all_events(request: Request, after: OptionalNonNegative = None) -> Response:
    """Follow all jobs from now on, or after a seq: `story` events, and after each batch the `state` of its jobs."""
    runtime = runtime_of(request)
    last_id = request.headers.get("last-event-id")
    start = (
        _after(request, after or 0)
        if last_id or after is not None
        else await run_in_thread(newest_seq, runtime.services.store)
    )
    caller = caller_of(request)
    return EventStream(runtime, caller.user, _follow_all(runtime, caller, start), _permission_check(request))


@routes.get("/v1/story", Action.VIEW, reply=HistoryReply)
async def whole_history(
    request: Request, after: NonNegative = 0, node: str | None = None, limit: NonNegative = _PAGE
) -> Response:
    """List history lines of all jobs and nodes, or of one node, oldest first."""
    runtime = runtime_of(request)
    lines = await run_in_thread(_lines, runtime, None, node, after, max(1, min(limit, _PAGE)))
    visible = await run_in_thread(JobRedactor(runtime.services.store, caller_of(request)).redact_all, lines)
    bytes_max = runtime.services.limits.answer_bytes
    return json_response(history_page(visible, lines[-1].seq if lines else after, bytes_max))


def _permission_check(request: Request) -> Callable[[], None]:
    runtime = runtime_of(request)
    return reauthorize(runtime.authenticator, runtime.services.store, caller_of(request), Action.VIEW)


async def _follow_job(runtime: ApiRuntime, caller: Caller, job_id: JobId, after: int) -> AsyncIterator[bytes]:
    services, limits = runtime.services, runtime.services.limits
    sent: StateEvent | None = None
    quiet_s = 0.0
    with runtime.hub.follow(job_id) as watch:
        while not runtime.hub.closing:
            # Read the job before its history: once it has ended, its history is complete.
            job = require_job(services.store, job_id)
            attempts = services.store.attempts(job_id) if job.epoch else []
            lines = await run_in_thread(_lines, runtime, job_id, None, after, _PAGE)
            # After the lines, so that none is sent with a permission that ended before it.
            caller = runtime.authenticator.refresh(caller, Action.VIEW)
            redactor = JobRedactor(services.store, caller)
            for line in lines:
                after = line.seq
                yield encode_event("story", redactor.redact(line), str(line.seq))
            if len(lines) == _PAGE:
                continue
            state = state_event(
                job,
                attempts[-1] if attempts else None,
                services.controller.wait_reasons.get(job_id),
                show_all=may_see_all_of(caller, job),
            )
            if state != sent:
                sent = state
                yield encode_event("state", state)
            if job.state.terminal:
                yield encode_event("end", end_event(job))
                return
            quiet_s = 0.0 if lines else quiet_s
            if quiet_s >= limits.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT
            began_s = services.clock.boottime_s()
            await watch.wait(limits.recheck_s)
            quiet_s += services.clock.boottime_s() - began_s


async def _follow_all(runtime: ApiRuntime, caller: Caller, after: int) -> AsyncIterator[bytes]:
    services, limits = runtime.services, runtime.services.limits
    quiet_s = 0.0
    yield b": following\n\n"  # confirms the stream to the follower at once
    with runtime.hub.follow(None) as watch:
        while not runtime.hub.closing:
            lines = await run_in_thread(_lines, runtime, None, None, after, _PAGE)
            caller = runtime.authenticator.refresh(caller, Action.VIEW)  # after the lines, as in _follow_job
            redactor = JobRedactor(services.store, caller)
            for line in await run_in_thread(redactor.redact_all, lines):
                after = line.seq
                yield encode_event("story", line, str(line.seq))
            for job_id in dict.fromkeys(line.job_id for line in lines if line.job_id is not None):
                job = services.store.job(job_id)
                if job is not None:
                    attempts = services.store.attempts(job_id) if job.epoch else []
                    yield encode_event(
                        "state",
                        state_event(
                            job,
                            attempts[-1] if attempts else None,
                            services.controller.wait_reasons.get(job_id),
                            show_all=redactor.may_see_all(job_id),
                        ),
                    )
            quiet_s = 0.0 if lines else quiet_s
            if quiet_s >= limits.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT
            if len(lines) < _PAGE:
                began_s = services.clock.boottime_s()
                await watch.wait(limits.recheck_s)
                quiet_s += services.clock.boottime_s() - began_s


def _lines(
    runtime: ApiRuntime, job_id: JobId | None, node: str | None, after: int, limit: int
) -> Sequence[HistoryLine]:
    node_id = None if node is None else NodeId(node)
    return runtime.services.store.history(job_id=job_id, node_id=node_id, after=after, limit=limit)


def _after(request: Request, after: int) -> int:
    last_id = request.headers.get("last-event-id", "")
    if not last_id:
        return after
    if not last_id.isdecimal() or len(last_id) > QUERY_DIGITS_MAX:
        raise BadRequest(f"Last-Event-ID: {last_id[:60]!r} is not a seq", hint="send the id of the last event")
    return int(last_id)
