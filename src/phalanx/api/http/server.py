"""The uvicorn server of the head. It ends event streams before the shutdown, as uvicorn waits for every response to end.

It serves plain HTTP on the given sockets, which must be on loopback, and TLS on one more socket (`api.door`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from phalanx.api.http.relay_agent import RelayAgent, RelaySettings
from phalanx.api.http.routing import LAST_FRAMES_S
from phalanx.api.http.timeouts import ReadTimeoutProtocol
from phalanx.api.http.tls_listener import TlsSniffingListener
from phalanx.api.http.websocket_protocol import (
    MESSAGE_BYTES_MAX,
    PING_INTERVAL_S,
    PONG_TIMEOUT_S,
    HeadWebSocketProtocol,
)
from phalanx.api.runtime import runtime_of_app
from phalanx.core.errors import Conflict, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.states import JobState

_BACKLOG: Final = 1024
LAST_BYTES_S: Final = (
    0.05  # for the last bytes to be sent; uvicorn checks after 0.1 s whether all connections are closed
)

_DATE_EVERY_S: Final = 1.0
_TICKS_PER_DATE: Final = 10  # uvicorn.Server.on_tick


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSocket:
    """A bound socket off loopback, and the TLS context of its connections."""

    socket: socket.socket
    context: ssl.SSLContext


class HeadServer(uvicorn.Server):
    """Serves an app on the given loopback sockets, and by TLS on one or two more."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tls: TlsSocket | None = None,
        programs_tls: TlsSocket | None = None,
        relay: RelaySettings | None = None,
        hand_over: Callable[[socket.socket], bool] = lambda _: False,
        **options: Any,
    ) -> None:
        self._tick = asyncio.Event()  # a second has passed, or the server shall end
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(server_config(app, **options))
        self._tls = [one for one in (tls, programs_tls) if one is not None]
        self._hand_over = hand_over
        self._tls_listeners: list[TlsSniffingListener] = []
        self._relay = relay
        self._relay_agent: RelayAgent | None = None

    @property
    def should_exit(self) -> bool:  # an attribute of uvicorn.Server, which looks at it ten times a second
        """Whether the server shall end. May be set from any thread, and in a signal handler."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        loop = self._loop
        if value and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._tick.set)

    async def main_loop(self) -> None:
        """Serve until `should_exit`. uvicorn updates the date of its answers once a second, every tenth of its ticks."""
        self._loop = asyncio.get_running_loop()
        ticks = 0
        while not await self.on_tick(ticks):
            timer = self._loop.call_later(
                until_tick_s(_DATE_EVERY_S, time.monotonic()), self._tick.set
            )  # one turn of the loop; `asyncio.wait_for` takes five
            await self._tick.wait()
            timer.cancel()
            self._tick.clear()
            ticks += _TICKS_PER_DATE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening. Sockets off loopback are refused without TLS, whatever the options."""
        _require_loopback(sockets, self.config)
        await super().startup(sockets)
        for one in self._tls:
            one.socket.listen(_BACKLOG)
            self._tls_listeners.append(TlsSniffingListener(one.socket, one.context, self._protocol, self._hand_over))
        if self._relay is not None:
            self._relay_agent = RelayAgent(self._relay, self._tls_listeners[0].take)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and close idle connections at once."""
        if self._relay_agent is not None:
            self._relay_agent.close()
        for listener in self._tls_listeners:
            listener.close()
        open_ones = [one for one in self.server_state.connections if isinstance(one, ReadTimeoutProtocol)]
        idle = [one for one in open_ones if one.is_idle()]
        asyncio.get_running_loop().call_later(LAST_BYTES_S, _hang_up, idle)
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        """Make a protocol, as uvicorn does for each of its own connections."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as in uvicorn.Server.startup
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _hang_up(connections: Iterable[ReadTimeoutProtocol]) -> None:
    """Close idle connections: a TLS connection would otherwise delay the shutdown, and a takeover, until its client closes it."""
    for connection in connections:
        connection.close_if_idle()


def _require_loopback(sockets: list[socket.socket] | None, config: uvicorn.Config) -> None:
    """Check that plain HTTP is served only on loopback.

    Raises:
        Conflict: tokens would cross a network unencrypted.
    """
    if config.uds is not None or config.fd is not None:
        raise Conflict("the API is served on TCP sockets only", hint="pass its sockets")
    addresses = [config.host] if sockets is None else [str(one.getsockname()[0]) for one in sockets]
    for address in addresses:
        try:
            plain = ipaddress.ip_address(address).is_loopback
        except ValueError:  # a name, which may resolve to any address
            plain = False
        if not plain:
            raise Conflict(
                f"{address} is not on loopback, and without TLS tokens would cross the network unencrypted",
                hint=Hint(HintCode.LISTEN_WITH_TLS),
            )


class ApiServer(HeadServer):
    """Serves the API."""

    def __init__(
        self, app: FastAPI, *, tls: TlsSocket | None = None, programs_tls: TlsSocket | None = None, **options: Any
    ) -> None:
        super().__init__(app, tls=tls, programs_tls=programs_tls, **options)
        self._runtime = runtime_of_app(app)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Grant running jobs long leases unless another head takes over at once; then end streams, long polls and sessions, and stop."""
        with contextlib.suppress(PhalanxError):
            if not self._runtime.has_standby and self._runtime.services.store.job_counts().get(JobState.RUNNING, 0):
                await self._runtime.grant_long_leases()
        self._runtime.close()
        await self._runtime.wait_for_websockets(LAST_FRAMES_S)
        await super().shutdown(sockets)


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the head's uvicorn configuration; options override it. Its loop is asyncio's, with which all is measured."""
    settings: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "lifespan": "on",
        "loop": "asyncio",
        "ws": HeadWebSocketProtocol,
        "ws_ping_interval": PING_INTERVAL_S,
        "ws_ping_timeout": PONG_TIMEOUT_S,
        "ws_max_size": MESSAGE_BYTES_MAX,
        "ws_per_message_deflate": False,  # a session's bytes are few, and compression beside secrets can reveal them
        "proxy_headers": False,
        "timeout_keep_alive": 75,  # longer than a long poll and a client's pause, so that it is the client who closes
        "http": ReadTimeoutProtocol,
        "timeout_graceful_shutdown": 5,
        "backlog": 2048,
        "h11_max_incomplete_event_size": 1 << 16,
    }
    return uvicorn.Config(app, **{**settings, **options})
