"""An engine that costs next to nothing: `python -m benchmarks.gateway_upstream PORT [PORT ...]`. It answers from prepared bytes.

A request whose body has `"stream": true` gets a stream; `"user": "CHUNKS/PAUSE"` says how many chunks, and the seconds between two.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Final

_USER: Final = re.compile(rb'"user": ?"(\d+)/([0-9.]+)"')
_STREAM: Final = re.compile(rb'"stream": ?true')
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_WHOLE_BODY: Final = json.dumps(
    {
        "id": "cmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "chat",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 420, "total_tokens": 422, "completion_tokens": 2},
    }
).encode()
_CHUNK: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"chat","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_LAST: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"chat","choices":[{"index":0,"delta":{"content":""},'
    b'"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
_LIST: Final = json.dumps(
    {"object": "list", "data": [{"id": "chat", "object": "model", "created": 1, "owned_by": "vllm"}]}
).encode()


def _whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


def _framed(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


WHOLE: Final = _whole(_WHOLE_BODY)
MODELS: Final = _whole(_LIST)
OK: Final = _whole(b"{}")
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK: Final = _framed(_CHUNK)
LAST: Final = _framed(_LAST) + b"0\r\n\r\n"


class Upstream(asyncio.Protocol):
    """One connection. Requests come one after another."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._data[: end + 2]
            found = _LENGTH.search(head)
            if found is not None:
                stop = end + 4 + int(found[1])
                if len(self._data) < stop:
                    return
            elif _CHUNKED.search(head):
                stop = self._data.find(b"0\r\n\r\n", end + 4) + 5
                if stop < end + 4:
                    return
            else:
                stop = end + 4
            body, self._data = self._data[end + 4 : stop], self._data[stop:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"POST") and _STREAM.search(body):
            user = _USER.search(body)
            count, pause_s = (int(user[1]), float(user[2])) if user else (32, 0.0)
            self._transport.write(HEAD + CHUNK)
            self._next(count - 1, pause_s)
        elif head.startswith(b"POST"):
            self._transport.write(WHOLE)
        else:
            self._transport.write(MODELS if b"/v1/models" in head.split(b"\r\n", 1)[0] else OK)

    def _next(self, left: int, pause_s: float) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if left <= 1:
            self._transport.write(LAST)
            return
        asyncio.get_running_loop().call_later(pause_s, self._step, left, pause_s)

    def _step(self, left: int, pause_s: float) -> None:
        assert self._transport is not None
        self._transport.write(CHUNK)
        self._next(left - 1, pause_s)


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve([int(one) for one in sys.argv[1:]]))
