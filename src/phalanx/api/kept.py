"""Uploads and downloads of checkpoints, for gangs whose nodes do not share the head's folders (wire.kept).

A supervisor may write only files of the live attempt that it runs a part of, and read only checkpoints that its job may resume from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.bodies import read_body, reply
from phalanx.api.keeping import live_attempt
from phalanx.api.kept_files import Place
from phalanx.api.routes import Routes, Shown, Whole
from phalanx.api.runtime import Runtime, caller_of, off_loop, runtime_of
from phalanx.core.access.rules import Reach
from phalanx.core.errors import Conflict, NotPermitted, TryLater
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.allocation import Grant
from phalanx.core.work.attempt import Attempt, MemberState
from phalanx.core.work.people import Action
from phalanx.core.work.seat import node_of_supervisor, read_seat
from phalanx.wire.kept import PIECE_BYTES_MAX, KeptReply, StorageReply, TakenReply
from phalanx.wire.manifest import MANIFEST_BYTES_MAX

_PIECES_MAX: Final = 32  # held in memory at once: 128 MiB; further requests are answered with TryLater
_READ_BYTES: Final = 1 << 18
_LOOK_S: Final = 0.2  # how late a poll notices that a checkpoint is complete

routes = Routes()
Digest = Annotated[str, Query(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Query(min_length=1, max_length=4096)]


class AttemptOver(Conflict):
    """The attempt has ended; the head accepts no more files of it."""

    code = "attempt_over"


@routes.get("/v1/node/storage", Action.SUPERVISE, reply=StorageReply, reach=Reach.NOBODY)
async def show_storage(request: Request) -> Response:
    """Show the head's folders, and the nonce by which a node proves that it shares them."""
    parts, kept = runtime_of(request).parts, runtime_of(request).kept
    return reply(StorageReply(checkpoint_root=parts.checkpoint_root, output_root=parts.output_root, nonce=kept.nonce))


@routes.put(
    "/v1/node/checkpoints/manifest", Action.SUPERVISE, body=Shown.BYTES, reply=KeptReply, body_limit="manifest_bytes"
)
async def begin_checkpoint(request: Request, job_id: JobId, epoch: Whole, step: Whole, digest: Digest) -> Response:
    """Begin or resume the upload of a checkpoint; the answer lists the received bytes of each file."""
    runtime = runtime_of(request)
    _, published = await off_loop(live_member, runtime, of_attempt(request, job_id, epoch)[0], job_id, Epoch(epoch))
    encoded = await read_body(request, MANIFEST_BYTES_MAX)
    place = Place(job_id=job_id, epoch=Epoch(epoch), step=step, digest=digest)
    whole, missing_bytes, ends = await off_loop(runtime.kept.begin, place, encoded, published=published)
    return reply(KeptReply(whole=whole, missing_bytes=missing_bytes, ends=ends))


@routes.put("/v1/node/checkpoints/file", Action.SUPERVISE, body=Shown.BYTES, reply=TakenReply, body_limit="piece_bytes")
async def take_checkpoint_piece(
    request: Request, job_id: JobId, epoch: Whole, step: Whole, digest: Digest, path: Name, offset: Whole
) -> Response:
    """Store a piece of a checkpoint's file. The last piece is answered once the file is verified and durable."""
    runtime = runtime_of(request)
    node_id = of_attempt(request, job_id, epoch)[0]
    carried = runtime.carried
    if carried.pieces >= _PIECES_MAX:
        raise TryLater(f"the head is receiving {_PIECES_MAX} pieces already", hint="send it again in a moment")
    carried.pieces += 1
    try:
        await off_loop(live_member, runtime, node_id, job_id, Epoch(epoch))
        data = await read_body(request, PIECE_BYTES_MAX)
        place = Place(job_id=job_id, epoch=Epoch(epoch), step=step, digest=digest)
        end = await off_loop(runtime.kept.take, place, path, offset, data)
    finally:
        carried.pieces -= 1
    runtime.count("kept_bytes", len(data))
    return reply(TakenReply(end=end))


@routes.get("/v1/node/checkpoints", Action.SUPERVISE, reply=KeptReply)
async def show_checkpoint(
    request: Request,
    job_id: JobId,
    epoch: Whole,
    step: Whole,
    digest: Digest,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """Show what is missing of a checkpoint; waits up to `wait_s` until less is missing. The asking node has sent all its files."""
    runtime = runtime_of(request)
    node_id, clock = of_attempt(request, job_id, epoch)[0], runtime.parts.clock
    place = Place(job_id=job_id, epoch=Epoch(epoch), step=step, digest=digest)
    until_s = clock.boottime_s() + min(wait_s, runtime.parts.limits.wait_s)
    first: int | None = None
    with runtime.hub.bell() as watch:
        while True:
            attempt, _ = await off_loop(live_member, runtime, node_id, job_id, Epoch(epoch))
            done = runtime.carried.done.setdefault(place, set())
            done.add(node_id)
            whole, missing_bytes = await off_loop(runtime.kept.state, place)
            lost = "" if whole else _lost_node(attempt, done)
            first = missing_bytes if first is None else first
            left_s = until_s - clock.boottime_s()
            if whole or lost or missing_bytes < first or left_s <= 0 or runtime.hub.closing:
                break
            await watch.wait(min(_LOOK_S, left_s))
    if whole:
        runtime.carried.done.pop(place, None)
    return reply(KeptReply(whole=whole, missing_bytes=missing_bytes, lost=lost))


@routes.get("/v1/node/checkpoints/file", Action.SUPERVISE, reply=Shown.BYTES)
async def give_checkpoint_file(
    request: Request, job_id: JobId, epoch: Whole, of_epoch: Whole, step: Whole, path: Name, offset: Whole = 0
) -> Response:
    """Download a file of a checkpoint that the job may resume from, from byte `offset` on; the manifest is one of the files."""
    runtime = runtime_of(request)
    await off_loop(live_member, runtime, of_attempt(request, job_id, epoch)[0], job_id, Epoch(epoch))
    file = await off_loop(runtime.kept.path, job_id, Epoch(of_epoch), step, path)
    return await send_from(file, offset)


async def send_from(path: str, offset: int) -> Response:
    """Return a response that streams a file's bytes from `offset` on."""
    pieces = _pieces(path, offset)
    return StreamingResponse(pieces, media_type=Shown.BYTES.value)


def _pieces(path: str, offset: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while piece := file.read(_READ_BYTES):
            yield piece


def of_attempt(request: Request, job_id: JobId, epoch: int) -> tuple[NodeId, Grant]:
    """Return the calling supervisor's node and its part of the attempt.

    Raises:
        NotPermitted: the supervisor runs for the seat of another attempt, or runs no part of this one.
    """
    name = caller_of(request).node_id
    assert name is not None, "only node tokens have the action SUPERVISE"
    seat = read_seat(name)
    if seat is not None and (seat.job_id, seat.epoch) != (job_id, epoch):
        raise NotPermitted(f"the supervisor on {name} does not run job {job_id} epoch {epoch}")
    node_id = node_of_supervisor(name)
    return node_id, runtime_of(request).supervisors.grant(node_id, job_id, Epoch(epoch))


def live_member(runtime: Runtime, node_id: NodeId, job_id: JobId, epoch: Epoch) -> tuple[Attempt, frozenset[str]]:
    """Return the live attempt, and the digests of the published checkpoints of its job.

    Raises:
        AttemptOver: the attempt has ended, or it has lost this node.
    """
    store = runtime.parts.store
    attempt = live_attempt(store, job_id)
    member = None
    if attempt is not None and attempt.epoch == epoch:
        member = next((m for m in attempt.members if m.node_id == node_id), None)
    if attempt is None or member is None or member.state is MemberState.LOST:
        raise AttemptOver(
            f"attempt {epoch} of job {job_id} has ended on {node_id}; the head accepts no more of its files"
        )
    job = store.job(job_id)
    return attempt, frozenset(() if job is None else (one.digest for one in job.checkpoints))


def _lost_node(attempt: Attempt, done: set[NodeId]) -> str:
    """Return a lost node that had not sent all its files; "" if there is none."""
    return next((m.node_id for m in attempt.members if m.state is MemberState.LOST and m.node_id not in done), "")
