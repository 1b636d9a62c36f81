"""The supervisors' side of the API (wire.supervisor): hello, lease, commands, events, streams, samples, blobs, exec.

A token is valid for one node. A supervisor may report only on its own node and on jobs whose attempt has a grant there, and write only
the streams of its own ranks. Until it has registered with this process of the head, it is answered 409 with the code "say_hello".
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.blobs import send_blob
from phalanx.api.bodies import decoded, nothing, read_body, reply
from phalanx.api.gate import own_node
from phalanx.api.routes import Routes, Shown, Whole
from phalanx.api.runtime import Runtime, caller_of, off_loop, runtime_of
from phalanx.controller.leases import SayHello
from phalanx.controller.lives import Challenged
from phalanx.core.access.rules import Reach
from phalanx.core.errors import BadRequest, NotPermitted, PhalanxError, TryLater
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.state.events import (
    CheckpointFailed,
    CheckpointSaved,
    Hello,
    NodeDead,
    NodeSeen,
    Progressed,
    Report,
    SeatLost,
    TaskExited,
    Withdrawn,
)
from phalanx.core.work.people import Action
from phalanx.core.work.seat import node_of_supervisor, read_seat
from phalanx.ports.logs import StreamKey
from phalanx.wire.supervisor import (
    EXEC_CHUNK_BYTES_MAX,
    STREAM_CHUNK_BYTES_MAX,
    WIRE_VERSION,
    CommandsReply,
    EventsReply,
    EventsRequest,
    ExecInput,
    ExecOutput,
    Framed,
    HelloReply,
    HelloRequest,
    LeaseReply,
    LeaseRequest,
    SamplesRequest,
    StreamChunk,
    StreamEnd,
    StreamsReply,
    StreamsRequest,
    UnknownKind,
    event_of,
)

_STREAM: Final = re.compile(r"(rank|stacks|steps|supervisor)-(\d{1,7})")
_EXEC_ROOM_WAIT_S: Final = (
    20.0  # how long output waits for buffer space before the supervisor has to repeat the request
)

routes = Routes()


@routes.post("/v1/node/lease", Action.SUPERVISE, body=LeaseRequest, reply=LeaseReply, bare=True)
async def renew_lease(request: Request) -> Response:
    """Renew a supervisor's lease. Answered from memory."""
    runtime = runtime_of(request)
    body = decoded(await read_body(request, runtime.parts.limits.body_bytes), LeaseRequest)
    own_node(caller_of(request), body.node_id)
    driver = runtime.parts.driver
    now_s = runtime.parts.clock.boottime_s()
    granted = driver.leases.renew(_name_of(request), body.supervisor_id, body.epochs, now_s, held_s=body.held_s)
    runtime.count("lease_renewals")
    return reply(
        LeaseReply(
            head_id=driver.head_id,
            lease_s=granted.lease_s,
            renew_in_s=granted.renew_in_s,
            superseded=granted.superseded,
            at_s=runtime.parts.clock.now_s(),
            heads=runtime.heads,
        )
    )


@routes.post(
    "/v1/node/streams", Action.SUPERVISE, body=StreamsRequest, reply=StreamsReply, body_limit="streams_bytes", bare=True
)
async def take_streams(request: Request) -> Response:
    """Store log and step bytes. The answer, sent once they are durable, has the size of each stream."""
    runtime = runtime_of(request)
    name = _name_of(request)
    sent = decoded(await read_body(request, runtime.parts.limits.streams_bytes), StreamsRequest)
    known = runtime.supervisors.speaking(name, sent.supervisor_id)
    for chunk in sent.chunks:
        _check_chunk(runtime, name, chunk)
    chunks = [(StreamKey(job_id=c.job_id, epoch=c.epoch, stream=c.stream), c.offset, c.data) for c in sent.chunks]
    async with known.streams:
        before = {key: runtime.parts.logs.end(key) for key, _, _ in chunks}
        ends = await off_loop(runtime.parts.logs.append, chunks)
        runtime.count("stream_bytes", sum(ends[key] - before[key] for key in before))
        _record_steps(runtime, chunks, before, ends)
    runtime.hub.tell(key.job_id for key in ends)
    return reply(
        StreamsReply(
            ends=[StreamEnd(job_id=k.job_id, epoch=k.epoch, stream=k.stream, end=end) for k, end in ends.items()]
        )
    )


@routes.post("/v1/node/events", Action.SUPERVISE, body=EventsRequest, reply=EventsReply, bare=True)
async def take_events(request: Request) -> Response:
    """Receive events of a node. Answered once they are durable; repeated events are only acknowledged again.

    An event that this head does not know, or that the supervisor may not report, is refused once (400 or 403), after the others were
    handled. It then counts as acknowledged, so that it does not block the events after it.
    """
    runtime = runtime_of(request)
    name = _name_of(request)
    sent = decoded(await read_body(request, runtime.parts.limits.body_bytes), EventsRequest)
    known = runtime.supervisors.speaking(name, sent.supervisor_id)
    async with known.events:
        fresh = [framed for framed in sent.events if framed.seq > known.acked]
        reports: list[Report] = []
        refusal: PhalanxError | None = None
        for framed in sorted(fresh, key=lambda framed: framed.seq):
            try:
                reports.append(_report_of(runtime, name, framed))
            except PhalanxError as error:
                refusal = refusal or error
        if reports:
            answers = await runtime.report(reports)
            again = next(
                (answer for answer in answers if isinstance(answer, PhalanxError) and answer.retry_helps), None
            )
            if again is not None:
                raise again
        known.acked = max([known.acked, *(framed.seq for framed in fresh)])
    runtime.count("events", len(reports))
    runtime.hub.tell(job_id for report in reports if (job_id := getattr(report, "job_id", None)) is not None)
    if refusal is not None:
        raise refusal
    return reply(EventsReply(acked=known.acked))


@routes.post("/v1/node/hello", Action.SUPERVISE, body=HelloRequest, reply=HelloReply)
async def hello(request: Request) -> Response:
    """Register a supervisor with its node and the attempts that it runs. Answered with its lease, once the registration is durable.

    A supervisor that would replace another one first gets a challenge, and must repeat its hello with that challenge.
    """
    runtime = runtime_of(request)
    parts = runtime.parts
    said = decoded(await read_body(request, parts.limits.body_bytes), HelloRequest)
    own_node(caller_of(request), said.node.id)
    if said.version not in (WIRE_VERSION, WIRE_VERSION - 1):
        raise BadRequest(
            f"node {said.node.id} uses protocol version {said.version}; this head supports {WIRE_VERSION - 1} and {WIRE_VERSION}",
            hint="install the head's release on the node",
        )
    wrong = said.node.miscounted()
    if wrong:
        raise BadRequest(
            f"node {said.node.id}: {wrong}",
            hint="counts must be 0 or more, and each device must have its own index",
        )
    name, supervisor_id = _name_of(request), said.supervisor_id
    # Read before the hello is handled: commands that result from it must be delivered.
    after = parts.mailboxes.last(name)
    greeting = Hello(
        node=said.node,
        supervisor_id=supervisor_id,
        carries=tuple(said.carries),
        seat=read_seat(name),
        challenge=said.challenge,
    )
    (answer,) = await runtime.report([greeting])
    challenge = answer.challenge if isinstance(answer, Challenged) else ""
    if not challenge:
        if isinstance(answer, PhalanxError):
            raise answer
        runtime.supervisors.greet(name, supervisor_id)
        runtime.hub.tell(job_id for job_id, _, _ in said.carries)
    lease_s, renew_in_s = parts.driver.leases.terms  # granted by the hello
    return reply(
        HelloReply(
            version=WIRE_VERSION,
            head_id=parts.driver.head_id,
            lease_s=lease_s,
            renew_in_s=renew_in_s,
            after=after,
            heads=runtime.heads,
            challenge=challenge,
        )
    )


@routes.get("/v1/node/commands", Action.SUPERVISE, reply=CommandsReply, reach=Reach.NOBODY)
async def give_commands(
    request: Request,
    after: Whole = 0,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
    head: str = "",
    supervisor: str = "",
) -> Response:
    """Fetch the commands after a seq, waiting up to `wait_s` for one. The request acknowledges all commands up to that seq.

    `head`: the head_id that numbered the commands; `supervisor`: the asking supervisor. If either is not the current one, the answer is
    "say_hello". An empty value is not checked.
    """
    runtime = runtime_of(request)
    name, asks = _name_of(request), SupervisorId(supervisor) if supervisor else None
    mailboxes, clock = runtime.parts.mailboxes, runtime.parts.clock
    known = runtime.supervisors.speaking(name, asks)
    if head not in ("", runtime.parts.driver.head_id):
        raise SayHello(f"node {name}: seq {after} is of another head", hint="register again with a hello")
    until_s = clock.boottime_s() + min(wait_s, runtime.parts.limits.wait_s)
    with runtime.hub.bell() as watch:
        stop = mailboxes.listen(name, runtime.answers.soon(watch.ring))
        try:
            commands, last = mailboxes.take(name, after)
            while not commands and not runtime.hub.closing:
                left_s = until_s - clock.boottime_s()
                if left_s <= 0:
                    break
                await watch.wait(left_s)
                commands, last = mailboxes.take(name, after)
        finally:
            stop()
    runtime.supervisors.speaking(name, asks)
    if runtime.parts.driver.leases.is_anothers(name, known.supervisor_id):  # these commands may be results of its hello
        raise SayHello(f"node {name}: another supervisor has registered for it", hint="register again with a hello")
    return reply(CommandsReply(head_id=runtime.parts.driver.head_id, commands=commands, last=last))


@routes.post("/v1/node/samples", Action.SUPERVISE, body=SamplesRequest, reply=Shown.NOTHING, status=204)
async def take_samples(request: Request) -> Response:
    """Store the newest samples of a node's devices, in memory."""
    runtime = runtime_of(request)
    sample = decoded(await read_body(request, runtime.parts.limits.body_bytes), SamplesRequest)
    own_node(caller_of(request), sample.node_id)
    runtime.supervisors.speaking(_name_of(request), sample.supervisor_id)
    runtime.parts.telemetry.samples(sample)
    return nothing()


@routes.get("/v1/node/blobs/{sha256}", Action.SUPERVISE, reply=Shown.BYTES, reach=Reach.NOBODY)
async def give_blob(request: Request, sha256: str) -> Response:
    """Download an uploaded working directory."""
    runtime = runtime_of(request)
    runtime.supervisors.speaking(_name_of(request))
    return await send_blob(runtime.parts, sha256)


@routes.get("/v1/node/exec/{session_name}/input", Action.SUPERVISE, reply=ExecInput, reach=Reach.SESSION)
async def give_exec_input(
    request: Request,
    session_name: str,
    after: Whole = 0,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """Read the user's input from byte `after` on, or a new terminal size; waits up to `wait_s`. 404 once the user has left."""
    runtime = runtime_of(request)
    clock = runtime.parts.clock
    session = runtime.sessions.of_supervisor(session_name, _name_of(request))
    until_s = clock.boottime_s() + min(wait_s, runtime.parts.limits.wait_s)
    while True:
        data = session.typed.get(after, EXEC_CHUNK_BYTES_MAX)
        at_end = session.typed.base + len(data) == session.typed.end
        left_s = until_s - clock.boottime_s()
        if data or session.resized or (session.typed_closed and at_end) or left_s <= 0:
            break
        await session.hear(min(left_s, 1.0))
        session = runtime.sessions.of_supervisor(session_name, _name_of(request))
    session.resized = False
    return reply(ExecInput(data=data, closed=session.typed_closed and at_end, rows=session.rows, cols=session.cols))


@routes.post(
    "/v1/node/exec/{session_name}/output",
    Action.SUPERVISE,
    body=ExecOutput,
    reply=Shown.NOTHING,
    status=204,
    reach=Reach.SESSION,
)
async def take_exec_output(request: Request, session_name: str) -> Response:
    """Receive a command's output. Answered once there is buffer space, so that a slow reader slows the command down."""
    runtime = runtime_of(request)
    clock, limits = runtime.parts.clock, runtime.parts.limits
    session = runtime.sessions.of_supervisor(session_name, _name_of(request))
    said = decoded(await read_body(request, limits.body_bytes), ExecOutput)
    if len(said.data) > EXEC_CHUNK_BYTES_MAX or said.offset < 0:
        raise BadRequest(
            f"exec output of {len(said.data)} bytes at {said.offset}", hint=f"at most {EXEC_CHUNK_BYTES_MAX} at once"
        )
    until_s = clock.boottime_s() + _EXEC_ROOM_WAIT_S
    while not session.printed.put(said.offset, said.data, limits.exec_buffer_bytes):
        left_s = until_s - clock.boottime_s()
        if left_s <= 0:
            raise TryLater("the session's output buffer is full", hint="send the same piece again")
        await session.hear(min(left_s, 1.0))
        session = runtime.sessions.of_supervisor(session_name, _name_of(request))
    if said.exit_code is not None or said.error:
        session.exit_code, session.error, session.over = said.exit_code, said.error, True
    session.tell()
    return nothing()


def _name_of(request: Request) -> NodeId:
    """Return the calling supervisor's name: the node's, or that of its seat if it runs for one attempt."""
    name = caller_of(request).node_id
    assert name is not None, "only node tokens have the action SUPERVISE"
    return name


def _check_seat(name: NodeId, job_id: JobId, epoch: Epoch) -> None:
    """Check that a supervisor that runs for one attempt reports on that attempt.

    Raises:
        NotPermitted: it runs for another attempt.
    """
    seat = read_seat(name)
    if seat is not None and (seat.job_id, seat.epoch) != (job_id, epoch):
        raise NotPermitted(f"the supervisor on {name} does not run job {job_id} epoch {epoch}")


def _report_of(runtime: Runtime, name: NodeId, framed: Framed) -> Report:
    """Decode an event, and check that this node may report it.

    Raises:
        BadRequest: this head does not know the event.
        NotPermitted: it is about another node, or about a job that this node runs no part of.
    """
    try:
        event = event_of(framed)
    except UnknownKind as error:
        raise BadRequest(f"event {framed.seq}: {error}", hint="update the head to the supervisor's release") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadRequest(f"event {framed.seq} ({framed.kind}): {error}") from error
    assert not isinstance(event, (Hello, NodeDead, NodeSeen, SeatLost, Withdrawn)), "these are not sent as events"
    node_id = node_of_supervisor(name)
    match event:
        case TaskExited():
            reporter, epoch = event.exit.node_id, event.epoch
        case CheckpointSaved():
            reporter, epoch = event.node_id, event.resume.epoch
        case Progressed() | CheckpointFailed():
            reporter, epoch = node_id, event.epoch
        case _:
            reporter, epoch = event.node_id, event.epoch
    if reporter != node_id:
        raise NotPermitted(f"event {framed.seq}: node {node_id} may not report for node {reporter}")
    _check_seat(name, event.job_id, epoch)
    runtime.supervisors.grant(node_id, event.job_id, epoch)
    return event


def _check_chunk(runtime: Runtime, supervisor: NodeId, chunk: StreamChunk) -> None:
    """Check that this node may send the chunk."""
    name = _STREAM.fullmatch(chunk.stream)
    if name is None or chunk.offset < 0 or len(chunk.data) > STREAM_CHUNK_BYTES_MAX:
        raise BadRequest(
            f"stream {chunk.stream[:40]!r}: {len(chunk.data)} bytes at {chunk.offset}",
            hint=f"use rank-K, stacks-K, steps-K or supervisor-K, and at most {STREAM_CHUNK_BYTES_MAX} bytes per chunk",
        )
    _check_seat(supervisor, chunk.job_id, chunk.epoch)
    node_id = node_of_supervisor(supervisor)
    grant = runtime.supervisors.grant(node_id, chunk.job_id, chunk.epoch)
    number = int(name[2])
    own = (
        range(grant.first_rank, grant.first_rank + grant.tasks) if name[1] in ("rank", "stacks") else (grant.node_rank,)
    )
    if number not in own:
        raise NotPermitted(f"node {node_id} may not write {chunk.stream} of job {chunk.job_id} epoch {chunk.epoch}")


def _record_steps(
    runtime: Runtime,
    chunks: list[tuple[StreamKey, int, bytes]],
    before: dict[StreamKey, int],
    ends: dict[StreamKey, int],
) -> None:
    """Pass new durable step reports to telemetry, and some of them to the controller, without waiting for it."""
    ends_read = dict(before)
    reports: list[Report] = []
    for key, offset, data in chunks:
        kind, _, number = key.stream.partition("-")
        start, end = ends_read[key], min(offset + len(data), ends[key])
        if kind != "steps" or offset > start or end <= start:
            continue
        ends_read[key] = end
        reports += runtime.parts.telemetry.steps(
            key.job_id, key.epoch, int(number), data[start - offset : end - offset]
        )
    if reports:
        runtime.parts.driver.report(reports)
