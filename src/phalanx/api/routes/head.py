"""The head itself: its health, the description of its API, and its planned stop."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.events import CancelAllJobs
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action
from phalanx.wire.api.head import Health, StopBody, StopReply

routes = RouteTable()


@routes.get("/v1/health", Action.VIEW, reply=Health, open_to_all=True)
async def health(request: Request) -> Response:
    """Show that the head is healthy, with its id and version, and at which provider people sign in."""
    runtime = runtime_of(request)
    services, settings = runtime.services, runtime.provider_sign_in.settings()
    known = Health(
        status="ok",
        version=services.version,
        head_id=services.controller.head_id,
        sign_in="" if settings is None else urlsplit(settings.issuer).netloc,
    )
    if services.leader_status is not None:
        known = msgspec.structs.replace(
            known, role="leader", term=services.leader_status.term, leader=services.leader_status.own_record.url
        )
    return json_response(known)


@routes.get("/v1/openapi.json", Action.VIEW, reply=MediaType.ANY_JSON)
async def describe_api(request: Request) -> Response:
    """Return this description of the API."""
    return json_response(request.app.openapi())


@routes.post("/v1/stop", Action.OPERATE, body=StopBody, reply=StopReply)
async def stop_head(request: Request) -> Response:
    """Stop the head. While jobs run, the caller must choose to keep them (their supervisors get long leases) or to cancel them.

    If another head stands by, it takes over at once and jobs continue, so no choice is needed.
    `cancel_jobs` cancels all jobs and answers `stopping: false` while some are still ending: repeat the request until it is true.
    """
    runtime = runtime_of(request)
    body = await read_record(request, StopBody, runtime.services.limits.body_bytes)
    if body.keep_jobs and body.cancel_jobs:
        raise BadRequest("keep_jobs and cancel_jobs exclude each other", hint="send only one of them")
    if body.cancel_jobs:
        await runtime.request(CancelAllJobs(by=caller_of(request).user))
        runtime.hub.notify(())
    counts = await run_in_thread(runtime.services.store.job_counts)
    running = counts.get(JobState.RUNNING, 0)
    if running and not body.keep_jobs and not (runtime.has_standby and not body.cancel_jobs):
        if body.cancel_jobs:
            return json_response(StopReply(stopping=False, running=running))
        raise Conflict(
            f"{running} job{'s are' if running > 1 else ' is'} running", hint=Hint(HintCode.KEEP_OR_CANCEL_JOBS)
        )
    await runtime.record_call(f"the head stops; {running} jobs keep running")
    if running and not runtime.has_standby:
        await runtime.grant_long_leases()
    answer = json_response(StopReply(stopping=True, running=running, relieved=runtime.has_standby))
    answer.background = BackgroundTask(_stop, runtime)
    return answer


async def _stop(runtime: ApiRuntime) -> None:
    """Runs after the answer is sent: ends streams and polls, then stops the head."""
    runtime.close()
    runtime.services.on_stop()
