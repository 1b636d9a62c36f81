"""Logs of a job: pages of chunks, and streams that follow without a gap or a double across reconnects and attempts.

A follower's place is its cursor (api.cursor). It is told with every batch, and handed back as Last-Event-ID or ?cursor=.
Chunks end between characters: bytes of a half one wait for their rest, or for the job's end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import reply
from phalanx.api.cursor import Cursor, read_cursor, write_cursor
from phalanx.api.gate import known_job, still, touch
from phalanx.api.parts import HeadParts
from phalanx.api.routes import NUMBER_DIGITS_MAX, WHOLE_MAX, Routes, Shown, WholeOrNone
from phalanx.api.runtime import Runtime, caller_of, off_loop, runtime_of
from phalanx.api.sse import HEARTBEAT, EventStream, event
from phalanx.api.views import end_event, state_event
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.core.work.job import Job
from phalanx.core.work.people import Action
from phalanx.ports.logs import StreamKey
from phalanx.wire.api.output import LogChunk, LogsReply, StateEvent

CHUNK_BYTES: Final = 1 << 16
BATCH_BYTES: Final = 1 << 20
_CURSORS_EACH: Final = (
    64  # up to so many streams each event tells the cursor; past it one for the batch (clients drop doubles by offset)
)

_WORDS: Final = ("supervisor", "stacks")  # streams that are no rank's output

routes = Routes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which streams: one rank, all ranks, the supervisors' notes, or stacks of ranks that hung; of one attempt or of all."""

    rank: str = "all"
    epoch: int | None = None

    def takes(self, key: StreamKey) -> bool:
        """Whether a stream is wanted."""
        if self.epoch is not None and key.epoch != self.epoch:
            return False
        kind, _, number = key.stream.partition("-")
        if self.rank == "all":
            return kind == "rank"
        return kind == self.rank if self.rank in _WORDS else kind == "rank" and number == self.rank


@routes.get("/v1/jobs/{job_id}/logs", Action.SEE_OUTPUT, reply=LogsReply, also=(Shown.EVENTS,))
async def job_logs(
    request: Request,
    job_id: JobId,
    rank: str = "all",
    epoch: Annotated[int | None, Query(ge=1, le=WHOLE_MAX)] = None,
    cursor: str = "",
    follow: bool = False,
    limit_bytes: Annotated[int, Query(ge=1, le=8 * BATCH_BYTES)] = BATCH_BYTES,
    tail_bytes: WholeOrNone = None,
) -> Response:
    """Output of a job's ranks, by attempt and rank. `tail_bytes` begins at most so far before each stream's end.

    With `follow=1` or `Accept: text/event-stream` a stream of events: `log`, `state`, and `end` after the last byte of a job that is over.
    """
    runtime = runtime_of(request)
    job = touch(runtime.parts.store, caller_of(request), Action.SEE_OUTPUT, job_id)
    if rank not in ("all", *_WORDS) and (not rank.isdecimal() or len(rank) > NUMBER_DIGITS_MAX):
        raise BadRequest(f"rank: {rank[:60]!r} is none", hint="a number, all, supervisor, or stacks")
    wanted = Wanted(rank=rank, epoch=epoch)
    place = read_cursor(request.headers.get("last-event-id") or cursor)
    if tail_bytes is not None and not place:
        place = await off_loop(_tails, runtime.parts, job_id, wanted, tail_bytes)
    ask = still(runtime.gate, runtime.parts.store, caller_of(request), Action.SEE_OUTPUT, job_id)
    if follow or "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(runtime, caller_of(request).user, _follow(runtime, job_id, wanted, place), ask)
    chunks = await off_loop(read_batch, runtime.parts, job_id, wanted, place, limit_bytes)
    more = bool(chunks) and sum(chunk.end - chunk.offset for chunk in chunks) >= limit_bytes
    note = "" if chunks or cursor else await off_loop(_elsewhere, runtime.parts, job)
    return reply(LogsReply(chunks=chunks, cursor=write_cursor(place), more=more, note=note))


def read_batch(
    parts: HeadParts, job_id: JobId, wanted: Wanted, place: Cursor, limit_bytes: int, *, over: bool = False
) -> list[LogChunk]:
    """What is there past `place`, which is moved on: by attempt, then by stream. `over`: half characters at an end stay halves."""
    chunks: list[LogChunk] = []
    for key in parts.logs.streams(job_id):
        if not wanted.takes(key):
            continue
        while limit_bytes > 0:
            offset = place.get((key.epoch, key.stream), 0)
            piece = parts.logs.read(key, offset, min(CHUNK_BYTES, max(limit_bytes, 4)))
            whole = piece if over and len(piece) < CHUNK_BYTES else whole_characters(piece)
            if not whole:
                break
            end = offset + len(whole)
            number = key.stream.partition("-")[2]
            rank = int(number) if key.stream.startswith("rank-") else None
            text = whole.decode("utf-8", "replace")
            chunks.append(LogChunk(epoch=key.epoch, stream=key.stream, rank=rank, offset=offset, end=end, text=text))
            place[key.epoch, key.stream] = end
            limit_bytes -= len(whole)
    return chunks


def _elsewhere(parts: HeadParts, job: Job) -> str:
    """Why a job that ran has no output here: another head led then, and its files are its own."""
    if not parts.earlier_output or parts.among is None or not job.epoch or parts.logs.streams(job.id):
        return ""
    if min(attempt.placed_s for attempt in parts.store.attempts(job.id)) >= parts.among.leader().since_s:
        return ""
    return (
        f"what job {job.id} wrote lies in the state folder of another head ({parts.earlier_output}); "
        "heads that are started with --files DIR share it"
    )


def whole_characters(piece: bytes) -> bytes:
    """The bytes up to the last whole UTF-8 character; what is no UTF-8 at all is kept."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue  # inside a character: its first byte is further left
        width = 4 if byte >= 0b1111_0000 else 3 if byte >= 0b1110_0000 else 2 if byte >= 0b1100_0000 else 1
        return piece if width <= back else piece[:-back]
    return piece


def _tails(parts: HeadParts, job_id: JobId, wanted: Wanted, tail_bytes: int) -> Cursor:
    """A place so far before each stream's end, moved on to the next line where there is one."""
    place: Cursor = {}
    for key in parts.logs.streams(job_id):
        offset = max(0, parts.logs.end(key) - tail_bytes)
        if wanted.takes(key) and offset:
            newline = parts.logs.read(key, offset, CHUNK_BYTES).find(b"\n")
            place[key.epoch, key.stream] = offset + newline + 1
    return place


async def _follow(runtime: Runtime, job_id: JobId, wanted: Wanted, place: Cursor) -> AsyncIterator[bytes]:
    """Events until the job is over and read to its end."""
    parts, limits = runtime.parts, runtime.parts.limits
    told: StateEvent | None = None
    quiet_s = 0.0
    with runtime.hub.watch(job_id) as watch:
        while not runtime.hub.closing:
            # The job is read before its output: supervisors ship all of it before they report the end, so what is there now is all.
            job = known_job(parts.store, job_id)
            attempts = parts.store.attempts(job_id) if job.epoch else []
            state = state_event(job, attempts[-1] if attempts else None, parts.driver.waits.get(job_id))
            chunks = await off_loop(read_batch, parts, job_id, wanted, place, BATCH_BYTES)
            if state != told and not job.state.terminal:
                told = state
                yield event("state", state)
            if chunks:
                quiet_s = 0.0
                for piece in _told(chunks, place):
                    yield piece
                continue
            if job.state.terminal:
                chunks = await off_loop(read_batch, parts, job_id, wanted, place, BATCH_BYTES, over=True)
                for piece in _told(chunks, place):
                    yield piece
                if state != told:
                    yield event("state", state)
                yield event("end", end_event(job), write_cursor(place))
                return
            if quiet_s >= limits.heartbeat_s:
                quiet_s = 0.0
                yield HEARTBEAT
            began_s = parts.clock.boottime_s()
            await watch.wait(limits.recheck_s)
            quiet_s += parts.clock.boottime_s() - began_s


def _told(chunks: list[LogChunk], place: Cursor) -> list[bytes]:
    """Chunks as events, each with the place after it, or the last alone where that would be more than the text."""
    if len(place) > _CURSORS_EACH:
        last = len(chunks) - 1
        mark = write_cursor(place)
        return [event("log", chunk, mark if number == last else "") for number, chunk in enumerate(chunks)]
    running = dict(place)
    for chunk in reversed(chunks):
        running[chunk.epoch, chunk.stream] = min(running[chunk.epoch, chunk.stream], chunk.offset)
    events = []
    for chunk in chunks:
        running[chunk.epoch, chunk.stream] = chunk.end
        events.append(event("log", chunk, write_cursor(running)))
    return events
