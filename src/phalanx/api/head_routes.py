"""The head itself: its health, the description of its API, and its planned stop."""

from __future__ import annotations

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import read_record, reply
from phalanx.api.routes import Routes, Shown
from phalanx.api.runtime import Runtime, caller_of, off_loop, runtime_of
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.state.events import CancelAll
from phalanx.core.work.job import JobState
from phalanx.core.work.people import Action
from phalanx.wire.api.head import Health, StopBody, StopReply

routes = Routes()


@routes.get("/v1/health", Action.SEE, reply=Health, open_to_all=True)
async def health(request: Request) -> Response:
    """Show that the head is healthy, with its id and version."""
    parts = runtime_of(request).parts
    known = Health(status="ok", version=parts.version, head_id=parts.driver.head_id)
    if parts.among is not None:
        known = msgspec.structs.replace(known, role="leader", term=parts.among.term, leader=parts.among.mine.url)
    return reply(known)


@routes.get("/v1/openapi.json", Action.SEE, reply=Shown.ANY_JSON)
async def describe_api(request: Request) -> Response:
    """Return this description of the API."""
    return reply(request.app.openapi())


@routes.post("/v1/stop", Action.OPERATE, body=StopBody, reply=StopReply)
async def stop_head(request: Request) -> Response:
    """Stop the head. While jobs run, the caller must choose to keep them (their supervisors get long leases) or to cancel them.

    If another head stands by, it takes over at once and jobs continue, so no choice is needed.
    `cancel_jobs` cancels all jobs and answers `stopping: false` while some are still ending: repeat the request until it is true.
    """
    runtime = runtime_of(request)
    body = await read_record(request, StopBody, runtime.parts.limits.body_bytes)
    if body.keep_jobs and body.cancel_jobs:
        raise BadRequest("keep_jobs and cancel_jobs exclude each other", hint="send only one of them")
    if body.cancel_jobs:
        await runtime.ask(CancelAll(by=caller_of(request).user))
        runtime.hub.tell(())
    counts = await off_loop(runtime.parts.store.job_counts)
    running = counts.get(JobState.RUNNING, 0)
    if running and not body.keep_jobs and not (runtime.relieved and not body.cancel_jobs):
        if body.cancel_jobs:
            return reply(StopReply(stopping=False, running=running))
        raise Conflict(
            f"{running} job{'s are' if running > 1 else ' is'} running", hint="choose --keep-jobs or --cancel-jobs"
        )
    await runtime.note(f"the head stops; {running} jobs keep running")
    if running and not runtime.relieved:
        await runtime.lengthen_leases()
    answer = reply(StopReply(stopping=True, running=running, relieved=runtime.relieved))
    answer.background = BackgroundTask(_stop, runtime)
    return answer


async def _stop(runtime: Runtime) -> None:
    """Runs after the answer is sent: ends streams and polls, then stops the head."""
    runtime.close()
    runtime.parts.on_stop()
