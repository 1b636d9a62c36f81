"""One plain request and its response (`plain_requests`): uvicorn's cycle, but the response is framed here and not by h11.

The head of a response whose length is known goes out with the first bytes of its body, in one write; uvicorn and h11 make three of it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, RequestResponseCycle

BODY_ARRIVED: Final = "phalanx.body_arrived"
"""Key of a scope: a function that returns whether the whole body of the request has arrived, so that the next message has all of it."""
_NO_BODY: Final = frozenset({204, 304})  # RFC 9110, 6.4.1; no handler answers 1xx
_HEADERS: Final = re.compile(rb"(?:[-!#$%&'*+.^_`|~0-9a-zA-Z]+: [\t\x20-\x7e\x80-\xff]*\r\n)*")


class PlainCycle(RequestResponseCycle):
    """See the module. Its connection (`conn`, of h11) stays idle."""

    _head = b""  # of a response, until its first bytes are written
    _left: int | None = None  # bytes of the body that are still to be sent; None: it is sent in chunks
    _closes = False
    _received = False

    def body_arrived(self) -> bool:
        """Whether the whole body has arrived, and none of it was received by the app."""
        return not (self.more_body or self._received or self.disconnected)

    async def receive(self) -> Any:
        """Return the next part of the body, or the news that the client has left."""
        self._received = True
        return await super().receive()

    async def send(self, message: Any) -> None:
        """Send a part of the response.

        Raises:
            RuntimeError: the parts contradict each other, or a header contains a line break. Nothing of that part was sent.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            _require(message, "http.response.start")
            self._start(int(message["status"]), [*self.default_headers, *message.get("headers", ())])
        elif not self.response_complete:
            _require(message, "http.response.body")
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"message {message['type']!r} after the end of the response")

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._left, self._closes = None, False
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-length":
                self._left = int(value)
            elif lower == b"connection" and value.lower() == b"close":
                self._closes = True
            elif lower == b"transfer-encoding":
                raise RuntimeError("a handler does not choose how its response is framed")
        if status in _NO_BODY:
            self._left = 0
        elif self._left is None:
            headers.append((b"Transfer-Encoding", b"chunked"))
        lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        if lines.count(b"\r\n") != len(headers) or _HEADERS.fullmatch(lines) is None:
            raise RuntimeError(f"a header of the response is invalid: {lines[:500]!r}")
        self._head = b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, STATUS_PHRASES[status], lines)
        self.response_started = True
        if self._left is None:  # a stream, whose first part may come much later
            self._write(b"")

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._left is None:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(framed if more else framed + b"0\r\n\r\n")
        else:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response has not the length that its head states")
            self._write(body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if self._closes or not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self.transport.write(head + data if head else data)


def _require(message: Any, kind: str) -> None:
    if message["type"] != kind:
        raise RuntimeError(f"message {message['type']!r} where {kind!r} belongs")
