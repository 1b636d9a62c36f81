"""The HistoryStore port in a SQLite file of its own, beside the database of records.

It is not truth: WAL without a sync at each commit, so that a power cut loses the newest commits and nothing else. A damaged file is moved
aside and a new one begins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import apsw

from phalanx.failpoints import around
from phalanx.ports.history import ChunkKind, HistoryStore, HistoryUnavailable, StoredChunk
from phalanx.store.sql.queries import queries

T = TypeVar("T")
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS chunks (
    kind INTEGER NOT NULL, series TEXT NOT NULL, begin_s INTEGER NOT NULL, pending INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (kind, series, begin_s)
) STRICT;
CREATE INDEX IF NOT EXISTS chunks_by_time ON chunks (kind, begin_s);
CREATE INDEX IF NOT EXISTS chunks_pending ON chunks (kind, begin_s) WHERE pending;
"""
_APPLICATION_ID: Final = 0x50485848  # "PHXH"
_BUSY_TIMEOUT_MS: Final = 2000
_CACHE_KIB: Final = 4096
_DAMAGE: Final = (apsw.CorruptError, apsw.NotADBError)
_log = logging.getLogger("phalanx.history")


class HistoryFile(HistoryStore):
    """A file, created if missing. One connection, which all threads share.

    It opens at the first use, and again after each failure, so that no failure of the disk stops a head that starts.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: apsw.Connection | None = None
        self._closed = False
        self._sql = queries("sqlite", "history.sql")

    def put(self, chunks: Sequence[StoredChunk]) -> None:
        """Write chunks in one transaction."""
        rows = [(one.kind.value, one.series, one.begin_s, int(one.pending), one.data) for one in chunks]

        def write(connection: apsw.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                with around("history.put.rows"):
                    connection.executemany(self._sql["put"], rows)
                with around("history.put.commit"):
                    connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        self._run(write)

    def read(self, kind: ChunkKind, series: str, begin_s: int, end_s: int) -> list[StoredChunk]:
        """The chunks of a series in a span, by time."""
        return self._rows("read", (kind.value, series, begin_s, end_s))

    def pending(self, kind: ChunkKind, end_s: int, limit: int) -> list[StoredChunk]:
        """Chunks that are not rolled up yet, oldest first."""
        return self._rows("pending", (kind.value, end_s, limit))

    def drop(self, kind: ChunkKind, before_s: int) -> int:
        """Drop old chunks; their pages are used again."""

        def write(connection: apsw.Connection) -> int:
            with around("history.drop.rows"):
                connection.execute(self._sql["drop"], (kind.value, before_s))
            return connection.changes()

        return self._run(write)

    def keep_newest(self, kind: ChunkKind, count: int) -> int:
        """Drop all but the newest."""

        def write(connection: apsw.Connection) -> int:
            with around("history.keep.rows"):
                connection.execute(self._sql["keep_newest"], (kind.value, kind.value, count))
            return connection.changes()

        return self._run(write)

    def size_bytes(self) -> int:
        """The size of the file and its WAL."""
        sizes = [os.path.getsize(path) for path in (self._path, self._path + "-wal") if os.path.exists(path)]
        return sum(sizes)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            self._drop_connection()

    def _rows(self, name: str, values: tuple[int | str, ...]) -> list[StoredChunk]:
        sql = self._sql
        reads = {"read": sql["read"], "pending": sql["pending"]}
        found = self._run(lambda connection: connection.execute(reads[name], values).fetchall())
        return [
            StoredChunk(
                kind=ChunkKind(int(str(kind))),
                series=str(series),
                begin_s=int(str(begin_s)),
                pending=bool(pending),
                data=bytes(data) if isinstance(data, bytes) else b"",
            )
            for kind, series, begin_s, pending, data in found
        ]

    def _run(self, work: Callable[[apsw.Connection], T]) -> T:
        with self._lock:
            try:
                try:
                    return work(self._connected())
                except _DAMAGE as error:
                    self._drop_connection()
                    self._begin_again(error)
                    raise HistoryUnavailable(f"{self._path} was damaged ({_in_line(error)})") from error
            except (apsw.Error, OSError) as error:
                self._drop_connection()
                raise HistoryUnavailable(f"{self._path}: {_in_line(error)}") from error

    def _connected(self) -> apsw.Connection:
        if self._closed:
            raise HistoryUnavailable("the head is stopping")
        if self._connection is None:
            with around("history.open.begin"):
                connection = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
            self._connection = connection
            connection.set_busy_timeout(_BUSY_TIMEOUT_MS)
            connection.pragma("cache_size", -_CACHE_KIB)
            connection.pragma("journal_mode", "wal")
            connection.pragma("synchronous", 1)  # NORMAL: the WAL is synced at checkpoints
            if connection.pragma("application_id") not in (0, _APPLICATION_ID):
                raise apsw.NotADBError("it belongs to another program")
            with around("history.open.schema"):
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID};{_SCHEMA}")
        return self._connection

    def _begin_again(self, error: Exception) -> None:
        """Move a damaged file aside. Only the newest one is kept."""
        aside = self._path + ".damaged"
        _log.error("%s is damaged (%s): it is now %s, and a new history begins", self._path, _in_line(error), aside)
        with around("history.aside.rename"):
            for ending in ("", "-wal", "-shm"):
                if os.path.exists(self._path + ending):
                    os.replace(self._path + ending, aside + ending)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(force=True)


def _in_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
