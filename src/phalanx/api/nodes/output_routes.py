"""Uploads and downloads of job outputs, for gangs whose nodes do not share the head's folders (wire.stored_files)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.http.bodies import json_response, no_content, read_body
from phalanx.api.http.routing import (
    MediaType,
    NonNegative,
    RouteDeclaration,
    RouteTable,
)
from phalanx.api.nodes.checkpoint_routes import grant_of_caller, require_live_member
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.core.errors import TryLater
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.users import Action
from phalanx.store.outputs.copies import OutputOrigin
from phalanx.wire.stored_files import PIECE_BYTES_MAX, FileEndReply, OutputsReply

_PIECES_MAX: Final = 32  # as for checkpoints
_READ_BYTES: Final = 1 << 18

routes = RouteTable()
OutputPathParameter = Annotated[str, Query(min_length=1, max_length=4096)]


@routes.get("/v1/node/outputs", Action.SUPERVISE, reply=OutputsReply)
async def list_stored_outputs(request: Request, job_id: JobId, epoch: NonNegative) -> Response:
    """List the files of earlier attempts that this node's part of the gang starts with."""
    origin = await _origin(request, job_id, epoch)
    return json_response(OutputsReply(files=await run_in_thread(runtime_of(request).output_copies.list_files, origin)))


@routes.get("/v1/node/outputs/file", Action.SUPERVISE, reply=MediaType.BYTES)
async def download_output_file(
    request: Request, job_id: JobId, epoch: NonNegative, path: OutputPathParameter
) -> Response:
    """Download one of these files."""
    origin = await _origin(request, job_id, epoch)
    file = await run_in_thread(runtime_of(request).output_copies.open_file, origin.folder, path)
    return StreamingResponse(_pieces(file), media_type=MediaType.BYTES.value)


@routes.put(
    "/v1/node/outputs/file", Action.SUPERVISE, body=MediaType.BYTES, reply=FileEndReply, body_limit="piece_bytes"
)
async def receive_output_piece(
    request: Request,
    job_id: JobId,
    epoch: NonNegative,
    path: OutputPathParameter,
    offset: NonNegative,
    crc32: NonNegative | None = None,
    size: NonNegative = 0,
    mode: NonNegative = 0o600,
    more: bool = False,
) -> Response:
    """Store a piece of a file: with `more` append to the stored file, else to an upload, which `crc32` (of all `size` bytes) completes."""
    runtime = runtime_of(request)
    origin = await _origin(request, job_id, epoch)
    if runtime.pending_uploads.pieces_in_progress >= _PIECES_MAX:
        raise TryLater(f"the head is receiving {_PIECES_MAX} pieces already", hint="send it again in a moment")
    runtime.pending_uploads.pieces_in_progress += 1
    try:
        data = await read_body(request, PIECE_BYTES_MAX)
        await run_in_thread(runtime.output_usage.add, job_id, len(data))
        if more:
            end = await run_in_thread(runtime.output_copies.append_stored, origin, path, offset, data)
        else:
            end = await run_in_thread(runtime.output_copies.append_upload, origin, path, offset, data)
        if crc32 is not None and not more:
            await run_in_thread(
                runtime.output_copies.finish_upload, origin, path, size_bytes=size, crc32=crc32, mode=mode
            )
    finally:
        runtime.pending_uploads.pieces_in_progress -= 1
    runtime.count("kept_bytes", len(data))
    return json_response(FileEndReply(end=end))


@routes.add("DELETE", "/v1/node/outputs/file", RouteDeclaration(action=Action.SUPERVISE, status=204))
async def remove_output_file(
    request: Request, job_id: JobId, epoch: NonNegative, path: OutputPathParameter
) -> Response:
    """Remove a file that this node uploaded, since its ranks removed it."""
    origin = await _origin(request, job_id, epoch)
    await run_in_thread(runtime_of(request).output_copies.remove, origin, path)
    return no_content()


async def _origin(request: Request, job_id: JobId, epoch: int) -> OutputOrigin:
    """Return the attempt and node rank that the files belong to.

    Raises:
        NotPermitted, AttemptEnded: this node does not run a part of that attempt, or it has ended.
    """
    node_id, grant = grant_of_caller(request, job_id, epoch)
    attempt, _ = await run_in_thread(require_live_member, runtime_of(request), node_id, job_id, Epoch(epoch))
    folder = os.path.dirname(attempt.folder)
    return OutputOrigin(job_id=job_id, epoch=attempt.epoch, folder=folder, node_rank=grant.node_rank)


def _pieces(file: int) -> Iterator[bytes]:
    try:
        while piece := os.read(file, _READ_BYTES):
            yield piece
    finally:
        os.close(file)
