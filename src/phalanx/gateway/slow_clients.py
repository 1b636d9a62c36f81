"""Ends connections of clients that send no whole request, or that do not read their answer.

The HTTP server itself waits without limit for the rest of a request's headers, and for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Final

from aiohttp import web

REQUEST_S: Final = 90.0  # without a request under way; longer than an idle connection is kept
UNREAD_MS: Final = 60_000  # that sent bytes may stay unread by the client's kernel
BODY_S: Final = 120.0  # for the body of a request
_LOOK_S: Final = 5.0


class SlowClients:
    """Looks at the connections of a server.

    Args:
        server: whose connections are looked at.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._idle_since: dict[web.RequestHandler, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(_LOOK_S)

    def look(self, now_s: float) -> None:
        """End the connections that are without a request for too long; limit how long an answer stays unread on new ones."""
        before, self._idle_since = self._idle_since, {}
        for connection in self._server.connections:
            since_s = before.get(connection)
            if since_s is None:
                _limit_unread(connection.transport)
            busy = connection._current_request is not None  # noqa: SLF001  # aiohttp has no public word for it
            self._idle_since[connection] = now_s if since_s is None or busy else since_s
            if now_s - self._idle_since[connection] > REQUEST_S and connection.transport is not None:
                connection.transport.abort()


def _limit_unread(transport: asyncio.Transport | None) -> None:
    found = None if transport is None else transport.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
