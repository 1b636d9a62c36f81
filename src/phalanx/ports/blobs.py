"""Storage of uploaded archives, addressed by the SHA-256 of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed storage: equal bytes are stored once, and the content under a name never changes."""

    def put(self, sha256: str, chunks: Iterator[bytes]) -> int:
        """Store the bytes and return their count; durable when this returns.

        Raises:
            BadRequest: the bytes have another hash.
            StoreRefused: the disk is full.
        """
        ...

    def has(self, sha256: str) -> bool:
        """Whether the complete blob is stored; if it is, it counts as used now."""
        ...

    def unused(self, before_s: float) -> list[tuple[str, int]]:
        """Name and size of each blob that was last used before a Unix time."""
        ...

    def remove_unused(self, sha256: str, before_s: float) -> bool:
        """Remove a blob unless it was used since `before_s`. Returns whether it is removed. Idempotent."""
        ...

    def path(self, sha256: str) -> str:
        """Path of the blob's file.

        Raises:
            NotFound: no such blob.
        """
        ...
