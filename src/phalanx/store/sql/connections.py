"""How connections to a SQLite file are opened: one that writes, under a lock, and any number that read."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import apsw

from phalanx.core.errors import Conflict
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.failpoints import hit, sync_directory
from phalanx.store.sql.migrations import migrate, migrations

BUSY_TIMEOUT_MS: Final = 5000  # a checkpoint may hold others up; a reader never holds the writer
WAL_KEPT_BYTES: Final = 64 * 1024 * 1024  # a WAL that grew beyond it is cut at the next checkpoint
CHECKED_AT_OPEN_BYTES: Final = (
    128 * 1024 * 1024
)  # `integrity_check` reads 400 MB/s (2 cores, file cached): a third of a second
READERS_IDLE_MAX: Final = 8  # connections kept open between reads; more come and go with a burst
WRITER_CACHE_KIB: Final = 32 * 1024  # holds the upper pages of every index of a million jobs
READER_CACHE_KIB: Final = 4 * 1024  # the kernel's cache stands behind it
_DAMAGED: Final = (apsw.CorruptError, apsw.NotADBError)
_RESTORE: Final = "restore the database from a copy; nothing was written to this one"


def lock(path: str) -> int:
    """A descriptor that holds the database for this head alone; closing it, or dying, lets go.

    Raises:
        Conflict: another head has it.
        StoreRefused: the folder cannot be written.
    """
    fd = -1
    try:
        hit("store.open.folder")
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        hit("store.open.lock")
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(
            f"{path} is in use by another head", hint="phalanx down stops it; only one head writes a database"
        ) from None
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise refusal(error, path) from error
    return fd


def open_writer(path: str, vfs: str) -> apsw.Connection:
    """The one connection that writes: WAL, FULL (the WAL is synced at each commit), migrated, and checked when small.

    Raises:
        StoreUnusable: damaged, newer, or not ours.
        StoreRefused: the disk is full or fails.
    """
    connection = None
    try:
        hit("store.open.create")  # by us: jobs carry environments, and WAL and index inherit the mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        hit("store.open.begin")
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, vfs=vfs or None)
        _settings(connection, cache_kib=WRITER_CACHE_KIB)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise StoreUnusable(
                f"{path}: the file system does not carry SQLite's WAL", hint="keep PHALANX_HOME on a local disk"
            )
        connection.pragma("synchronous", 2)  # FULL; the default of the library is only the default
        connection.pragma("foreign_keys", 1)
        connection.pragma("journal_size_limit", WAL_KEPT_BYTES)
        _check(connection, path)
        migrate(connection, migrations("sqlite"))
        sync_directory("store.open.directory", os.path.dirname(path))
    except (apsw.Error, OSError, ValueError, StoreUnusable) as error:
        if connection is not None:
            shut(connection)
        if isinstance(error, StoreUnusable):
            raise
        raise refusal(error, path) from error
    return connection


class Readers:
    """Read-only connections, lent to whichever thread reads. Each statement sees one committed state."""

    def __init__(self, path: str, vfs: str) -> None:
        self._path = path
        self._vfs = vfs
        self._idle: deque[apsw.Connection] = deque()  # its append and pop are atomic
        self._closed = threading.Event()

    @contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """A connection for one read.

        Raises:
            StoreRefused: the database cannot be read now, or the store is closed.
            StoreUnusable: it is damaged.
        """
        connection = None
        try:
            connection = self._take()
            yield connection
        except (apsw.Error, ValueError) as error:  # ValueError: text that is not UTF-8, a word that is no state
            raise refusal(error, self._path) from error
        finally:
            if connection is not None:
                self._give_back(connection)

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        self._closed.set()
        while self._idle:
            shut(self._idle.pop())

    def _take(self) -> apsw.Connection:
        if self._closed.is_set():
            raise StoreRefused("the store is closed", hint="the head is stopping")
        try:
            return self._idle.pop()
        except IndexError:
            connection = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READONLY, vfs=self._vfs or None)
            _settings(connection, cache_kib=READER_CACHE_KIB)
            connection.pragma("query_only", 1)
            return connection

    def _give_back(self, connection: apsw.Connection) -> None:
        if self._closed.is_set() or len(self._idle) >= READERS_IDLE_MAX:
            shut(connection)
        else:
            self._idle.append(connection)
            if self._closed.is_set():  # closed between the two lines
                self.close()


def shut(connection: apsw.Connection) -> None:
    """Close a connection. The last one empties the WAL into the database; a disk that refuses leaves it to the next start."""
    try:
        hit("store.close.checkpoint")
        connection.close(force=True)
    except apsw.Error:
        pass


def refusal(error: Exception, path: str) -> StoreRefused | StoreUnusable:
    """What a failure of the disk or the database means to whoever asked."""
    if isinstance(error, (*_DAMAGED, ValueError)):
        return StoreUnusable(f"{path} is damaged: {error}", hint=_RESTORE)
    if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return StoreRefused(
            f"the disk is full: nothing was written to {path}", hint="free some space; the head goes on by itself"
        )
    if isinstance(error, apsw.BusyError):
        return StoreRefused(
            f"{path} is locked by another process: nothing was written", hint="which one says: fuser -v " + path
        )
    return StoreRefused(
        f"the database failed ({type(error).__name__}: {error}): nothing was written",
        hint=f"look after the disk of {path}",
    )


def _settings(connection: apsw.Connection, *, cache_kib: int) -> None:
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("trusted_schema", 0)
    connection.pragma("cell_size_check", 1)
    connection.pragma("cache_size", -cache_kib)  # negative: in KiB, not pages


def _check(connection: apsw.Connection, path: str) -> None:
    if int(connection.pragma("page_count")) * int(connection.pragma("page_size")) > CHECKED_AT_OPEN_BYTES:
        return
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(3)")]
    if found != ["ok"]:
        raise StoreUnusable(f"{path} is damaged: {'; '.join(found)}", hint=_RESTORE)
