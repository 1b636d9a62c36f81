"""Logs of a job: pages of chunks, and streams that lose and repeat nothing across reconnects and attempts.

The position of a follower is its cursor (api.cursor). The head sends it with every batch, and the follower returns it as Last-Event-ID
or ?cursor=. Chunks end between characters: an incomplete character waits for the rest of its bytes, or for the end of the job.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import authorize_job, reauthorize, require_job
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import (
    QUERY_DIGITS_MAX,
    QUERY_NUMBER_MAX,
    MediaType,
    OptionalNonNegative,
    RouteTable,
)
from phalanx.api.live.cursor import Cursor, read_cursor, write_cursor
from phalanx.api.live.event_framing import HEARTBEAT, encode_event
from phalanx.api.live.event_streams import EventStream
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.api.services import HeadServices
from phalanx.api.views.job_records import end_event, state_event
from phalanx.api.views.removed_files import removal_note
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.retention import RetainedFiles
from phalanx.core.work.users import Action
from phalanx.ports.logs import StreamKey
from phalanx.wire.api.output import LogChunk, LogsReply, StateEvent

CHUNK_BYTES: Final = 1 << 16
BATCH_BYTES: Final = 1 << 20
# Up to this many streams every event has a cursor; above it only the last of a batch (clients drop duplicates by offset).
_CURSORS_EACH: Final = 64
_WORDS: Final = ("supervisor", "stacks")  # streams that are not output of a rank

routes = RouteTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSelector:
    """Selects streams: of one rank, of all ranks, notes of supervisors, or stacks of hung ranks; of one attempt or of all."""

    rank: str = "all"
    epoch: int | None = None

    def selects(self, key: StreamKey) -> bool:
        """Whether a stream is selected."""
        if self.epoch is not None and key.epoch != self.epoch:
            return False
        kind, _, number = key.stream.partition("-")
        if self.rank == "all":
            return kind == "rank"
        return kind == self.rank if self.rank in _WORDS else kind == "rank" and number == self.rank


@routes.get("/v1/jobs/{job_id}/logs", Action.VIEW_OUTPUT, reply=LogsReply, other_replies=(MediaType.EVENTS,))
async def job_logs(
    request: Request,
    job_id: JobId,
    rank: str = "all",
    epoch: Annotated[int | None, Query(ge=1, le=QUERY_NUMBER_MAX)] = None,
    cursor: str = "",
    follow: bool = False,
    limit_bytes: Annotated[int, Query(ge=1, le=8 * BATCH_BYTES)] = BATCH_BYTES,
    tail_bytes: OptionalNonNegative = None,
) -> Response:
    """Read the output of a job's ranks, by attempt and rank. `tail_bytes` starts at most this far before the end of each stream.

    Of an ended job whose nodes still send output, `more` stays true until all is there.
    With `follow=1` or `Accept: text/event-stream` the reply is a stream of events: `log`, `state`, and `end` after the job's last byte.
    """
    runtime = runtime_of(request)
    job = authorize_job(runtime.services.store, caller_of(request), Action.VIEW_OUTPUT, job_id)
    if rank not in ("all", *_WORDS) and (not rank.isdecimal() or len(rank) > QUERY_DIGITS_MAX):
        raise BadRequest(f"rank: {rank[:60]!r} is not valid", hint="use a number, all, supervisor or stacks")
    wanted, attempts = StreamSelector(rank=rank, epoch=epoch), runtime.services.store.attempts(job_id)
    place = read_cursor(request.headers.get("last-event-id") or cursor)
    if tail_bytes is not None and not place:
        place = await run_in_thread(_tails, runtime.services, attempts, wanted, tail_bytes)
    check = reauthorize(runtime.authenticator, runtime.services.store, caller_of(request), Action.VIEW_OUTPUT, job_id)
    if follow or "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(runtime, caller_of(request).user, _follow(runtime, job_id, wanted, place), check)
    expected = is_output_expected(runtime, job, attempts, wanted)
    with runtime.hub.follow(job_id) as watch:
        chunks = await run_in_thread(read_batch, runtime.services, attempts, wanted, place, limit_bytes)
        if expected and not chunks:  # so that no client reads in a busy loop
            await watch.wait(runtime.services.limits.recheck_s)
    more = expected or (bool(chunks) and sum(chunk.end - chunk.offset for chunk in chunks) >= limit_bytes)
    note = "" if chunks or cursor else await run_in_thread(_missing_output_note, runtime.services, job, attempts)
    return json_response(LogsReply(chunks=chunks, cursor=write_cursor(place), more=more, note=note))


def is_output_expected(runtime: ApiRuntime, job: Job, attempts: Sequence[Attempt], selector: StreamSelector) -> bool:
    """Whether the job has ended and nodes still send selected output of it.

    Call it before the output is read: otherwise the last bytes, if they arrive in between, count as read.
    """
    if not job.state.terminal:
        return False
    clock = runtime.services.clock
    expected = runtime.pending_output.streams(attempts, clock.boottime_s(), clock.now_s())
    return any(selector.selects(key) for key in expected)


def read_batch(
    services: HeadServices,
    attempts: Sequence[Attempt],
    selector: StreamSelector,
    cursor: Cursor,
    limit_bytes: int,
    *,
    ended: bool = False,
) -> list[LogChunk]:
    """Read on from `cursor` and advance it: by attempt, then by stream. `ended`: also return incomplete characters at an end."""
    chunks: list[LogChunk] = []
    for key in services.logs.streams(attempts):
        if not selector.selects(key):
            continue
        number = key.stream.partition("-")[2]
        rank = int(number) if key.stream.startswith("rank-") else None
        begin = services.logs.begin(key)
        if (offset := cursor.get((key.epoch, key.stream), 0)) < begin:
            begin += services.logs.read(key, begin, CHUNK_BYTES).find(b"\n") + 1
            text = (
                f"[phalanx] {begin - offset} bytes of older output were removed: of a service the newest part is kept\n"
            )
            chunks.append(LogChunk(epoch=key.epoch, stream=key.stream, rank=rank, offset=offset, end=begin, text=text))
            cursor[key.epoch, key.stream] = begin
        while limit_bytes > 0:
            offset = cursor.get((key.epoch, key.stream), 0)
            piece = services.logs.read(key, offset, min(CHUNK_BYTES, max(limit_bytes, 4)))
            whole = piece if ended and len(piece) < CHUNK_BYTES else complete_characters(piece)
            if not whole or services.logs.begin(key) > offset:  # removed while it was read
                break
            end = offset + len(whole)
            text = whole.decode("utf-8", "replace")
            chunks.append(LogChunk(epoch=key.epoch, stream=key.stream, rank=rank, offset=offset, end=end, text=text))
            cursor[key.epoch, key.stream] = end
            limit_bytes -= len(whole)
    return chunks


def _missing_output_note(services: HeadServices, job: Job, attempts: Sequence[Attempt]) -> str:
    """Explain why the output of a job is missing: it was removed, or another head led when it ran that does not share its files."""
    removed = removal_note(services.store, job.id, RetainedFiles.LOGS) if job.state.terminal else ""
    if removed:
        return removed
    if (
        not services.output_elsewhere
        or services.leader_status is None
        or not attempts
        or services.logs.streams(attempts)
    ):
        return ""
    if min(attempt.placed_s for attempt in attempts) >= services.leader_status.leader().since_s:
        return ""
    return (
        f"The output of job {job.id} is in the state folder of another head ({services.output_elsewhere}), "
        "because the heads share no folder of files."
    )


def complete_characters(piece: bytes) -> bytes:
    """Return the bytes up to the last complete UTF-8 character; bytes that are not UTF-8 are included."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue  # a continuation byte: the character's first byte is further left
        width = 4 if byte >= 0b1111_0000 else 3 if byte >= 0b1110_0000 else 2 if byte >= 0b1100_0000 else 1
        return piece if width <= back else piece[:-back]
    return piece


def _tails(services: HeadServices, attempts: Sequence[Attempt], wanted: StreamSelector, tail_bytes: int) -> Cursor:
    """Return the place `tail_bytes` before the end of each stream, moved forward to the start of a line if there is one."""
    place: Cursor = {}
    for key in services.logs.streams(attempts):
        offset = max(0, services.logs.end(key) - tail_bytes)
        offset = max(offset, services.logs.begin(key))
        if wanted.selects(key) and offset:
            newline = services.logs.read(key, offset, CHUNK_BYTES).find(b"\n")
            place[key.epoch, key.stream] = offset + newline + 1
    return place


async def _follow(runtime: ApiRuntime, job_id: JobId, wanted: StreamSelector, place: Cursor) -> AsyncIterator[bytes]:
    """Yield events until the job has ended and all its output was sent."""
    services, limits = runtime.services, runtime.services.limits
    sent: StateEvent | None = None
    quiet_s = 0.0
    with runtime.hub.follow(job_id) as watch:
        while not runtime.hub.closing:
            # Read the job, and whether output is expected, before the output: the end names what supervisors send after it.
            job = require_job(services.store, job_id)
            attempts = services.store.attempts(job_id) if job.epoch else []
            expected = is_output_expected(runtime, job, attempts, wanted)
            state = state_event(job, attempts[-1] if attempts else None, services.controller.wait_reasons.get(job_id))
            chunks = await run_in_thread(read_batch, services, attempts, wanted, place, BATCH_BYTES)
            if state != sent and not job.state.terminal:
                sent = state
                yield encode_event("state", state)
            if chunks:
                quiet_s = 0.0
                for piece in _log_events(chunks, place):
                    yield piece
                continue
            if job.state.terminal and not expected:
                chunks = await run_in_thread(read_batch, services, attempts, wanted, place, BATCH_BYTES, ended=True)
                for piece in _log_events(chunks, place):
                    yield piece
                if state != sent:
                    yield encode_event("state", state)
                yield encode_event("end", end_event(job), write_cursor(place))
                return
            if quiet_s >= limits.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT
            began_s = services.clock.boottime_s()
            await watch.wait(limits.recheck_s)
            quiet_s += services.clock.boottime_s() - began_s


def _log_events(chunks: list[LogChunk], place: Cursor) -> list[bytes]:
    """Return chunks as events. Each has the cursor after it; with many streams only the last one has, as cursors are then long."""
    if len(place) > _CURSORS_EACH:
        last = len(chunks) - 1
        mark = write_cursor(place)
        return [encode_event("log", chunk, mark if number == last else "") for number, chunk in enumerate(chunks)]
    running = dict(place)
    for chunk in reversed(chunks):
        running[chunk.epoch, chunk.stream] = min(running[chunk.epoch, chunk.stream], chunk.offset)
    events = []
    for chunk in chunks:
        running[chunk.epoch, chunk.stream] = chunk.end
        events.append(encode_event("log", chunk, write_cursor(running)))
    return events
