"""Gzip for streams that send the same events to many readers: each event is compressed once, by itself, and its bytes are sent to all.

A deflate stream may be put together from parts that were compressed apart, if each ends at a whole byte and refers to nothing before it (a
full flush). Only the checksum at the end belongs to one reader.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import Final

from starlette.types import Message, Send

_HEAD: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK: Final = b"\x03\x00"
_LEVEL: Final = 5
_EVENTS_KEPT: Final = 16  # compressed: the newest frame, and the newest changes


class GzipStream:
    """The gzip stream of one reader."""

    def __init__(self) -> None:
        self._head = _HEAD
        self._crc = self._size = 0

    def encode(self, piece: bytes, *, last: bool = False) -> bytes:
        """Return the next part of the stream. `last`: with its end."""
        head, self._head = self._head, b""
        self._crc = zlib.crc32(piece, self._crc)
        self._size += len(piece)
        end = _LAST_BLOCK + struct.pack("<LL", self._crc, self._size & 0xFFFFFFFF) if last else b""
        return head + (_deflated(piece) if piece else b"") + end


def sending_gzip(send: Send) -> Send:
    """Return `send` with its bodies compressed."""
    stream = GzipStream()

    async def send_compressed(message: Message) -> None:
        if message["type"] == "http.response.body":
            body = stream.encode(message["body"], last=not message.get("more_body", False))
            message = {**message, "body": body}
        await send(message)

    return send_compressed


@lru_cache(maxsize=_EVENTS_KEPT)
def _deflated(piece: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
