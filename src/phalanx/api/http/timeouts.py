"""uvicorn's HTTP protocol with a time limit and a size limit for the head of a request; uvicorn itself waits for it forever.

Otherwise a client that sends a byte now and then could hold a connection and its descriptor at no cost (slowloris). Plain requests, nearly
all, are read and answered without h11 (`plain_requests`, `plain_cycle`): h11 takes 300 us of processor time for a request and its response.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from phalanx.api.http.plain_cycle import BODY_ARRIVED, PlainCycle
from phalanx.api.http.plain_requests import PlainHead, read_plain_head

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
    _body_left = 0  # bytes of the body of a plain request that have not arrived
    _early = b""  # arrived before the response to the plain request was complete
    _answered_s = 0.0  # by the loop's clock, when the newest response was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the timer. The connection logs no requests, whatever the level of uvicorn's log: a query may hold a sign-in code."""
        super().connection_made(transport)
        self.access_log = False
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Serve a plain request, or pass the bytes to uvicorn and h11; refuse the request if its head is too late or too large."""
        if self._body_left:
            data = self._receive_body(data)
        if not data:
            return
        if isinstance(self.cycle, PlainCycle) and not self.cycle.response_complete:
            self._early += data
            self.flow.pause_reading()
            return
        if self._is_between_requests() and (head := read_plain_head(data)) is not None:
            self._stop_timer()
            self._serve(head)
            rest = data[head.size :]
            if rest:
                self.data_received(rest)
            return
        self._pass_on(data)

    def _is_between_requests(self) -> bool:
        """Whether the next byte is the first of a request."""
        conn = self.conn
        return (
            not self._upgraded
            and conn.their_state is h11.IDLE
            and conn.our_state is h11.IDLE
            and not conn.trailing_data[0]
        )

    def _receive_body(self, data: bytes) -> bytes:
        """Take what belongs to the body of the plain request, and return the rest. The body of a request that was answered is dropped."""
        part = data[: self._body_left]
        self._body_left -= len(part)
        cycle = self.cycle
        if cycle.response_complete:
            self._start_timer()
            if not self._body_left:
                self._stop_timer()
        else:
            cycle.body += part
            cycle.more_body = self._body_left > 0
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()
        return data[len(part) :]

    def _serve(self, head: PlainHead) -> None:
        """Start the app for a plain request, as uvicorn does for those that h11 has read."""
        raw_path, _, query = head.target.partition(b"?")
        self.headers = head.headers
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]  # as in uvicorn
            "method": head.method.decode("ascii"),
            "root_path": self.root_path,
            "path": self.root_path + unquote(raw_path.decode("ascii")),
            "raw_path": self.root_path.encode("ascii") + raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        self.cycle = PlainCycle(
            scope=self.scope,
            conn=self.conn,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            on_response=self.on_response_complete,
        )
        self.scope[BODY_ARRIVED] = self.cycle.body_arrived  # type: ignore[typeddict-unknown-key]  # an extension
        self._body_left = head.length
        if not head.length:
            self.cycle.more_body = False
            self.cycle.message_event.set()
        task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _pass_on(self, data: bytes) -> None:
        if self.is_idle():
            self._start_timer()
        super().data_received(data)
        if self._upgraded:
            return
        if not self.is_idle():
            self._stop_timer()
            return
        if self._is_between_requests():  # the body of a request that was already answered is complete
            self._stop_timer()
            self._keep_alive_for(self.timeout_keep_alive)
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

    def on_response_complete(self) -> None:
        """Go on with what has arrived meanwhile. A timer that runs already is not started again: it looks at `_answered_s`."""
        if not isinstance(self.cycle, PlainCycle):
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._answered_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._keep_alive_for(self.timeout_keep_alive)
        self.flow.resume_reading()
        if self._early:
            data, self._early = self._early, b""
            self.data_received(data)

    def _keep_alive_for(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it was idle for the whole time; else wait for the rest of it."""
        self.timeout_keep_alive_task = None
        if isinstance(self.cycle, PlainCycle) and not self.transport.is_closing():
            if not self.cycle.response_complete:
                return
            left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
            if left_s > 0:
                self._keep_alive_for(left_s)
                return
        super().timeout_keep_alive_handler()

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
