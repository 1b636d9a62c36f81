"""How connections to PostgreSQL are opened and what each is set to; a few that read are lent to whoever asks."""

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

from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.documents import Column
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.refusals import refusal
from phalanx.store.sql.postgres.upgrade import migrate
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.reading import Look

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Cursor: TypeAlias = psycopg.Cursor[tuple[Any, ...]]

OLDEST_VERSION: Final = 13  # the oldest that PostgreSQL itself still mended when this was written (2026: 14 is)
STATEMENT_MAX_S: Final = 30.0  # one statement; the longest reads 10,000 jobs in a tenth of a second
LOCK_WAIT_MAX_S: Final = 5.0
# A head that was frozen between two statements of a commit holds the leader's row: the server lets go of it, so that another may lead.
IDLE_IN_TRANSACTION_MAX_S: Final = 2.0
LET_GO_S: Final = 0.5  # a commit takes some milliseconds; a takeover has 5 s in all
READERS_MAX: Final = 8  # at once; PostgreSQL's own default is 100 connections for everybody
READER_WAIT_S: Final = 10.0
_log = logging.getLogger("phalanx.store")


def open_writer(address: Address) -> Connection:
    """The connection that commits: checked, set so that COMMIT means durable, and the schema brought up to date.

    Raises:
        StoreUnusable: another try does not help: not let in, too old, another encoding, a newer release, a right that is missing.
        StoreRefused: it does not answer now.
    """
    connection = None
    try:
        connection = connect(address)
        migrate(connection, migrations(POSTGRES.name))
    except (psycopg.Error, OSError, StoreUnusable) as error:
        if connection is not None:
            shut(connection)
        if isinstance(error, StoreUnusable):
            raise
        raise refusal(error, address) from None  # psycopg's own message may hold the password
    return connection


def connect(address: Address, *, read_only: bool = False) -> Connection:
    """A connection as all of ours are set, in autocommit.

    Raises:
        StoreUnusable: the server or the database is not one that Phalanx can use.
        psycopg.Error: it cannot be reached, or does not let us in.
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
        _check(str(row[0]), standby=bool(row[1]), fsync=str(row[2]), address=address, say=not read_only)
    except BaseException:
        shut(connection)
        raise
    return connection


def _check(encoding: str, *, standby: bool, fsync: str, address: Address, say: bool) -> None:
    if encoding != "UTF8":
        raise StoreUnusable(
            f"the database at {address.shown} is encoded in {encoding}, which cannot hold every name",
            hint="make one that can: createdb --encoding UTF8 --template template0 NAME",
        )
    if standby:
        raise StoreUnusable(f"PostgreSQL at {address.shown} is a standby and takes no writes", hint="name the primary")
    if fsync != "on" and say:
        _log.warning(
            "PostgreSQL at %s runs with fsync=%s: what is acknowledged may be lost with its machine",
            address.shown,
            fsync,
        )


class Readers:
    """Connections that read, lent to whichever thread asks. Each statement sees one committed state."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: deque[Connection] = deque()  # its append and pop are atomic
        self._places = threading.BoundedSemaphore(READERS_MAX)
        self._closed = threading.Event()

    @contextmanager
    def lend(self) -> Iterator[Look]:
        """A connection for one read.

        Raises:
            StoreRefused: the database does not answer, all connections are in use, or the store is closed.
            StoreUnusable: it is damaged, or not ours any more.
        """
        if self._closed.is_set():
            raise StoreRefused("the store is closed", hint="the head is stopping")
        if not self._places.acquire(timeout=READER_WAIT_S):
            raise StoreRefused(
                f"{READERS_MAX} reads of the database are under way already", hint="try again in a moment"
            )
        connection = None
        try:
            connection = self._take()
            yield look(connection)
        except (psycopg.Error, OSError, ValueError) as error:
            if connection is not None:
                shut(connection)
            raise refusal(error, self._address, reading=True) from None
        finally:
            if connection is not None:
                self._give_back(connection)
            self._places.release()

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        self._closed.set()
        while self._idle:
            shut(self._idle.pop())

    def _take(self) -> Connection:
        while self._idle:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if alive(connection):
                    return connection
                shut(connection)
        return connect(self._address, read_only=True)

    def _give_back(self, connection: Connection) -> None:
        if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            shut(connection)
            return
        self._idle.append(connection)
        if self._closed.is_set():  # closed between the two lines
            self.close()


def look(connection: Connection) -> Look:
    """A connection as what asks in both dialects takes it."""

    def execute(sql: str, values: tuple[Column, ...] = (), /) -> Iterable[Any]:
        cursor = connection.execute(sql.encode(), values or None)  # bytes: psycopg's types want literals for text
        return cursor.fetchall() if cursor.description is not None else ()

    return Look(POSTGRES, execute)


def held_by_me(connection: Connection, sql: str, *, of_pid: int = 0) -> Cursor:
    """Run a statement that takes the row of the term from whoever holds it.

    A head that was stopped or cut off in the middle of sending a batch would hold it for as long as its machine answers for it, and without
    a machine for hours: PostgreSQL counts no idle time there. So after a moment such sessions are ended; a user may end their own.

    Args:
        connection: in autocommit, outside of a transaction.
        sql: what needs the row.
        of_pid: of the one session to end; 0 for whoever waits for a client that says nothing.

    Raises:
        psycopg.Error: it cannot be had.
    """
    _wait_for_locks(connection, LET_GO_S)
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


def alive(connection: Connection) -> bool:
    """Whether an idle connection still leads to a server. One that restarted has closed it, which is something to read."""
    if connection.closed:
        return False
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return not waiting.poll(0)


def shut(connection: Connection) -> None:
    """Close a connection; what is open in it is rolled back by the server. Harmless twice."""
    with contextlib.suppress(psycopg.Error, OSError):
        connection.close()


def cut(connection: Connection) -> None:
    """Break a connection on which another thread may be waiting; that one hears of it at once."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)
