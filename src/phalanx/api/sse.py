"""Server-sent events: framing, the connection's life, and the bound on how many are open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.api.parts import users_share
from phalanx.api.runtime import Runtime
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.ids import UserId
from phalanx.wire.api.head import ErrorBody, ErrorReply

HEARTBEAT: Final = b": still here\n\n"
_EXPIRY_LOOK_S: Final = 1.0  # how late the end of a token is seen; a revocation rings
_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
_log: Final = logging.getLogger("phalanx.api")


def event(kind: str, record: Any, cursor: str = "") -> bytes:
    """One event. JSON holds no line break, so that one data line does."""
    mark = f"id: {cursor}\n" if cursor else ""
    return f"event: {kind}\n{mark}data: ".encode() + msgspec.json.encode(record) + b"\n\n"


class EventStream(Response):
    """A reply that goes on until its source ends, the caller leaves, may see it no longer (`still` raises then), or the head closes.

    It takes its place when it is sent, and is refused (TryLater) where there is none.
    """

    media_type = "text/event-stream"

    def __init__(self, runtime: Runtime, user: UserId, source: AsyncIterator[bytes], still: Callable[[], None]) -> None:
        super().__init__(None, 200, _HEADERS)
        del self.headers["content-length"]
        self._runtime = runtime
        self._user = user
        self._source = source
        self._still = still

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one side ends."""
        with _place(self._runtime, self._user):
            await self._go_on(receive, send)

    async def _go_on(self, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(_left(receive))
        sending = asyncio.ensure_future(self._send(send))
        expelled = asyncio.ensure_future(self._expelled())
        try:
            await asyncio.wait((leaving, sending, expelled), return_when=asyncio.FIRST_COMPLETED)
            if expelled.done() and not sending.done():
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending
                await _end_with(send, expelled.result())
        finally:
            for task in (leaving, sending, expelled):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _expelled(self) -> PhalanxError:
        """Return once the caller would not be let in any more: access has changed, or their token has expired."""
        while True:
            await self._runtime.access.wait(_EXPIRY_LOOK_S)
            try:
                self._still()
            except PhalanxError as error:
                return error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self._source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except PhalanxError as error:
            await _end_with(send, error)
            return
        except OSError:
            _log.exception("an event stream failed")
            return  # unfinished on purpose: the follower sees a broken stream and comes back with its cursor
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def _place(runtime: Runtime, user: UserId) -> Iterator[None]:
    """One open stream of a user, until it ends in whatever way.

    Raises:
        TryLater: too many are open, or too many of this user.
    """
    streams, limit = runtime.streams, runtime.parts.limits.streams_open
    share = users_share(limit)
    if runtime.streams_open >= limit:
        raise TryLater(f"{runtime.streams_open} event streams are open already", hint="close some, or poll")
    if streams[user] >= share:
        raise TryLater(
            f"{streams[user]} event streams of {user} are open already",
            hint=f"close some of yours, or poll: one user may have {share} open",
        )
    streams[user] += 1
    try:
        yield
    finally:
        streams[user] -= 1
        if not streams[user]:
            del streams[user]


async def _end_with(send: Send, error: PhalanxError) -> None:
    """End a stream with why."""
    body = ErrorBody(code=error.code, message=error.message, hint=error.hint, retry=error.retry_helps)
    await send({"type": "http.response.body", "body": event("error", ErrorReply(error=body)), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    """Return once the caller has closed the connection."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
