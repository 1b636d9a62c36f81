"""Storage of uploaded archives, addressed by the SHA-256 of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed storage: equal bytes are stored once, and the content under a name never changes."""

    def received(self, sha256: str) -> int:
        """Bytes of an interrupted upload of the blob, on which `put` can go on; 0 for none."""
        ...

    def put(self, sha256: str, chunks: Iterator[bytes], offset: int = 0) -> int:
        """Store the bytes from `offset` on and return the count of all; durable when this returns.

        Raises:
            BadRequest: the bytes have another hash, or fewer than `offset` are here.
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
