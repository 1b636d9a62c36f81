"""Connections to PostgreSQL: how they are opened and configured, and a pool of read-only ones."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import psycopg

from phalanx.core.state.records import ColumnValue
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.errors import to_store_error
from phalanx.store.sql.postgres.upgrade import migrate
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.reading import SqlReader

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Cursor: TypeAlias = psycopg.Cursor[tuple[Any, ...]]

OLDEST_VERSION: Final = 13  # oldest version with support when this was written (2026: 14)
STATEMENT_MAX_S: Final = 30.0  # one statement; the longest reads 10,000 jobs in a tenth of a second
LOCK_WAIT_MAX_S: Final = 5.0
# A head that is frozen between two statements of a commit holds the leader's row: the server ends its session, so that another can lead.
IDLE_IN_TRANSACTION_MAX_S: Final = 2.0
EVICT_AFTER_S: Final = 0.5  # wait for the leader's row; a commit takes some milliseconds, a takeover has 5 s in all
READERS_MAX: Final = 8  # at once; PostgreSQL's default limit is 100 connections in total
READER_WAIT_S: Final = 10.0
_log = logging.getLogger("phalanx.store")


def open_writer(address: Address) -> Connection:
    """Open the connection that commits: checked, configured so that COMMIT is durable, and with an upgraded schema.

    Raises:
        StoreUnusable: a retry does not help: access denied, server too old, wrong encoding, newer release, missing privilege.
        StoreRefused: the server does not answer now.
    """
    connection = None
    try:
        connection = connect(address)
        migrate(connection, migrations(POSTGRES.name))
    except (psycopg.Error, OSError, StoreUnusable) as error:
        if connection is not None:
            close(connection)
        if isinstance(error, StoreUnusable):
            raise
        raise to_store_error(error, address) from None  # psycopg's message may contain the password
    return connection


def connect(address: Address, *, read_only: bool = False) -> Connection:
    """Open and configure a connection, in autocommit mode.

    Raises:
        StoreUnusable: Phalanx cannot use this server or database.
        psycopg.Error: the server cannot be reached, or denies access.
    """
    connection = psycopg.connect(address.conninfo, autocommit=True)
    try:
        version = connection.info.server_version // 10_000
        if version < OLDEST_VERSION:
            raise StoreUnusable(
                f"PostgreSQL at {address.shown} is version {version}", hint=f"Phalanx needs {OLDEST_VERSION} or newer"
            )
        settings = (STATEMENT_MAX_S, LOCK_WAIT_MAX_S, IDLE_IN_TRANSACTION_MAX_S)
        row = connection.execute(
            POSTGRES.reads["settle"].encode(), (*(f"{s * 1000:.0f}" for s in settings), "on" if read_only else "off")
        ).fetchone()
        assert row is not None
        _check(str(row[0]), standby=bool(row[1]), fsync=str(row[2]), address=address, warn=not read_only)
    except BaseException:
        close(connection)
        raise
    return connection


def _check(encoding: str, *, standby: bool, fsync: str, address: Address, warn: bool) -> None:
    if encoding != "UTF8":
        raise StoreUnusable(
            f"the database at {address.shown} has the encoding {encoding}; UTF8 is required",
            hint="create another: createdb --encoding UTF8 --template template0 NAME",
        )
    if standby:
        raise StoreUnusable(f"PostgreSQL at {address.shown} is a read-only standby", hint="use the primary's address")
    if fsync != "on" and warn:
        _log.warning(
            "PostgreSQL at %s runs with fsync=%s: acknowledged data may be lost if its machine fails",
            address.shown,
            fsync,
        )


class PostgresReaders:
    """Pool of read-only connections for all threads. Each statement sees one committed state."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: deque[Connection] = deque()  # its append and pop are atomic
        self._slots = threading.BoundedSemaphore(READERS_MAX)
        self._closed = threading.Event()

    @contextmanager
    def borrow(self) -> Iterator[SqlReader]:
        """Borrow a connection for one read.

        Raises:
            StoreRefused: the database does not answer, all connections are in use, or the store is closed.
            StoreUnusable: the database is damaged, or was replaced by another.
        """
        if self._closed.is_set():
            raise StoreRefused("the store is closed", hint="the head is stopping")
        if not self._slots.acquire(timeout=READER_WAIT_S):
            raise StoreRefused(f"all {READERS_MAX} connections for reading are in use", hint="try again in a moment")
        connection = None
        try:
            connection = self._take()
            yield sql_reader(connection)
        except (psycopg.Error, OSError, ValueError) as error:
            if connection is not None:
                close(connection)
            raise to_store_error(error, self._address, reading=True) from None
        finally:
            if connection is not None:
                self._return(connection)
            self._slots.release()

    def close(self) -> None:
        """Close idle connections; borrowed ones are closed when they are returned."""
        self._closed.set()
        while self._idle:
            close(self._idle.pop())

    def _take(self) -> Connection:
        while self._idle:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if is_alive(connection):
                    return connection
                close(connection)
        return connect(self._address, read_only=True)

    def _return(self, connection: Connection) -> None:
        if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            close(connection)
            return
        self._idle.append(connection)
        if self._closed.is_set():  # closed between the two statements
            self.close()


def sql_reader(connection: Connection) -> SqlReader:
    """Wrap a connection for the queries that both databases share."""

    def execute(sql: str, values: tuple[ColumnValue, ...] = (), /) -> Iterable[Any]:
        cursor = connection.execute(
            sql.encode(), values or None
        )  # bytes: psycopg's type hints accept only literals as text
        return cursor.fetchall() if cursor.description is not None else ()

    return SqlReader(POSTGRES, execute)


def execute_with_eviction(connection: Connection, sql: str, *, of_pid: int = 0) -> Cursor:
    """Run a statement that locks the leader's row, and end the sessions that hold it if necessary.

    A head that was suspended or disconnected while it sent a batch would hold the row until its machine closes the connection, and without
    a machine for hours: PostgreSQL's idle timeout does not apply there. So such sessions are ended after LET_GO_S; a user may end their own.

    Args:
        connection: in autocommit mode, outside of a transaction.
        sql: the statement that locks the row.
        of_pid: the only session to end; 0 for any that waits for its client.

    Raises:
        psycopg.Error: the row cannot be locked.
    """
    _wait_for_locks(connection, EVICT_AFTER_S)
    try:
        return connection.execute(sql.encode())
    except psycopg.errors.LockNotAvailable:
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.rollback()
        connection.execute(POSTGRES.reads["evict"].encode(), (of_pid,))
    finally:
        if not connection.closed:
            _wait_for_locks(connection, LOCK_WAIT_MAX_S)
    return connection.execute(sql.encode())


def _wait_for_locks(connection: Connection, seconds: float) -> None:
    connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{seconds * 1000:.0f}",))


def is_alive(connection: Connection) -> bool:
    """Whether an idle connection is still open. If the server has closed it, it is readable."""
    if connection.closed:
        return False
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return not waiting.poll(0)


def close(connection: Connection) -> None:
    """Close a connection; the server rolls back an open transaction. Idempotent."""
    with contextlib.suppress(psycopg.Error, OSError):
        connection.close()


def abort(connection: Connection) -> None:
    """Shut down a connection on which another thread may wait; that thread gets an error at once."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)
