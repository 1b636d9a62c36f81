"""Minimal HTTP/1.1 with keep-alive over asyncio streams, so that 500 supervisors need little CPU compared with the head."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

ASK_S = 120.0  # time-out of a request
LINE_BYTES_MAX = 1 << 20


class NoHeadAnswers(Exception):
    """No head answered: connection refused, reset or timed out, as after a kill."""


@dataclass(slots=True)
class HttpAnswer:
    """The answer of the head and its latency."""

    status: int
    body: bytes
    seconds: float


class HttpConnection:
    """One connection; reopened if the head closed it."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, key: str = "", timeout_s: float = ASK_S
    ) -> HttpAnswer:
        """Send one request and return its answer.

        Raises:
            Away: there is no head, or it ended before it answered.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._ask(method, path, body, key)
        except TimeoutError as error:
            self.close()
            raise NoHeadAnswers(f"{method} {path}: no answer within {timeout_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.close()
            raise NoHeadAnswers(f"{method} {path}: {type(error).__name__} {error}") from error
        except asyncio.CancelledError:
            self.close()
            raise
        return HttpAnswer(status, answer, time.monotonic() - began)

    async def _ask(self, method: str, path: str, body: bytes, key: str) -> tuple[int, bytes]:
        reader, writer = await self._open()
        writer.write(self._head(method, path, len(body), key) + body)
        await writer.drain()
        status, headers = await _head_of(reader)
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            self.close()
        return status, data

    async def follow(self, path: str, seconds: float) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the events of a stream as (id, data), for some seconds or until it ends.

        Raises:
            Away: as for `ask`.
        """
        end = time.monotonic() + seconds
        try:
            reader, writer = await self._open()
            writer.write(self._head("GET", path, 0, ""))
            status, _ = await _head_of(reader)
            if status != 200:
                return
            mark = ""
            while (left_s := end - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        line = await _unchunked(reader)
                except TimeoutError:
                    return
                if line is None:
                    return
                for part in line.split(b"\n"):
                    if part.startswith(b"id: "):
                        mark = part[4:].decode()
                    elif part.startswith(b"data: "):
                        yield mark, part[6:]
                        mark = ""
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise NoHeadAnswers(f"{path}: {error}") from error
        finally:
            self.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_BYTES_MAX)
        return self._streams

    def _head(self, method: str, path: str, length: int, key: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self._port}", f"Authorization: Bearer {self._token}"]
        if key:
            lines.append(f"Idempotency-Key: {key}")
        if length or method != "GET":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await reader.readline()
    if not first.startswith(b"HTTP/1.1 "):
        raise ValueError(f"not an HTTP answer: {first[:100]!r}")
    headers = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split()[1]), headers


async def _unchunked(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next chunk of a stream; None at its end."""
    size = int((await reader.readline()).strip() or b"0", 16)
    if not size:
        return None
    data = await reader.readexactly(size)
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readexactly(2)
    return data
