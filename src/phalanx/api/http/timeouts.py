"""uvicorn's HTTP protocol with a time limit and a size limit for the head of a request; uvicorn itself waits for it forever.

Otherwise a client that sends a byte now and then could hold a connection and its descriptor at no cost (slowloris).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

REQUEST_HEAD_TIMEOUT_S: Final = (
    20.0  # from the opening of the connection, or the first byte of the next request, to the end of the head
)
REQUEST_HEAD_BYTES_MAX: Final = (
    1 << 16
)  # while a head is incomplete; api.rim checks complete heads. h11 has the same limit, httptools none
_BODY: Final = b'{"error":{"code":"%b","message":"%b","hint":"%b","retry":false}}'
_log: Final = logging.getLogger("phalanx.api")
_LESS: Final = b"send less, or faster"
_REPLY: Final = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"


class ReadTimeoutProtocol(H11Protocol):
    """One connection, read by h11 also where httptools is installed: httptools is laxer with two hosts and odd encodings."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the timer. The connection logs no requests, whatever the level of uvicorn's log: a query may hold a sign-in code."""
        super().connection_made(transport)
        self.access_log = False
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes to uvicorn; refuse the request if its head is too late or too large."""
        if self.is_idle():
            self._start_timer()
        super().data_received(data)
        if self._upgraded:
            return
        if not self.is_idle():
            self._stop_timer()
            return
        # Otherwise the bytes belong to the body of a request that was already answered.
        cycle = self._current()
        if cycle is None or not cycle.more_body:
            self._head_bytes += len(data)
            if self._head_bytes > REQUEST_HEAD_BYTES_MAX:
                self._refuse(
                    b"431 Request Header Fields Too Large",
                    b"too_large",
                    b"the head of the request is over 64 KiB",
                    _LESS,
                )

    def handle_websocket_upgrade(self, *request: Any) -> None:
        """Hand the connection over to the WebSocket protocol, which has its own time limits."""
        self._upgraded = True
        self._stop_timer()
        super().handle_websocket_upgrade(*request)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; in the middle of a response only close the connection. `msg` are uvicorn's words."""
        _log.debug("a connection was closed: %s", msg)
        cycle = self._current()
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
            return
        self._refuse(b"400 Bad Request", b"bad_request", b"this is not a valid HTTP request", b"see docs/api.md")

    def is_idle(self) -> bool:
        """Whether the connection waits for the rest of a head, or of the body of a request that was already answered."""
        cycle = self._current()
        return cycle is None or bool(cycle.response_complete)

    def close_if_idle(self) -> None:
        """Close the connection at once if it is idle and all of the last response was sent."""
        if self.is_idle() and not self.transport.get_write_buffer_size():
            self.transport.abort()

    def _current(self) -> RequestResponseCycle | None:
        """Return the newest request; None before the first, which uvicorn's annotation hides."""
        return self.cycle

    def _start_timer(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_HEAD_TIMEOUT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._head_bytes = None, 0

    def _on_timeout(self) -> None:
        self._deadline = None
        if self.is_idle():
            self._refuse(
                b"408 Request Timeout", b"try_later", b"the head of the request did not arrive within 20 s", _LESS
            )

    def _refuse(self, status: bytes, code: bytes, message: bytes, hint: bytes) -> None:
        body = _BODY % (code, message, hint)
        if not self.transport.is_closing():
            self.transport.write(_REPLY % (status, len(body), body))
            self.transport.close()
