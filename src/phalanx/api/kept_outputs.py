"""Uploads and downloads of job outputs, for gangs whose nodes do not share the head's folders (wire.kept)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.api.bodies import nothing, read_body, reply
from phalanx.api.kept import live_member, of_attempt
from phalanx.api.output_files import Origin
from phalanx.api.routes import Declared, Routes, Shown, Whole
from phalanx.api.runtime import off_loop, runtime_of
from phalanx.core.errors import TryLater
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.people import Action
from phalanx.wire.kept import PIECE_BYTES_MAX, OutputsReply, TakenReply

_PIECES_MAX: Final = 32  # as for checkpoints
_READ_BYTES: Final = 1 << 18

routes = Routes()
Name = Annotated[str, Query(min_length=1, max_length=4096)]


@routes.get("/v1/node/outputs", Action.SUPERVISE, reply=OutputsReply)
async def list_kept_outputs(request: Request, job_id: JobId, epoch: Whole) -> Response:
    """List the files of earlier attempts that this node's part of the gang starts with."""
    origin = await _origin(request, job_id, epoch)
    return reply(OutputsReply(files=await off_loop(runtime_of(request).outputs.listing, origin)))


@routes.get("/v1/node/outputs/file", Action.SUPERVISE, reply=Shown.BYTES)
async def give_output_file(request: Request, job_id: JobId, epoch: Whole, path: Name) -> Response:
    """Download one of these files."""
    await _origin(request, job_id, epoch)
    file = await off_loop(runtime_of(request).outputs.path, job_id, path)
    return StreamingResponse(_pieces(file), media_type=Shown.BYTES.value)


@routes.put("/v1/node/outputs/file", Action.SUPERVISE, body=Shown.BYTES, reply=TakenReply, body_limit="piece_bytes")
async def take_output_piece(
    request: Request,
    job_id: JobId,
    epoch: Whole,
    path: Name,
    offset: Whole,
    crc32: Whole | None = None,
    size: Whole = 0,
    mode: Whole = 0o600,
    more: bool = False,
) -> Response:
    """Store a piece of a file: with `more` append to the stored file, else to an upload, which `crc32` (of all `size` bytes) completes."""
    runtime = runtime_of(request)
    origin = await _origin(request, job_id, epoch)
    if runtime.carried.pieces >= _PIECES_MAX:
        raise TryLater(f"the head is receiving {_PIECES_MAX} pieces already", hint="send it again in a moment")
    runtime.carried.pieces += 1
    try:
        data = await read_body(request, PIECE_BYTES_MAX)
        if more:
            end = await off_loop(runtime.outputs.extend, origin, path, offset, data)
        else:
            end = await off_loop(runtime.outputs.take, origin, path, offset, data)
        if crc32 is not None and not more:
            await off_loop(runtime.outputs.name, origin, path, size_bytes=size, crc32=crc32, mode=mode)
    finally:
        runtime.carried.pieces -= 1
    runtime.count("kept_bytes", len(data))
    return reply(TakenReply(end=end))


@routes.add("DELETE", "/v1/node/outputs/file", Declared(action=Action.SUPERVISE, status=204))
async def remove_output_file(request: Request, job_id: JobId, epoch: Whole, path: Name) -> Response:
    """Remove a file that this node uploaded, since its ranks removed it."""
    origin = await _origin(request, job_id, epoch)
    await off_loop(runtime_of(request).outputs.remove, origin, path)
    return nothing()


async def _origin(request: Request, job_id: JobId, epoch: int) -> Origin:
    """Return the attempt and node rank that the files belong to.

    Raises:
        NotPermitted, AttemptOver: this node does not run a part of that attempt, or it has ended.
    """
    node_id, grant = of_attempt(request, job_id, epoch)
    await off_loop(live_member, runtime_of(request), node_id, job_id, Epoch(epoch))
    return Origin(job_id=job_id, epoch=Epoch(epoch), node_rank=grant.node_rank)


def _pieces(file: int) -> Iterator[bytes]:
    try:
        while piece := os.read(file, _READ_BYTES):
            yield piece
    finally:
        os.close(file)
