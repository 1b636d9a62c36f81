"""uvicorn, told to let followers go first: it waits for every reply to end, and an event stream ends only when it is told to."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from phalanx.api.runtime import runtime_in
from phalanx.core.errors import PhalanxError
from phalanx.core.work.job import JobState


class ApiServer(uvicorn.Server):
    """Serves the API."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(server_config(app, **options))
        self._runtime = runtime_in(app)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """While still serving, give running jobs long leases; then end streams and long polls, then everything else."""
        if self._runtime.parts.store.job_counts().get(JobState.RUNNING, 0):
            with contextlib.suppress(PhalanxError):
                await self._runtime.lengthen_leases()
        self._runtime.close()
        await super().shutdown(sockets)


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
