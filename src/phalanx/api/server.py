"""uvicorn, told to let followers go first: it waits for every reply to end, and an event stream ends only when it is told to.

It serves plain HTTP on the sockets that uvicorn is given, which are on loopback, and TLS on one more (`api.door`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

from phalanx.api.door import TlsDoor
from phalanx.api.runtime import runtime_in
from phalanx.core.errors import PhalanxError
from phalanx.core.work.job import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsListener:
    """A bound socket off loopback, and with what its connections are secured."""

    socket: socket.socket
    context: ssl.SSLContext


class ApiServer(uvicorn.Server):
    """Serves the API."""

    def __init__(self, app: FastAPI, *, tls: TlsListener | None = None, **options: Any) -> None:
        super().__init__(server_config(app, **options))
        self._runtime = runtime_in(app)
        self._tls = tls
        self._door: TlsDoor | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open every door."""
        await super().startup(sockets)
        if self._tls is not None:
            self._door = TlsDoor(self._tls.socket, self._tls.context, self._protocol)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """While still serving, give running jobs long leases; then end streams and long polls, then everything else."""
        if self._runtime.parts.store.job_counts().get(JobState.RUNNING, 0):
            with contextlib.suppress(PhalanxError):
                await self._runtime.lengthen_leases()
        self._runtime.close()
        if self._door is not None:
            self._door.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        """What uvicorn makes for each of its own connections."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as in uvicorn.Server.startup
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def server_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """What the head serves with; options replace these.

    httptools and uvloop are taken by uvicorn where they are installed.
    """
    settings: dict[str, Any] = {
        "log_config": None, "access_log": False, "server_header": False, "lifespan": "on", "ws": "none", "proxy_headers": False,
        "timeout_keep_alive": 75,  # longer than a long poll and a client's pause, so that it is the client who closes
        "timeout_graceful_shutdown": 5, "backlog": 2048, "h11_max_incomplete_event_size": 1 << 16,
    }  # fmt: skip
    return uvicorn.Config(app, **{**settings, **options})
