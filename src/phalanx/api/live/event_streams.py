"""Streams of server-sent events: their lifetime, and the limit on open streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.api.http.errors import error_body
from phalanx.api.live.event_framing import encode_event
from phalanx.api.live.shared_gzip import sending_gzip
from phalanx.api.runtime import ApiRuntime
from phalanx.api.services import per_user_share
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.ids import UserId
from phalanx.wire.api.errors import ErrorReply

_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
_GZIP_HEADERS: Final = {"content-encoding": "gzip", "vary": "accept-encoding"}
_log: Final = logging.getLogger("phalanx.api")


class EventStream(Response):
    """A response that lasts until its source ends, the caller disconnects, `still` raises (permission lost), or the head closes.

    Sending it takes one of the stream slots, and is refused (TryLater) if none is free. `gzip`: for callers that accept it, and events that
    many readers get.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        runtime: ApiRuntime,
        user: UserId,
        source: AsyncIterator[bytes],
        reauthorize: Callable[[], None],
        *,
        gzip: bool = False,
    ) -> None:
        super().__init__(None, 200, {**_HEADERS, **(_GZIP_HEADERS if gzip else {})})
        del self.headers["content-length"]
        self._runtime = runtime
        self._user = user
        self._source = source
        self._still = reauthorize
        self._gzip = gzip

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one side ends."""
        with _stream_slot(self._runtime, self._user):
            await self._stream(receive, sending_gzip(send) if self._gzip else send)

    async def _stream(self, receive: Receive, send: Send) -> None:
        disconnect = asyncio.ensure_future(_disconnected(receive))
        sending = asyncio.ensure_future(self._send(send))
        permission_lost = asyncio.ensure_future(self._runtime.permission_lost(self._still))
        try:
            await asyncio.wait((disconnect, sending, permission_lost), return_when=asyncio.FIRST_COMPLETED)
            if permission_lost.done() and not sending.done():
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending
                await _end_with(send, permission_lost.result())
        finally:
            for task in (disconnect, sending, permission_lost):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

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
            return  # without an end, so that the follower sees a broken stream and reconnects with its cursor
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def _stream_slot(runtime: ApiRuntime, user: UserId) -> Iterator[None]:
    """Hold a stream slot of a user.

    Raises:
        TryLater: too many streams are open, overall or of this user.
    """
    streams, limit = runtime.streams_by_user, runtime.services.limits.streams_open
    share = per_user_share(limit)
    if runtime.streams_open >= limit:
        raise TryLater(f"{runtime.streams_open} event streams are already open", hint="close some, or poll")
    if streams[user] >= share:
        raise TryLater(
            f"{streams[user]} event streams of {user} are already open, the most for one user",
            hint="close some of yours, or poll",
        )
    streams[user] += 1
    try:
        yield
    finally:
        streams[user] -= 1
        if not streams[user]:
            del streams[user]


async def _end_with(send: Send, error: PhalanxError) -> None:
    """End a stream with an error event."""
    event = encode_event("error", ErrorReply(error=error_body(error)))
    await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    """Wait until the caller closes the connection."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
