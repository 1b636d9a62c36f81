"""Uploaded working directories, by the SHA-256 of their bytes. A body is never held whole: it goes to disk as it comes."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import Iterator
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from phalanx.api.bodies import reply
from phalanx.api.parts import HeadParts
from phalanx.api.routes import Declared, Routes, Shown, too_large
from phalanx.api.runtime import off_loop, runtime_of
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.work.people import Action
from phalanx.wire.api import BlobReply

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_AHEAD: Final = 16  # pieces of at most 64 KiB between the socket and the disk

routes = Routes()


@routes.add("HEAD", "/v1/blobs/{sha256}", Declared(action=Action.SUBMIT))
async def has_blob(request: Request, sha256: str) -> Response:
    """Whether the bytes are here: 200, or 404."""
    parts = runtime_of(request).parts
    if not await off_loop(parts.blobs.has, checked(sha256)):
        return Response(status_code=404)
    return Response(status_code=200)


@routes.put("/v1/blobs/{sha256}", Action.SUBMIT, body=Shown.BYTES, reply=BlobReply, body_limit="blob_bytes")
async def put_blob(request: Request, sha256: str) -> Response:
    """Keep bytes under their SHA-256. Refused if they have another."""
    parts = runtime_of(request).parts
    size = await _stream_in(request, parts, checked(sha256))
    return reply(BlobReply(sha256=sha256, bytes=size))


async def send_blob(parts: HeadParts, sha256: str) -> Response:
    """The bytes."""
    path = await off_loop(parts.blobs.path, checked(sha256))
    return FileResponse(path, media_type=Shown.BYTES.value)


def checked(sha256: str) -> str:
    """The name, if it is one.

    Raises:
        NotFound: nothing is kept under such a name.
    """
    if not _SHA256.fullmatch(sha256):
        raise NotFound(f"{sha256[:80]!r} is no SHA-256 in hex")
    return sha256


async def _stream_in(request: Request, parts: HeadParts, sha256: str) -> int:
    """Hand the body to the blob store's thread piece by piece, no more than a few ahead of the disk."""
    pieces: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=_AHEAD)
    writing = asyncio.ensure_future(off_loop(lambda: parts.blobs.put(sha256, _drain(pieces))))
    ending: Exception | None = None
    size, limit = 0, parts.limits.blob_bytes
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                ending = too_large(request, limit)
                break
            if piece and not await _hand(pieces, piece, writing):
                break
    except ClientDisconnect:
        ending = BadRequest(f"blob {sha256[:12]}: the caller left before its body was here")
    await _hand(pieces, ending, writing)
    return await writing


async def _hand(
    pieces: queue.Queue[bytes | Exception | None], piece: bytes | Exception | None, writing: asyncio.Future[int]
) -> bool:
    """Give the writer a piece once it has room; False when it has ended already."""
    while not writing.done():
        try:
            pieces.put_nowait(piece)
        except queue.Full:
            await asyncio.sleep(0.005)  # the disk is slower than the socket: let it catch up
        else:
            return True
    return False


def _drain(pieces: queue.Queue[bytes | Exception | None]) -> Iterator[bytes]:
    while (piece := pieces.get()) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece
