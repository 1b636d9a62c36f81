"""The HistoryStore port on PostgreSQL, in the database of records, so that the next leader has it. One connection, which all threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg

from phalanx.failpoints import around
from phalanx.ports.history import ChunkKind, HistoryStore, HistoryUnavailable, StoredChunk
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import Connection, close, connect, is_alive
from phalanx.store.sql.postgres.errors import to_store_error
from phalanx.store.sql.queries import POSTGRES, queries

T = TypeVar("T")


class HistoryTable(HistoryStore):
    """A table of a database that a PostgresStore has migrated.

    Args:
        dsn: the same form as in PostgresStore.
        term: the term under which this head leads; writes of a head that no longer leads have no effect.

    Raises:
        BadRequest: invalid address.
    """

    def __init__(self, dsn: str, *, term: int) -> None:
        self._address = Address.parse(dsn)
        self._term = term
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self._sql = {name: text.encode() for name, text in queries(POSTGRES.name, "history.sql").items()}

    def put(self, chunks: Sequence[StoredChunk]) -> None:
        """Write chunks in one transaction."""
        rows = [(one.kind.value, one.series, one.begin_s, one.pending, one.data, self._term) for one in chunks]

        def write(connection: Connection) -> None:
            connection.execute("BEGIN")
            with around("postgres.history.rows"):
                connection.cursor().executemany(self._sql["put"], rows)
            with around("postgres.history.commit"):
                connection.execute("COMMIT")

        self._run(write)

    def read(self, kind: ChunkKind, series: str, begin_s: int, end_s: int) -> list[StoredChunk]:
        """The chunks of a series in a span, by time."""
        reads = self._sql
        return _chunks(
            self._run(
                lambda connection: connection.execute(reads["read"], (kind.value, series, begin_s, end_s)).fetchall()
            )
        )

    def pending(self, kind: ChunkKind, end_s: int, limit: int) -> list[StoredChunk]:
        """Chunks that are not rolled up yet, oldest first."""
        reads = self._sql
        return _chunks(
            self._run(lambda connection: connection.execute(reads["pending"], (kind.value, end_s, limit)).fetchall())
        )

    def drop(self, kind: ChunkKind, before_s: int) -> int:
        """Drop old chunks."""

        def write(connection: Connection) -> int:
            with around("postgres.history.drop"):
                return connection.execute(self._sql["drop"], (kind.value, before_s)).rowcount

        return self._run(write)

    def keep_newest(self, kind: ChunkKind, count: int) -> int:
        """Drop all but the newest."""

        def write(connection: Connection) -> int:
            with around("postgres.history.keep"):
                return connection.execute(self._sql["keep_newest"], (kind.value, count)).rowcount

        return self._run(write)

    def size_bytes(self) -> int:
        """The size of the table with its indexes."""
        reads = self._sql
        found = self._run(lambda connection: connection.execute(reads["size"]).fetchone())
        return 0 if found is None else int(str(found[0]))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            self._drop_connection()

    def _run(self, work: Callable[[Connection], T]) -> T:
        with self._lock:
            if self._closed:
                raise HistoryUnavailable("the head is stopping")
            try:
                if self._connection is None or not is_alive(self._connection):
                    self._drop_connection()
                    self._connection = connect(self._address)
                return work(self._connection)
            except (psycopg.Error, OSError, ValueError) as error:
                self._drop_connection()  # the server rolls back
                raise HistoryUnavailable(to_store_error(error, self._address, reading=True).message) from None
            except StoreUnusable as error:
                self._drop_connection()
                raise HistoryUnavailable(error.message) from None

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection)


def _chunks(rows: list[tuple[object, ...]]) -> list[StoredChunk]:
    return [
        StoredChunk(
            kind=ChunkKind(int(str(kind))),
            series=str(series),
            begin_s=int(str(begin_s)),
            pending=bool(pending),
            data=bytes(data) if isinstance(data, (bytes, memoryview)) else b"",
        )
        for kind, series, begin_s, pending, data in rows
    ]
