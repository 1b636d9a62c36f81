"""Uploaded working directories, named by the SHA-256 of their bytes. Bodies are streamed to disk, never held in memory whole."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from phalanx.api.http.bodies import json_response
from phalanx.api.http.errors import SlowBody
from phalanx.api.http.routing import (
    MediaType,
    NonNegative,
    RouteDeclaration,
    RouteTable,
    body_too_large,
)
from phalanx.api.runtime import (
    caller_of,
    reauthorize_caller,
    run_in_thread,
    runtime_of,
)
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadRequest, NotFound, NotPermitted, NotSignedIn, TryLater
from phalanx.core.ids import UserId
from phalanx.core.units import format_bytes, format_duration
from phalanx.core.work.users import Action
from phalanx.wire.api.output import BLOB_RECEIVED_HEADER, BlobReply

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_AHEAD: Final = 16  # pieces of at most 64 KiB between the socket and the disk
_CATCH_UP_S: Final = 0.005  # retry interval while the queue is full: the time in which a slow disk takes some pieces
_STALL_S: Final = 60.0  # an upload that sends nothing for this long is aborted
_GRACE_S: Final = 60.0  # after this time the average rate must be at least LEAST_BYTES_PER_S
MIN_BYTES_PER_S: Final = 64 << 10  # half a megabit; at a lower rate the largest upload would hold its slot for hours
_REAUTHORIZE_S: Final = 5.0  # an upload continues at most this long after its sender lost the permission
UPLOADS_MAX: Final = 8  # at once; each holds a thread of its own for as long as it sends
UPLOADS_PER_USER_MAX: Final = UPLOADS_MAX // 2  # of one user, so that one user cannot take all slots
_THREADS: Final = ThreadPoolExecutor(max_workers=UPLOADS_MAX, thread_name_prefix="upload")
_uploads: Final = asyncio.Semaphore(UPLOADS_MAX)
_uploads_by_user: Final[Counter[UserId]] = Counter()  # uploads under way

routes = RouteTable()


@routes.add("HEAD", "/v1/blobs/{sha256}", RouteDeclaration(action=Action.SUBMIT))
async def has_blob(request: Request, sha256: str) -> Response:
    """Answer 200 if the blob is stored, else 404, with the bytes of an interrupted upload."""
    services = runtime_of(request).services
    if not await run_in_thread(services.blobs.has, checked_sha256(sha256)):
        received = await run_in_thread(services.blobs.received, sha256)
        return Response(status_code=404, headers={BLOB_RECEIVED_HEADER: str(received)})
    return Response(status_code=200)


@routes.put("/v1/blobs/{sha256}", Action.SUBMIT, body=MediaType.BYTES, reply=BlobReply, body_limit="blob_bytes")
async def put_blob(request: Request, sha256: str, offset: NonNegative = 0) -> Response:
    """Store a blob under its SHA-256, or what follows the `offset` bytes of an interrupted upload. Refused if the whole has another SHA-256."""
    services = runtime_of(request).services
    with _upload_slot(caller_of(request).user):
        size = await _stream_in(request, services, checked_sha256(sha256), offset)
    await runtime_of(request).record_call(f"{size} bytes")
    return json_response(BlobReply(sha256=sha256, bytes=size))


async def send_blob(services: HeadServices, sha256: str) -> Response:
    """Return a response with the blob's bytes."""
    path = await run_in_thread(services.blobs.path, checked_sha256(sha256))
    return _UnrangedFileResponse(path, media_type=MediaType.BYTES.value)


class _UnrangedFileResponse(FileResponse):
    """A file response that ignores Range headers, as RFC 9110 (14.2) allows: Starlette refuses invalid ranges in plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)


def checked_sha256(sha256: str) -> str:
    """Return the name if it is a SHA-256.

    Raises:
        NotFound: it is not, so no such blob can exist.
    """
    if not _SHA256.fullmatch(sha256):
        raise NotFound(f"{sha256[:80]!r} is not a SHA-256 in hex")
    return sha256


async def _stream_in(request: Request, services: HeadServices, sha256: str, offset: int) -> int:
    """Pass the body to the blob store's thread in pieces, at most _AHEAD ahead of the disk."""
    pieces: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=_AHEAD)
    if _uploads.locked():
        raise TryLater(f"{UPLOADS_MAX} uploads are already running", hint="try again in a moment")
    async with _uploads:
        writing = asyncio.get_running_loop().run_in_executor(
            _THREADS, lambda: services.blobs.put(sha256, _pieces_of(pieces), offset)
        )
        ending: Exception | None = BadRequest(f"blob {sha256[:12]}: the upload was interrupted", hint="send it again")
        try:
            ending = await _reauthorized(request, _pass_on(request, services, pieces, writing, offset))
        finally:
            # In every case the writer must receive an end, or it would wait forever.
            while not writing.done():
                try:
                    pieces.put_nowait(ending)
                    break
                except queue.Full:
                    pieces.get_nowait() if ending is not None else await asyncio.sleep(_CATCH_UP_S)
        return await writing


@contextlib.contextmanager
def _upload_slot(user: UserId) -> Iterator[None]:
    """Hold one of a user's upload slots.

    Raises:
        TryLater: the user has too many uploads running.
    """
    if _uploads_by_user[user] >= UPLOADS_PER_USER_MAX:
        raise TryLater(
            f"{UPLOADS_PER_USER_MAX} uploads of {user} are already running", hint="try again when one has finished"
        )
    _uploads_by_user[user] += 1
    try:
        yield
    finally:
        _uploads_by_user[user] -= 1
        if not _uploads_by_user[user]:
            del _uploads_by_user[user]


async def _reauthorized(request: Request, passing: Coroutine[Any, Any, Exception | None]) -> Exception | None:
    """Return the result of `transient`, or the refusal if the sender loses the permission while the body arrives."""
    task = asyncio.ensure_future(passing)
    try:
        while True:
            await asyncio.wait((task,), timeout=_REAUTHORIZE_S)
            reauthorize_caller(request)
            if task.done():
                return task.result()
    except (NotSignedIn, NotPermitted) as error:
        return error
    finally:
        task.cancel()


async def _pass_on(
    request: Request,
    services: HeadServices,
    pieces: queue.Queue[bytes | Exception | None],
    writing: asyncio.Future[int],
    offset: int,
) -> Exception | None:
    """Pass the body to the writer until it ends. Returns the error to answer with, or None."""
    clock, limit = services.clock, services.limits.blob_bytes
    size, waited_s = 0, 0.0  # only the time spent waiting for the sender: a slow disk does not count against the sender
    stream = request.stream()
    while True:
        asked_s = clock.boottime_s()
        try:
            async with asyncio.timeout(_STALL_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return None
        except (ClientDisconnect, TimeoutError):
            return BadRequest(
                f"{request.url.path}: the connection closed before the whole body arrived", hint="send it again"
            )
        size += len(piece)
        waited_s += clock.boottime_s() - asked_s
        if size < (waited_s - _GRACE_S) * MIN_BYTES_PER_S:
            return SlowBody(
                f"{request.url.path}: {format_bytes(size)} came in {format_duration(waited_s)}; an upload must send {format_bytes(MIN_BYTES_PER_S)} in a second",
                hint="use a faster connection, or upload fewer bytes",
            )
        if offset + size > limit:
            return body_too_large(request, limit)
        while piece and not writing.done():
            try:
                pieces.put_nowait(piece)
                break
            except queue.Full:
                await asyncio.sleep(_CATCH_UP_S)
        if writing.done():
            return None


def _pieces_of(pieces: queue.Queue[bytes | Exception | None]) -> Iterator[bytes]:
    while (piece := pieces.get()) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece
