"""Connections that must say what they want in time and in bounds: uvicorn's protocol waits for the head of a request for ever.

One who sends a byte now and then would otherwise hold a connection, and its descriptor, at no cost (known as slowloris).
"""

from __future__ import annotations

import asyncio
from typing import Final

from h11 import LocalProtocolError
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S: Final = 20.0  # from the opening, or the first byte of the next request, to the end of its head
HEAD_BYTES_MAX: Final = 1 << 16  # h11's own bound is the same; httptools has none
_BODY: Final = b'{"error":{"code":"%b","message":"%b","hint":"%b","retry":false}}'
_REPLY: Final = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"


class HurriedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen by uvicorn when it is imported
    """One connection."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to count."""
        super().connection_made(transport)
        self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count no more."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand the bytes on, as long as they come to the end of a head in time and in bounds."""
        if self.waits():
            self._count()
        super().data_received(data)
        if not self.waits():
            self._stop()
            return
        if (
            self.cycle is None or not self.cycle.more_body
        ):  # else they belong to a body whose request is answered already
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(
                    b"431 Request Header Fields Too Large", b"too_large", b"the head of the request is over 64 KiB"
                )

    def send_400_response(self, msg: str) -> None:
        """As uvicorn, which would answer a HEAD with a body, and who is being answered already once more: those are let go as they are."""
        try:
            super().send_400_response(msg)
        except LocalProtocolError:
            self.transport.close()

    def waits(self) -> bool:
        """For the end of a head, or of a body that nobody reads any more."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def hang_up(self) -> None:
        """At once, without waiting for the other end; not while something we said is still on its way."""
        if self.waits() and not self.transport.get_write_buffer_size():
            self.transport.abort()

    def _count(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._late)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._head_bytes = None, 0

    def _late(self) -> None:
        self._deadline = None
        if self.waits():
            self._refuse(b"408 Request Timeout", b"try_later", b"the head of the request did not come within 20 s")

    def _refuse(self, status: bytes, code: bytes, message: bytes) -> None:
        body = _BODY % (code, message, b"send less, or faster")
        if not self.transport.is_closing():
            self.transport.write(_REPLY % (status, len(body), body))
            self.transport.close()
