"""Storage of history: compressed chunks of series by time. It is not truth: losing it loses no job, and no failure of it stops the head."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import TryLater


class HistoryUnavailable(TryLater):
    """The history cannot be read or written now: the disk is full, or the database does not answer."""

    code = "history_unavailable"


class ChunkKind(enum.IntEnum):
    """What a chunk holds. The first three are the levels of rollups of a node or of the fleet."""

    TEN_SECONDS = 0
    FIVE_MINUTES = 1
    HOURS = 2
    JOB_CURVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One chunk. `series`: a node, "" for the fleet, or a job; `begin_s`: its time; `pending`: not rolled up into the next level yet."""

    series: str
    kind: ChunkKind
    begin_s: int
    data: bytes
    pending: bool = False


class HistoryStore(ABC):
    """Chunks by (kind, series, begin). Thread-safe. tests/contract checks every implementation."""

    @abstractmethod
    def put(self, chunks: Sequence[StoredChunk]) -> None:
        """Write chunks, all or none; one that exists is replaced.

        Raises:
            HistoryUnavailable: nothing was written.
        """

    @abstractmethod
    def read(self, kind: ChunkKind, series: str, begin_s: int, end_s: int) -> list[StoredChunk]:
        """The chunks that begin in [begin_s, end_s), by time.

        Raises:
            HistoryUnavailable: it cannot be read now.
        """

    @abstractmethod
    def pending(self, kind: ChunkKind, end_s: int, limit: int) -> list[StoredChunk]:
        """Chunks that begin before `end_s` and are not rolled up yet, oldest first.

        Raises:
            HistoryUnavailable: it cannot be read now.
        """

    @abstractmethod
    def drop(self, kind: ChunkKind, before_s: int) -> int:
        """Drop the chunks that begin before `before_s`; return their number.

        Raises:
            HistoryUnavailable: nothing was dropped.
        """

    @abstractmethod
    def keep_newest(self, kind: ChunkKind, count: int) -> int:
        """Drop all but the newest `count` chunks of a kind; return the number of those dropped.

        Raises:
            HistoryUnavailable: nothing was dropped.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """The space that the chunks take, with indexes.

        Raises:
            HistoryUnavailable: it cannot be read now.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it. Idempotent."""
