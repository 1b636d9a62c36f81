"""Exec and attach: the user's side of an exec session. The supervisor's side is in api.node_routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import authorize_job, reauthorize
from phalanx.api.http.bodies import json_response, no_content, read_record
from phalanx.api.http.routing import NonNegative, RouteTable
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import BadRequest, Conflict, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.work.attempt import AttemptState
from phalanx.core.work.users import Action
from phalanx.wire.api.execs import ExecBody, ExecInputBody, ExecInputReply, ExecOpened, ExecOutputReply, ExecResizeBody
from phalanx.wire.supervisor import EXEC_CHUNK_BYTES_MAX, OpenExec

_ARGV_MAX = 1000
_SIDE_MAX = 1000  # rows or columns of any terminal

routes = RouteTable()


@routes.post("/v1/jobs/{job_id}/exec", Action.CHANGE_OWN, body=ExecBody, reply=ExecOpened, status=201)
async def open_exec(request: Request, job_id: JobId) -> Response:
    """Run a command in a running job, on one of its nodes."""
    runtime = runtime_of(request)
    parts = runtime.services
    authorize_job(parts.store, caller_of(request), Action.CHANGE_OWN, job_id)
    body = await read_record(request, ExecBody, parts.limits.body_bytes)
    caller = caller_of(request)
    job = authorize_job(
        parts.store, caller, Action.CHANGE_OWN, job_id
    )  # again: permissions may have changed while the body arrived
    if not body.argv or len(body.argv) > _ARGV_MAX or any("\0" in word for word in body.argv):
        raise BadRequest(
            f"exec: invalid command of {len(body.argv)} words", hint=f"use 1 to {_ARGV_MAX} words without NUL bytes"
        )
    _check_size(body.rows, body.cols)
    attempt = next(iter(parts.store.attempts(job_id)[-1:]), None)
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        now = job.state if attempt is None else f"{job.state}, its attempt {attempt.state}"
        raise Conflict(f"job {job_id} is {now}; exec needs a running job", hint=Hint(HintCode.SHOW_JOB, job=job_id))
    grants = attempt.allocation.grants
    if not 0 <= body.node_rank < len(grants):
        raise BadRequest(
            f"node rank {body.node_rank}: job {job_id} has {len(grants)} nodes", hint="node ranks start at 0"
        )
    node_id = grants[body.node_rank].node_id
    # Only the first word: the others may contain secrets.
    await runtime.record_call(f"job {job_id} of {job.user} node {node_id} runs {body.argv[0][:80]!r}")
    # Permissions may have changed again while the note was written, before there was a session to end.
    reauthorize(runtime.authenticator, parts.store, caller, Action.CHANGE_OWN, job_id)()
    supervisor = parts.controller.supervisor_of(node_id, job_id, attempt.epoch)
    session = runtime.sessions.open(caller=caller, job_id=job_id, supervisor=supervisor, rows=body.rows, cols=body.cols)
    parts.mailboxes.post(
        supervisor,
        OpenExec(
            session=session.name,
            job_id=job_id,
            epoch=attempt.epoch,
            argv=body.argv,
            tty=body.tty,
            rows=body.rows,
            cols=body.cols,
        ),
    )
    return json_response(ExecOpened(session=session.name), 201)


@routes.get("/v1/exec/{session_name}/output", Action.CHANGE_OWN, reply=ExecOutputReply, scope=AccessScope.SESSION)
async def exec_output(
    request: Request,
    session_name: str,
    after: NonNegative = 0,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """Read the command's output from byte `after` on, waiting up to `wait_s` for some."""
    runtime = runtime_of(request)
    session = runtime.sessions.for_user(session_name, caller_of(request).user)
    if after > session.output.end:
        raise Conflict(
            f"the command printed only {session.output.end} bytes so far", hint=f"read from byte {session.output.end}"
        )
    clock = runtime.services.clock
    until_s = clock.boottime_s() + min(wait_s, runtime.services.limits.wait_s)
    while not (data := session.output.read(after, EXEC_CHUNK_BYTES_MAX)) and not session.ended:
        left_s = until_s - clock.boottime_s()
        if left_s <= 0:
            break
        await session.wait(left_s)
    runtime.authenticator.refresh(caller_of(request), Action.CHANGE_OWN)  # permissions may have changed during the wait
    session.last_poll_s = clock.boottime_s()
    session.notify()  # the read freed buffer space
    end = session.output.base + len(data)
    done = session.ended and end == session.output.end
    return json_response(
        ExecOutputReply(
            data=data,
            end=end,
            done=done,
            exit_code=session.exit_code if done else None,
            error=session.error if done else "",
        )
    )


@routes.post(
    "/v1/exec/{session_name}/input",
    Action.CHANGE_OWN,
    body=ExecInputBody,
    reply=ExecInputReply,
    transient=True,
    scope=AccessScope.SESSION,
)
async def exec_input(request: Request, session_name: str) -> Response:
    """Send input to the command. `end` is the offset accepted so far; send the rest again from there."""
    runtime = runtime_of(request)
    runtime.sessions.for_user(session_name, caller_of(request).user)
    body = await read_record(request, ExecInputBody, runtime.services.limits.body_bytes)
    session = runtime.sessions.for_user(session_name, caller_of(request).user)  # again: it may have ended
    if body.offset < 0 or len(body.data) > EXEC_CHUNK_BYTES_MAX:
        raise BadRequest(
            f"exec input of {len(body.data)} bytes at {body.offset}", hint=f"at most {EXEC_CHUNK_BYTES_MAX} at once"
        )
    if session.input_closed and body.offset + len(body.data) > session.input.end:
        raise Conflict("the command's input is already closed")
    if not session.input.append(body.offset, body.data, runtime.services.limits.exec_buffer_bytes):
        raise TryLater("the command's input buffer is full", hint=f"send again from byte {session.input.end}")
    session.input_closed = session.input_closed or body.closed
    session.notify()
    return json_response(ExecInputReply(end=session.input.end))


@routes.post(
    "/v1/exec/{session_name}/resize",
    Action.CHANGE_OWN,
    body=ExecResizeBody,
    reply=ExecOpened,
    transient=True,
    scope=AccessScope.SESSION,
)
async def exec_resize(request: Request, session_name: str) -> Response:
    """Set the size of the command's terminal."""
    runtime = runtime_of(request)
    runtime.sessions.for_user(session_name, caller_of(request).user)
    body = await read_record(request, ExecResizeBody, runtime.services.limits.body_bytes)
    session = runtime.sessions.for_user(session_name, caller_of(request).user)  # again: it may have ended
    _check_size(body.rows, body.cols)
    session.rows, session.cols, session.resized = body.rows, body.cols, True
    session.notify()
    return json_response(ExecOpened(session=session.name))


@routes.delete("/v1/exec/{session_name}", Action.CHANGE_OWN, scope=AccessScope.SESSION)
async def close_exec(request: Request, session_name: str) -> Response:
    """Close the session; its command receives SIGHUP. Idempotent."""
    runtime = runtime_of(request)
    session = runtime.sessions.for_user(session_name, caller_of(request).user)
    await runtime.record_call(f"job {session.job_id}: the session ends")
    runtime.sessions.remove(session)
    return no_content()


def _check_size(rows: int, cols: int) -> None:
    if not (1 <= rows <= _SIDE_MAX and 1 <= cols <= _SIDE_MAX):
        raise BadRequest(f"invalid terminal size {rows} x {cols}", hint=f"use 1 to {_SIDE_MAX} rows and columns")
