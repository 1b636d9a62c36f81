"""A client of gateways that costs little: connections that stay open, and answers read by their framing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

KEY = "good-key"
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 26  # about 420 tokens


def request_bytes(url: str, *, stream: bool, chunks: int = 32, pause_s: float = 0.0, text: str = PROMPT) -> bytes:
    """Return a whole HTTP request for a chat."""
    body = json.dumps(
        {
            "model": "chat",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 64,
            "stream": stream,
            "user": f"{chunks}/{pause_s}",
        }
    ).encode()
    host = urlsplit(url).netloc
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Answer:
    """Times of one answer, in seconds after its request: its first byte of text, its end, and the longest silence within it."""

    status: int
    first_s: float
    end_s: float
    longest_s: float
    body: list[bytes] = field(default_factory=list)


class Connection:
    """One connection to a gateway."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its answer to the end."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        assert self._writer is not None
        reader = self._reader
        began_s = time.perf_counter()
        self._writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        status = int(head[9:12])
        body, first_s, last_s, longest_s = [], 0.0, 0.0, 0.0
        if b"transfer-encoding: chunked" in lower:
            while True:
                size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
                part = await reader.readexactly(size + 2)
                if not size:
                    break
                now_s = time.perf_counter()
                if not first_s:
                    first_s = now_s - began_s
                else:
                    longest_s = max(longest_s, now_s - last_s)
                last_s = now_s
                body.append(part[:-2])
        else:
            at = lower.index(b"content-length:") + 15
            body.append(await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)])))
            first_s = time.perf_counter() - began_s
        if b"connection: close" in lower:
            self.close()
        return Answer(status, first_s, time.perf_counter() - began_s, longest_s, body)

    def close(self) -> None:
        """Close it; the next request opens it again."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._reader = self._writer = None


async def ask_many(url: str, request: bytes, count: int, at_once: int) -> list[Answer]:
    """Send a request this often over this many connections."""
    left, answers = count, list[Answer]()

    async def one() -> None:
        nonlocal left
        connection = Connection(url)
        while left > 0:
            left -= 1
            answers.append(await connection.ask(request))
        connection.close()

    await asyncio.gather(*(one() for _ in range(at_once)))
    return answers
