"""A connection that sends bytes as they are and reads one answer. No HTTP library would send what is sent here."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

HANG_S = 20.0  # no answer after this is a hang
LISTEN_S = 0.05  # to a long poll or a stream
BODY_BYTES_MAX = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        status: 0 where the head closed without a word, or the caller left a request that waits by right.
        seconds: from the last byte sent to the last byte of the answer.
        left: the caller left.
        hung: nothing came in HANG_S.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float
    left: bool = False
    hung: bool = False


class Line:
    """Keeps one connection open as long as both sides do."""

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, request: bytes, *, waits: bool = False, ends: bool = False, no_body: bool = False) -> Answer:
        """Send it and read the answer, over a new connection where the old one was closed by the head meanwhile."""
        fresh = self._socket is None
        answer = self._ask(request, waits, ends, no_body)
        if answer.status == 0 and not fresh and not answer.left and not answer.hung:
            answer = self._ask(request, waits, ends, no_body)  # the old connection had been closed under us
        return answer

    def _ask(self, request: bytes, waits: bool, ends: bool, no_body: bool) -> Answer:
        if self._socket is None:
            self._socket = socket.create_connection(self._where, timeout=HANG_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(HANG_S)
        with contextlib.suppress(
            OSError
        ):  # a head that refuses early closes while we still send; its answer may be there
            self._socket.sendall(request)
        if ends:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        self._socket.settimeout(LISTEN_S if waits else HANG_S)
        try:
            status, headers, body, closed = self._read(no_body)
        except TimeoutError:
            self.close()
            return Answer(status=0, headers={}, body=b"", seconds=time.monotonic() - began, left=waits, hung=not waits)
        except (OSError, ValueError):
            self.close()
            return Answer(status=0, headers={}, body=b"", seconds=time.monotonic() - began)
        took_s = time.monotonic() - began
        if closed or ends or waits:
            self.close()
        return Answer(status=status, headers=headers, body=body, seconds=took_s)

    def _read(self, no_body: bool) -> tuple[int, dict[str, str], bytes, bool]:
        assert self._socket is not None
        with self._socket.makefile("rb") as reader:
            status, headers = 100, dict[str, str]()
            while 100 <= status < 200:
                status, headers = _head_of(reader)
            closed = headers.get("connection", "").lower() == "close"
            if headers.get("content-type", "").startswith("text/event-stream"):
                return status, headers, b"", True
            if no_body or status in (204, 304):
                return status, headers, b"", closed
            if headers.get("transfer-encoding", "").lower() == "chunked":
                body = bytearray()
                while size := int(reader.readline().strip() or b"0", 16):
                    body += reader.read(size)
                    reader.readline()
                reader.readline()
                return status, headers, bytes(body), closed
            if "content-length" in headers:
                return status, headers, reader.read(int(headers["content-length"])), closed
            return status, headers, reader.read(BODY_BYTES_MAX), True


def _head_of(reader) -> tuple[int, dict[str, str]]:
    first = reader.readline()
    if not first.startswith(b"HTTP/1.1 "):
        raise ValueError(f"no answer: {first!r}")
    headers: dict[str, str] = {}
    while (line := reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split()[1]), headers
