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

from phalanx.api.auth.authenticator import require_own_node
from phalanx.api.http.bodies import (
    decode_body,
    json_response,
    no_content,
    read_body,
)
from phalanx.api.http.routing import MediaType, NonNegative, RouteTable
from phalanx.api.nodes.supervisors import require_own_seat
from phalanx.api.routes.blobs import send_blob
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.controller.leases import UnknownSupervisor
from phalanx.controller.supervisor_incarnations import RegistrationChallenged
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import BadRequest, NotPermitted, PhalanxError, TryLater
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.reports import (
    AttemptQueued,
    AttemptReclaimed,
    AttemptWithdrawn,
    BudgetReached,
    CheckpointFailed,
    CheckpointSaved,
    DatasetsHeld,
    DiskFreed,
    IdleJobsObserved,
    LoadObserved,
    MachinesListed,
    NodeDied,
    NodeHealthReported,
    NodeListed,
    OutputsReached,
    PowerLimited,
    ProgressReported,
    ProviderReported,
    Report,
    SeatLost,
    SupervisorRegistered,
    TaskExited,
    UsageCounted,
)
from phalanx.core.work.seats import node_of_supervisor, parse_seat
from phalanx.core.work.users import Action
from phalanx.ports.logs import StreamKey
from phalanx.wire.renewals import CONNECTION_HEADER
from phalanx.wire.supervisor import (
    EXEC_CHUNK_BYTES_MAX,
    STREAM_CHUNK_BYTES_MAX,
    WIRE_VERSION,
    CommandsReply,
    Envelope,
    EventsReply,
    EventsRequest,
    ExecInput,
    ExecOutput,
    HelloReply,
    HelloRequest,
    LeaseReply,
    LeaseRequest,
    SamplesRequest,
    StreamChunk,
    StreamEnd,
    StreamsReply,
    StreamsRequest,
    UnknownEnvelopeKind,
    decode_event,
    pack,
    unpack,
)

_STREAM: Final = re.compile(r"(rank|stacks|steps|supervisor)-(\d{1,7})")
_EXEC_ROOM_WAIT_S: Final = (
    20.0  # how long output waits for buffer space before the supervisor has to repeat the request
)

routes = RouteTable()


@routes.post("/v1/node/lease", Action.SUPERVISE, body=LeaseRequest, reply=LeaseReply, raw_request=True)
async def renew_lease(request: Request) -> Response:
    """Renew a supervisor's lease. Answered from memory; in a large fleet, later ones by another process (`app.renewal_process`)."""
    runtime = runtime_of(request)
    body = decode_body(await read_body(request, runtime.services.limits.body_bytes), LeaseRequest)
    require_own_node(caller_of(request), body.node_id)
    driver = runtime.services.controller
    now_s = runtime.services.clock.boottime_s()
    granted = driver.leases.renew(_name_of(request), body.supervisor_id, body.epochs, now_s, held_s=body.held_s)
    runtime.count("lease_renewals")
    renewals, reconnect = runtime.services.renewals, False
    if renewals is not None:
        connection = renewals.connection_of(request.headers.get(CONNECTION_HEADER))
        if connection is not None:
            driver.leases.delegate_renewals(_name_of(request), body.supervisor_id, connection, now_s)
        else:
            reconnect = body.reconnects and request.url.scheme == "https" and renewals.wanted
    answer = json_response(
        LeaseReply(
            head_id=driver.head_id,
            lease_s=granted.lease_s,
            renew_in_s=granted.renew_in_s,
            superseded=granted.superseded,
            at_s=runtime.services.clock.now_s(),
            heads=runtime.head_urls,
        )
    )
    if reconnect:
        answer.headers["connection"] = "close"
    return answer


@routes.post(
    "/v1/node/streams",
    Action.SUPERVISE,
    body=StreamsRequest,
    reply=StreamsReply,
    body_limit="streams_bytes",
    raw_request=True,
)
async def receive_streams(request: Request) -> Response:
    """Store log and step bytes. The answer, sent once they are durable, has the size of each stream."""
    runtime = runtime_of(request)
    name = _name_of(request)
    sent = decode_body(await read_body(request, runtime.services.limits.streams_bytes), StreamsRequest)
    known = runtime.supervisors.require(name, sent.supervisor_id)
    chunks = [(_checked_key(runtime, name, chunk), chunk.offset, chunk.data) for chunk in sent.chunks]
    async with known.streams:
        before = {key: runtime.services.logs.end(key) for key, _, _ in chunks}
        ends = await run_in_thread(runtime.services.logs.append, chunks)
        runtime.count("stream_bytes", sum(ends[key] - before[key] for key in before))
        _record_steps(runtime, chunks, before, ends)
    runtime.hub.notify(key.job_id for key in ends)
    return json_response(
        StreamsReply(
            ends=[StreamEnd(job_id=k.job_id, epoch=k.epoch, stream=k.stream, end=end) for k, end in ends.items()]
        )
    )


@routes.post("/v1/node/events", Action.SUPERVISE, body=EventsRequest, reply=EventsReply, raw_request=True)
async def receive_events(request: Request) -> Response:
    """Receive events of a node. Answered once they are durable; repeated events are only acknowledged again.

    An event that this head does not know, or that the supervisor may not report, is refused once (400 or 403), after the others were
    handled. It then counts as acknowledged, so that it does not block the events after it.
    """
    runtime = runtime_of(request)
    name = _name_of(request)
    sent = decode_body(await read_body(request, runtime.services.limits.body_bytes), EventsRequest)
    known = runtime.supervisors.require(name, sent.supervisor_id)
    async with known.events:
        fresh = [framed for framed in sent.events if framed.seq > known.acked]
        reports: list[Report] = []
        refusal: PhalanxError | None = None
        for framed in sorted(fresh, key=lambda framed: framed.seq):
            try:
                reports.append(_report_of(runtime, name, known.supervisor_id, framed))
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
    runtime.hub.notify(job_id for report in reports if (job_id := getattr(report, "job_id", None)) is not None)
    if refusal is not None:
        raise refusal
    return json_response(EventsReply(acked=known.acked))


@routes.post("/v1/node/hello", Action.SUPERVISE, body=HelloRequest, reply=HelloReply)
async def register_supervisor(request: Request) -> Response:
    """Register a supervisor with its node and the attempts that it runs. Answered with its lease, once the registration is durable.

    A supervisor that would replace another one first gets a challenge, and must repeat its hello with that challenge.
    """
    runtime = runtime_of(request)
    services = runtime.services
    said = decode_body(await read_body(request, services.limits.body_bytes), HelloRequest)
    require_own_node(caller_of(request), said.node.id)
    if said.version not in (WIRE_VERSION, WIRE_VERSION - 1):
        raise BadRequest(
            f"node {said.node.id} uses protocol version {said.version}; this head supports {WIRE_VERSION - 1} and {WIRE_VERSION}",
            hint="install the head's release on the node",
        )
    wrong = said.node.invalid_count()
    if wrong:
        raise BadRequest(
            f"node {said.node.id}: {wrong}",
            hint="counts must be 0 or more, and each device must have its own index",
        )
    name, supervisor_id = _name_of(request), said.supervisor_id
    # Read before the hello is handled: commands that result from it must be delivered.
    after = services.mailboxes.last(name)
    greeting = SupervisorRegistered(
        node=said.node,
        supervisor_id=supervisor_id,
        running=tuple(said.members),
        seat=parse_seat(name),
        challenge=said.challenge,
    )
    (answer,) = await runtime.report([greeting])
    challenge = answer.challenge if isinstance(answer, RegistrationChallenged) else ""
    if not challenge:
        if isinstance(answer, PhalanxError):
            raise answer
        runtime.supervisors.register(name, supervisor_id)
        runtime.hub.notify(job_id for job_id, _, _ in said.members)
    lease_s, renew_in_s = services.controller.leases.terms  # granted by the hello
    return json_response(
        HelloReply(
            version=WIRE_VERSION,
            head_id=services.controller.head_id,
            lease_s=lease_s,
            renew_in_s=renew_in_s,
            after=after,
            heads=runtime.head_urls,
            challenge=challenge,
        )
    )


@routes.get("/v1/node/commands", Action.SUPERVISE, reply=CommandsReply, scope=AccessScope.UNOWNED)
async def fetch_commands(
    request: Request,
    after: NonNegative = 0,
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
    mailboxes, clock = runtime.services.mailboxes, runtime.services.clock
    known = runtime.supervisors.require(name, asks)
    if head not in ("", runtime.services.controller.head_id):
        raise UnknownSupervisor(f"node {name}: seq {after} is of another head", hint="register again with a hello")
    until_s = clock.boottime_s() + min(wait_s, runtime.services.limits.wait_s)
    with runtime.hub.private_wakeup() as watch:
        stop = mailboxes.listen(name, runtime.controller_futures.threadsafe_callback(watch.notify))
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
    runtime.supervisors.require(name, asks)
    if runtime.services.controller.leases.belongs_to_other(
        name, known.supervisor_id
    ):  # these commands may be results of its hello
        raise UnknownSupervisor(
            f"node {name}: another supervisor has registered for it", hint="register again with a hello"
        )
    return json_response(CommandsReply(head_id=runtime.services.controller.head_id, commands=commands, last=last))


@routes.post("/v1/node/samples", Action.SUPERVISE, body=SamplesRequest, reply=MediaType.NOTHING, status=204)
async def receive_samples(request: Request) -> Response:
    """Store the newest samples of a node's devices, in memory."""
    runtime = runtime_of(request)
    sample = decode_body(await read_body(request, runtime.services.limits.body_bytes), SamplesRequest)
    require_own_node(caller_of(request), sample.node_id)
    runtime.supervisors.require(_name_of(request), sample.supervisor_id)
    runtime.services.telemetry.put_samples(sample)
    return no_content()


@routes.get("/v1/node/blobs/{sha256}", Action.SUPERVISE, reply=MediaType.BYTES, scope=AccessScope.UNOWNED)
async def download_blob(request: Request, sha256: str) -> Response:
    """Download an uploaded working directory."""
    runtime = runtime_of(request)
    runtime.supervisors.require(_name_of(request))
    return await send_blob(runtime.services, sha256)


@routes.get(
    "/v1/node/exec/{session_name}/input",
    Action.SUPERVISE,
    reply=ExecInput,
    scope=AccessScope.SESSION,
    other_replies=(MediaType.PACKED,),
)
async def fetch_exec_input(
    request: Request,
    session_name: str,
    after: NonNegative = 0,
    limit: NonNegative = EXEC_CHUNK_BYTES_MAX,
    signals: NonNegative = 0,
    closed: bool = False,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
    packed: bool = False,
) -> Response:
    """Read the user's input from byte `after` on, the later of their signals, or a new terminal size; waits up to `wait_s` for news.

    The request acknowledges the bytes before `after`, the first `signals` signals and, with `closed`, the end of the input. 404 once the
    user has left. With `packed` the reply is MessagePack.
    """
    runtime = runtime_of(request)
    clock = runtime.services.clock
    session = runtime.sessions.for_supervisor(session_name, _name_of(request))
    until_s = clock.boottime_s() + min(wait_s, runtime.services.limits.wait_s)
    session.input.acknowledge(after)
    session.notify()  # the user may send more
    while True:
        data = session.input.read(after, min(limit, EXEC_CHUNK_BYTES_MAX))
        at_end = session.input_closed and after + len(data) >= session.input.end
        left_s = until_s - clock.boottime_s()
        news = data or session.resized or (at_end and not closed) or len(session.signals) > signals
        if news or left_s <= 0:
            break
        await session.wait(min(left_s, 1.0))
        session = runtime.sessions.for_supervisor(session_name, _name_of(request))
    if data or len(session.signals) > signals:
        runtime.services.client_active(session.job_id)
    session.resized = False
    typed = ExecInput(data=data, closed=at_end, rows=session.rows, cols=session.cols, signals=session.signals[signals:])
    return Response(pack(typed), media_type=MediaType.PACKED.value) if packed else json_response(typed)


@routes.post(
    "/v1/node/exec/{session_name}/output",
    Action.SUPERVISE,
    body=ExecOutput,
    reply=MediaType.NOTHING,
    status=204,
    scope=AccessScope.SESSION,
)
async def receive_exec_output(request: Request, session_name: str, packed: bool = False) -> Response:
    """Receive a command's output. Answered once there is buffer space, so that a slow reader slows the command down.

    With `packed` the body is MessagePack.
    """
    runtime = runtime_of(request)
    clock, limits = runtime.services.clock, runtime.services.limits
    session = runtime.sessions.for_supervisor(session_name, _name_of(request))
    body = await read_body(request, limits.body_bytes)
    said = _unpacked(body) if packed else decode_body(body, ExecOutput)
    if len(said.data) > EXEC_CHUNK_BYTES_MAX or said.offset < 0:
        raise BadRequest(
            f"exec output of {len(said.data)} bytes at {said.offset}", hint=f"at most {EXEC_CHUNK_BYTES_MAX} at once"
        )
    until_s = clock.boottime_s() + _EXEC_ROOM_WAIT_S
    while not session.output.append(said.offset, said.data, limits.exec_buffer_bytes):
        left_s = until_s - clock.boottime_s()
        if left_s <= 0:
            raise TryLater("the session's output buffer is full", hint="send the same piece again")
        await session.wait(min(left_s, 1.0))
        session = runtime.sessions.for_supervisor(session_name, _name_of(request))
    if said.exit_code is not None or said.error:
        session.exit_code = said.exit_code
        session.error = session.failure(said.error) if said.error else None
    session.notify()
    return no_content()


def _unpacked(body: bytes) -> ExecOutput:
    """Decode output in MessagePack.

    Raises:
        BadRequest: it is not.
    """
    try:
        return unpack(body, ExecOutput)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}", hint="GET /v1/openapi.json describes it") from error


def _name_of(request: Request) -> NodeId:
    """Return the calling supervisor's name: the node's, or that of its seat if it runs for one attempt."""
    name = caller_of(request).node_id
    assert name is not None, "only node tokens have the action SUPERVISE"
    return name


_OF_THE_HEAD: Final = (
    SupervisorRegistered,
    NodeListed,
    DiskFreed,
    SeatLost,
    AttemptWithdrawn,
    AttemptQueued,
    AttemptReclaimed,
    ProviderReported,
    MachinesListed,
    UsageCounted,
    IdleJobsObserved,
    LoadObserved,
    BudgetReached,
    OutputsReached,
)


def _report_of(runtime: ApiRuntime, name: NodeId, supervisor_id: SupervisorId, framed: Envelope) -> Report:
    """Decode an event, and check that this supervisor may report it.

    Raises:
        BadRequest: this head does not know the event.
        NotPermitted: it is about another node or supervisor, or about a job that this node runs no part of.
    """
    try:
        event = decode_event(framed)
    except UnknownEnvelopeKind as error:
        raise BadRequest(f"event {framed.seq}: {error}", hint="update the head to the supervisor's release") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadRequest(f"event {framed.seq} ({framed.kind}): {error}") from error
    assert not isinstance(event, _OF_THE_HEAD), "these are not sent as events"
    if isinstance(event, NodeDied):
        if (event.node_id, event.supervisor_id) != (name, supervisor_id):  # a seat's name is not the node's
            raise NotPermitted(f"event {framed.seq}: supervisor {supervisor_id} may report only that it leaves {name}")
        return event
    node_id = node_of_supervisor(name)
    if isinstance(event, PowerLimited | NodeHealthReported | DatasetsHeld):
        if event.node_id != name:
            raise NotPermitted(f"event {framed.seq}: {name} may not report for node {event.node_id}")
        return event
    match event:
        case TaskExited():
            reporter, epoch = event.exit.node_id, event.epoch
        case CheckpointSaved():
            reporter, epoch = event.node_id, event.resume.epoch
        case ProgressReported() | CheckpointFailed():
            reporter, epoch = node_id, event.epoch
        case _:
            reporter, epoch = event.node_id, event.epoch
    if reporter != node_id:
        raise NotPermitted(f"event {framed.seq}: node {node_id} may not report for node {reporter}")
    require_own_seat(name, event.job_id, epoch)
    runtime.supervisors.require_grant(node_id, event.job_id, epoch)
    return event


def _checked_key(runtime: ApiRuntime, supervisor: NodeId, chunk: StreamChunk) -> StreamKey:
    """Return the stream of a chunk that this node may send.

    Raises:
        BadRequest: the chunk is malformed.
        NotPermitted: the stream belongs to another node.
    """
    name = _STREAM.fullmatch(chunk.stream)
    if name is None or chunk.offset < 0 or len(chunk.data) > STREAM_CHUNK_BYTES_MAX:
        raise BadRequest(
            f"stream {chunk.stream[:40]!r}: {len(chunk.data)} bytes at {chunk.offset}",
            hint=f"use rank-K, stacks-K, steps-K or supervisor-K, and at most {STREAM_CHUNK_BYTES_MAX} bytes per chunk",
        )
    require_own_seat(supervisor, chunk.job_id, chunk.epoch)
    node_id = node_of_supervisor(supervisor)
    grant, folder = runtime.supervisors.require_grant(node_id, chunk.job_id, chunk.epoch)
    number = int(name[2])
    own = (
        range(grant.first_rank, grant.first_rank + grant.tasks) if name[1] in ("rank", "stacks") else (grant.node_rank,)
    )
    if number not in own:
        raise NotPermitted(f"node {node_id} may not write {chunk.stream} of job {chunk.job_id} epoch {chunk.epoch}")
    return StreamKey(job_id=chunk.job_id, epoch=chunk.epoch, folder=folder, stream=chunk.stream)


def _record_steps(
    runtime: ApiRuntime,
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
        reports += runtime.services.telemetry.put_steps(
            key.job_id, key.epoch, int(number), data[start - offset : end - offset]
        )
    if reports:
        runtime.services.controller.report(reports)
