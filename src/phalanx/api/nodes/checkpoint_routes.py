"""Uploads and downloads of checkpoints, for gangs whose nodes do not share the head's folders (wire.stored_files).

A supervisor may write only files of the live attempt that it runs a part of, and read only checkpoints that its job may resume from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.http.bodies import json_response, read_body
from phalanx.api.http.routing import MediaType, NonNegative, RouteTable
from phalanx.api.nodes.retention import live_attempt
from phalanx.api.runtime import (
    ApiRuntime,
    caller_of,
    run_in_thread,
    runtime_of,
)
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import Conflict, NotFound, NotPermitted, TryLater
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt, MemberState
from phalanx.core.work.seats import node_of_supervisor, parse_seat
from phalanx.core.work.users import Action
from phalanx.store.checkpoints.copies import CheckpointKey
from phalanx.wire.manifest import MANIFEST_BYTES_MAX
from phalanx.wire.stored_files import (
    PIECE_BYTES_MAX,
    CheckpointUploadReply,
    FileEndReply,
    StorageReply,
)

_PIECES_MAX: Final = 32  # held in memory at once: 128 MiB; further requests are answered with TryLater
_READ_BYTES: Final = 1 << 18
_LOOK_S: Final = 0.2  # how late a poll notices that a checkpoint is complete

routes = RouteTable()
DigestParameter = Annotated[str, Query(pattern="^[0-9a-f]{64}$")]
PathParameter = Annotated[str, Query(min_length=1, max_length=4096)]


class AttemptEnded(Conflict):
    """The attempt has ended; the head accepts no more files of it."""

    code = "attempt_over"


@routes.get("/v1/node/storage", Action.SUPERVISE, reply=StorageReply, scope=AccessScope.UNOWNED)
async def show_storage(request: Request) -> Response:
    """Show the head's folders, and the nonce by which a node proves that it shares them."""
    services, copies = runtime_of(request).services, runtime_of(request).checkpoint_copies
    return json_response(
        StorageReply(checkpoint_root=services.checkpoint_root, output_root=services.output_root, nonce=copies.nonce)
    )


@routes.put(
    "/v1/node/checkpoints/manifest",
    Action.SUPERVISE,
    body=MediaType.BYTES,
    reply=CheckpointUploadReply,
    body_limit="manifest_bytes",
)
async def begin_checkpoint(
    request: Request, job_id: JobId, epoch: NonNegative, step: NonNegative, digest: DigestParameter
) -> Response:
    """Begin or resume the upload of a checkpoint; the answer lists the received bytes of each file."""
    runtime = runtime_of(request)
    attempt, published = await run_in_thread(
        require_live_member, runtime, grant_of_caller(request, job_id, epoch)[0], job_id, Epoch(epoch)
    )
    encoded = await read_body(request, MANIFEST_BYTES_MAX)
    place = _key_of(attempt, step, digest)
    whole, missing_bytes, ends = await run_in_thread(
        runtime.checkpoint_copies.begin_upload, place, encoded, published=published
    )
    return json_response(CheckpointUploadReply(complete=whole, missing_bytes=missing_bytes, sizes=ends))


@routes.put(
    "/v1/node/checkpoints/file", Action.SUPERVISE, body=MediaType.BYTES, reply=FileEndReply, body_limit="piece_bytes"
)
async def receive_checkpoint_piece(
    request: Request,
    job_id: JobId,
    epoch: NonNegative,
    step: NonNegative,
    digest: DigestParameter,
    path: PathParameter,
    offset: NonNegative,
) -> Response:
    """Store a piece of a checkpoint's file. The last piece is answered once the file is verified and durable."""
    runtime = runtime_of(request)
    node_id = grant_of_caller(request, job_id, epoch)[0]
    uploads = runtime.pending_uploads
    if uploads.pieces_in_progress >= _PIECES_MAX:
        raise TryLater(f"the head is receiving {_PIECES_MAX} pieces already", hint="send it again in a moment")
    uploads.pieces_in_progress += 1
    try:
        attempt, _ = await run_in_thread(require_live_member, runtime, node_id, job_id, Epoch(epoch))
        data = await read_body(request, PIECE_BYTES_MAX)
        end = await run_in_thread(runtime.checkpoint_copies.append, _key_of(attempt, step, digest), path, offset, data)
    finally:
        uploads.pieces_in_progress -= 1
    runtime.count("kept_bytes", len(data))
    return json_response(FileEndReply(end=end))


@routes.get("/v1/node/checkpoints", Action.SUPERVISE, reply=CheckpointUploadReply)
async def show_checkpoint(
    request: Request,
    job_id: JobId,
    epoch: NonNegative,
    step: NonNegative,
    digest: DigestParameter,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """Show what is missing of a checkpoint; waits up to `wait_s` until less is missing. The asking node has sent all its files."""
    runtime = runtime_of(request)
    node_id, clock = grant_of_caller(request, job_id, epoch)[0], runtime.services.clock
    until_s = clock.boottime_s() + min(wait_s, runtime.services.limits.wait_s)
    first: int | None = None
    with runtime.hub.private_wakeup() as watch:
        while True:
            attempt, _ = await run_in_thread(require_live_member, runtime, node_id, job_id, Epoch(epoch))
            place = _key_of(attempt, step, digest)
            done = runtime.pending_uploads.nodes_done.setdefault(place, set())
            done.add(node_id)
            whole, missing_bytes = await run_in_thread(runtime.checkpoint_copies.upload_state, place)
            lost = "" if whole else _lost_node(attempt, done)
            first = missing_bytes if first is None else first
            left_s = until_s - clock.boottime_s()
            if whole or lost or missing_bytes < first or left_s <= 0 or runtime.hub.closing:
                break
            await watch.wait(min(_LOOK_S, left_s))
    if whole:
        runtime.pending_uploads.nodes_done.pop(place, None)
    return json_response(CheckpointUploadReply(complete=whole, missing_bytes=missing_bytes, lost_node=lost))


@routes.get("/v1/node/checkpoints/file", Action.SUPERVISE, reply=MediaType.BYTES)
async def download_checkpoint_file(
    request: Request,
    job_id: JobId,
    epoch: NonNegative,
    of_epoch: NonNegative,
    step: NonNegative,
    path: PathParameter,
    offset: NonNegative = 0,
) -> Response:
    """Download a file of a checkpoint that the job may resume from, from byte `offset` on; the manifest is one of the files."""
    runtime = runtime_of(request)
    await run_in_thread(require_live_member, runtime, grant_of_caller(request, job_id, epoch)[0], job_id, Epoch(epoch))
    attempts = await run_in_thread(runtime.services.store.attempts, job_id)
    folder = next((one.folder for one in attempts if one.epoch == of_epoch), None)
    if folder is None:
        raise NotFound(f"job {job_id} has no attempt {of_epoch}")
    file = await run_in_thread(runtime.checkpoint_copies.path, folder, step, path)
    return await stream_file(file, offset)


async def stream_file(path: str, offset: int) -> Response:
    """Return a response that streams a file's bytes from `offset` on."""
    pieces = _pieces(path, offset)
    return StreamingResponse(pieces, media_type=MediaType.BYTES.value)


def _pieces(path: str, offset: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while piece := file.read(_READ_BYTES):
            yield piece


def _key_of(attempt: Attempt, step: int, digest: str) -> CheckpointKey:
    return CheckpointKey(job_id=attempt.job_id, epoch=attempt.epoch, folder=attempt.folder, step=step, digest=digest)


def grant_of_caller(request: Request, job_id: JobId, epoch: int) -> tuple[NodeId, NodeGrant]:
    """Return the calling supervisor's node and its part of the attempt.

    Raises:
        NotPermitted: the supervisor runs for the seat of another attempt, or runs no part of this one.
    """
    name = caller_of(request).node_id
    assert name is not None, "only node tokens have the action SUPERVISE"
    seat = parse_seat(name)
    if seat is not None and (seat.job_id, seat.epoch) != (job_id, epoch):
        raise NotPermitted(
            f"supervisor {name} was started for another attempt and may not act for epoch {epoch} of job {job_id}"
        )
    node_id = node_of_supervisor(name)
    return node_id, runtime_of(request).supervisors.require_grant(node_id, job_id, Epoch(epoch))[0]


def require_live_member(
    runtime: ApiRuntime, node_id: NodeId, job_id: JobId, epoch: Epoch
) -> tuple[Attempt, frozenset[str]]:
    """Return the live attempt, and the digests of the published checkpoints of its job.

    Raises:
        AttemptEnded: the attempt has ended, or it has lost this node.
    """
    store = runtime.services.store
    attempt = live_attempt(store, job_id)
    member = None
    if attempt is not None and attempt.epoch == epoch:
        member = next((m for m in attempt.members if m.node_id == node_id), None)
    if attempt is None or member is None or member.state is MemberState.LOST:
        raise AttemptEnded(
            f"attempt {epoch} of job {job_id} has ended on {node_id}; the head accepts no more of its files"
        )
    job = store.job(job_id)
    return attempt, frozenset(() if job is None else (one.digest for one in job.checkpoints))


def _lost_node(attempt: Attempt, done: set[NodeId]) -> str:
    """Return a lost node that had not sent all its files; empty if each lost node had."""
    return next((m.node_id for m in attempt.members if m.state is MemberState.LOST and m.node_id not in done), "")
