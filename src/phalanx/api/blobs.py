"""Uploaded working directories, by the SHA-256 of their bytes. A body is never held whole: it goes to disk as it comes."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from phalanx.api.bodies import reply
from phalanx.api.parts import HeadParts
from phalanx.api.routes import Declared, Routes, Shown, too_large
from phalanx.api.runtime import off_loop, runtime_of
from phalanx.core.errors import BadRequest, NotFound, TryLater
from phalanx.core.work.people import Action
from phalanx.wire.api.output import BlobReply

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_AHEAD: Final = 16  # pieces of at most 64 KiB between the socket and the disk
_CATCH_UP_S: Final = 0.005  # how often a full queue is tried again: some pieces' worth of a slow disk
_STALL_S: Final = 60.0  # an upload that sends nothing for so long has been given up
UPLOADS_MAX: Final = 8  # at once; each holds a thread of its own for as long as it sends
_THREADS: Final = ThreadPoolExecutor(max_workers=UPLOADS_MAX, thread_name_prefix="upload")
_uploads: Final = asyncio.Semaphore(UPLOADS_MAX)

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
    await runtime_of(request).note(f"{size} bytes")
    return reply(BlobReply(sha256=sha256, bytes=size))


async def send_blob(parts: HeadParts, sha256: str) -> Response:
    """The bytes."""
    path = await off_loop(parts.blobs.path, checked(sha256))
    return _WholeFile(path, media_type=Shown.BYTES.value)


class _WholeFile(FileResponse):
    """A file without ranges, which nobody of ours asks for and a server may ignore (RFC 9110, 14.2): odd ones were refused in plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)


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
    if _uploads.locked():
        raise TryLater(f"{UPLOADS_MAX} uploads are under way", hint="try again in a moment")
    async with _uploads:
        writing = asyncio.get_running_loop().run_in_executor(_THREADS, lambda: parts.blobs.put(sha256, _drain(pieces)))
        ending: Exception | None = BadRequest(f"blob {sha256[:12]}: the upload broke off", hint="send it again")
        try:
            ending = await _pass_on(request, parts.limits.blob_bytes, pieces, writing)
        finally:
            # Whatever happened here, the writer must not wait for ever.
            while not writing.done():
                try:
                    pieces.put_nowait(ending)
                    break
                except queue.Full:
                    pieces.get_nowait() if ending is not None else await asyncio.sleep(_CATCH_UP_S)
        return await writing


async def _pass_on(
    request: Request, limit: int, pieces: queue.Queue[bytes | Exception | None], writing: asyncio.Future[int]
) -> Exception | None:
    """Pass the body on until it ends; answers what is wrong with it, or None."""
    size = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(_STALL_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return None
        except (ClientDisconnect, TimeoutError):
            return BadRequest(f"{request.url.path}: the caller left before its body was here", hint="send it again")
        size += len(piece)
        if size > limit:
            return too_large(request, limit)
        while piece and not writing.done():
            try:
                pieces.put_nowait(piece)
                break
            except queue.Full:
                await asyncio.sleep(_CATCH_UP_S)
        if writing.done():
            return None


def _drain(pieces: queue.Queue[bytes | Exception | None]) -> Iterator[bytes]:
    while (piece := pieces.get()) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece
