"""The WebSocket of an exec session. The supervisor's side is in api.nodes.supervisor_routes."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx.api.auth.authenticator import authorize_job, reauthorize
from phalanx.api.http.errors import SlowBody
from phalanx.api.http.routing import RouteTable
from phalanx.api.live.exec_relay import ExecRelay, check_terminal_size, decode_frame
from phalanx.api.live.exec_start import check_while_running, running_attempt, start_exec
from phalanx.api.runtime import caller_of, reauthorize_caller, runtime_of
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.core.units import format_duration
from phalanx.core.work.users import Action
from phalanx.wire.api.execs import ExecBody

_ARGV_MAX: Final = 1000

routes = RouteTable()


@routes.websocket("/v1/jobs/{job_id}/exec", Action.CHANGE_OWN)
async def run_exec(websocket: WebSocket) -> None:
    """Run a command in a running job, on one of its nodes, and carry its input and output."""
    runtime = runtime_of(websocket)
    services = runtime.services
    job_id = JobId(websocket.path_params["job_id"])
    authorize_job(services.store, caller_of(websocket), Action.CHANGE_OWN, job_id)
    await websocket.accept()
    body = await _read_body(websocket, services.limits.body_s)
    reauthorize_caller(websocket)  # permissions may have changed while the body arrived
    caller = caller_of(websocket)
    job = authorize_job(services.store, caller, Action.CHANGE_OWN, job_id)
    if not body.argv or len(body.argv) > _ARGV_MAX or any("\0" in word for word in body.argv):
        raise BadRequest(
            f"exec: invalid command of {len(body.argv)} words", hint=f"use 1 to {_ARGV_MAX} words without NUL bytes"
        )
    check_terminal_size(body.rows, body.cols)
    attempt = running_attempt(services, job, body.node_rank, needed_by="exec")
    node_id = attempt.allocation.grants[body.node_rank].node_id
    # Only the first word: the others may contain secrets.
    await runtime.record_call(f"job {job_id} of {job.user} node {node_id} runs {body.argv[0][:80]!r}")
    # Permissions may have changed again while the note was written.
    still = reauthorize(runtime.authenticator, services.store, caller, Action.CHANGE_OWN, job_id)
    still()
    session = start_exec(runtime, caller.user, attempt, body)
    try:
        check = check_while_running(services, attempt, still, lambda: session.ended)
        await ExecRelay(runtime, websocket, session, check).run()
    finally:
        runtime.sessions.remove(session)


async def _read_body(websocket: WebSocket, limit_s: float) -> ExecBody:
    """Read the first frame.

    Raises:
        SlowBody: it did not arrive within `limit_s`.
        WebSocketDisconnect: the user left.
    """
    try:
        async with asyncio.timeout(limit_s):
            message = await websocket.receive()
    except TimeoutError as error:
        raise SlowBody(f"exec: no command arrived within {format_duration(limit_s)}", hint="send it first") from error
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    body: ExecBody = decode_frame(message.get("text") or "", ExecBody)
    return body
