"""Where uploaded archives are kept, by the SHA-256 of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed: equal bytes are kept once, and a name never changes what it holds."""

    def put(self, sha256: str, chunks: Iterator[bytes]) -> int:
        """Keep the bytes and answer their count; durable when this returns.

        Raises:
            BadRequest: the bytes have another hash.
            StoreRefused: no room.
        """
        ...

    def has(self, sha256: str) -> bool:
        """Whether the blob is here, whole."""
        ...

    def path(self, sha256: str) -> str:
        """The file that holds it, for sending.

        Raises:
            NotFound: no such blob.
        """
        ...
