"""History in memory: for tests, and for a head whose history store cannot be opened."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from phalanx.ports.history import ChunkKind, HistoryStore, StoredChunk


class MemoryHistory(HistoryStore):
    """Chunks in a dict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[tuple[ChunkKind, str, int], StoredChunk] = {}

    def put(self, chunks: Sequence[StoredChunk]) -> None:
        """Keep the chunks."""
        with self._lock:
            self._chunks.update({(one.kind, one.series, one.begin_s): replace(one) for one in chunks})

    def read(self, kind: ChunkKind, series: str, begin_s: int, end_s: int) -> list[StoredChunk]:
        """The chunks of a series in a span, by time."""
        found = [one for one in self._of(kind) if one.series == series and begin_s <= one.begin_s < end_s]
        return sorted(found, key=lambda one: one.begin_s)

    def pending(self, kind: ChunkKind, end_s: int, limit: int) -> list[StoredChunk]:
        """Chunks that are not rolled up yet, oldest first."""
        found = [one for one in self._of(kind) if one.pending and one.begin_s < end_s]
        return sorted(found, key=lambda one: (one.begin_s, one.series))[:limit]

    def drop(self, kind: ChunkKind, before_s: int) -> int:
        """Drop old chunks."""
        return self._remove([one for one in self._of(kind) if one.begin_s < before_s])

    def keep_newest(self, kind: ChunkKind, count: int) -> int:
        """Drop all but the newest."""
        found = sorted(self._of(kind), key=lambda one: (one.begin_s, one.series), reverse=True)
        return self._remove(found[count:])

    def size_bytes(self) -> int:
        """The bytes of all chunks."""
        with self._lock:
            return sum(len(one.data) for one in self._chunks.values())

    def close(self) -> None:
        """Do nothing."""

    def _of(self, kind: ChunkKind) -> list[StoredChunk]:
        with self._lock:
            return [one for one in self._chunks.values() if one.kind is kind]

    def _remove(self, chunks: list[StoredChunk]) -> int:
        with self._lock:
            for one in chunks:
                self._chunks.pop((one.kind, one.series, one.begin_s), None)
        return len(chunks)
