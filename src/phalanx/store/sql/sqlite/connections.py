"""Connections to a SQLite file: one that writes, under a lock, and any number that read."""

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
from phalanx.core.hints import Hint, HintCode
from phalanx.durable_files import create_file, make_directory, sync_directory, sync_file, write_at
from phalanx.failpoints import around
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.sqlite.integrity_check import IntegrityCheck, integrity_errors
from phalanx.store.sql.sqlite.upgrade import migrate

BUSY_TIMEOUT_MS: Final = 5000  # a checkpoint may block others; a reader never blocks the writer
WAL_KEPT_BYTES: Final = 64 * 1024 * 1024  # a larger WAL is truncated at the next checkpoint
CHECKED_AT_OPEN_BYTES: Final = 128 * 1024 * 1024  # `integrity_check` at 400 MB/s (2 cores, file cached): 1/3 s
SMALLEST_BYTES: Final = 512  # SQLite's smallest page size (sqlite.org/fileformat.html, 1.3.2)
_MADE: Final = b"made\n"  # content of the lock file once the database exists
READERS_IDLE_MAX: Final = 8  # connections kept open between reads; a burst may open more
WRITER_CACHE_KIB: Final = 32 * 1024  # enough for the upper pages of every index of a million jobs
READER_CACHE_KIB: Final = 4 * 1024  # in addition to the kernel's page cache
_DAMAGED: Final = (apsw.CorruptError, apsw.NotADBError)
_RESTORE: Final = "restore the database from a backup; nothing was written to this one"


def lock(path: str) -> int:
    """Lock the database for this head; return a descriptor that holds the lock until it is closed or the process ends.

    Raises:
        Conflict: another head holds the lock.
        StoreRefused: the folder cannot be written to.
    """
    fd = -1
    try:
        make_directory("store.open", os.path.dirname(path))
        fd = create_file("store.open.lock", path + ".lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(f"{path} is in use by another head", hint=Hint(HintCode.STOP_HEAD)) from None
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise to_store_error(error, path) from error
    return fd


def open_writer(path: str, vfs: str, *, held: int) -> apsw.Connection:
    """Open the connection that writes: WAL, synchronous=FULL (the WAL is synced at each commit), migrated, and checked if small.

    Args:
        path: the file, created if missing.
        vfs: the name of an apsw VFS; empty for SQLite's own.
        held: descriptor of `lock` for this path, in which the existence of the database is recorded; -1 to record nothing, for example for
            a file that a restore has not moved to its place yet.

    Raises:
        StoreUnusable: the file is damaged, of a newer release, or not of Phalanx.
        StoreRefused: the disk is full or fails.
    """
    connection = None
    try:
        _check_size(path)
        os.close(
            create_file("store.open", path, os.O_RDWR)
        )  # with mode 0600, which WAL and index inherit: records contain environments
        with around("store.open.begin"):
            connection = apsw.Connection(
                path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, vfs=vfs or None
            )
        _settings(connection, cache_kib=WRITER_CACHE_KIB)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise StoreUnusable(
                f"{path}: the file system does not support SQLite's WAL", hint="put PHALANX_HOME on a local disk"
            )
        connection.pragma("synchronous", 2)  # FULL, explicitly: the library's default may differ
        connection.pragma("foreign_keys", 1)
        connection.pragma("journal_size_limit", WAL_KEPT_BYTES)
        _check(connection, path)
        migrate(connection, migrations("sqlite"), path)
        sync_directory("store.open", os.path.dirname(path))
        if held >= 0:
            record_created(held)
    except (apsw.Error, OSError, ValueError, StoreUnusable) as error:
        if connection is not None:
            close(connection)
        if isinstance(error, StoreUnusable):
            raise
        raise to_store_error(error, path) from error
    return connection


class SqliteReaders:
    """Pool of read-only connections for all threads. Each statement sees one committed state."""

    def __init__(self, path: str, vfs: str) -> None:
        self._path = path
        self._vfs = vfs
        self._idle: deque[apsw.Connection] = deque()  # its append and pop are atomic
        self._closed = threading.Event()

    @contextmanager
    def borrow(self) -> Iterator[apsw.Connection]:
        """Borrow a connection for one read.

        Raises:
            StoreRefused: the database cannot be read now, or the store is closed.
            StoreUnusable: the database is damaged.
        """
        connection = None
        try:
            connection = self._take()
            yield connection
        except (apsw.Error, ValueError) as error:  # ValueError: text that is not UTF-8, an unknown state
            raise to_store_error(error, self._path) from error
        finally:
            if connection is not None:
                self._return(connection)

    def close(self) -> None:
        """Close idle connections; borrowed ones are closed when they are returned."""
        self._closed.set()
        while self._idle:
            close(self._idle.pop())

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

    def _return(self, connection: apsw.Connection) -> None:
        if self._closed.is_set() or len(self._idle) >= READERS_IDLE_MAX:
            close(connection)
        else:
            self._idle.append(connection)
            if self._closed.is_set():  # closed between the two statements
                self.close()


def close(connection: apsw.Connection) -> None:
    """Close a connection. The last one checkpoints the WAL; if the disk fails, the next start does it."""
    try:
        with around("store.close.checkpoint"):
            connection.close(force=True)
    except apsw.Error:
        pass


def to_store_error(error: Exception, path: str) -> StoreRefused | StoreUnusable:
    """Translate an error of the disk or the database."""
    text = " ".join(str(error).split())  # SQLite quotes the damaged SQL on several lines
    if isinstance(error, (*_DAMAGED, ValueError)):
        return StoreUnusable(f"{path} is damaged: {text}", hint=_RESTORE)
    if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return StoreRefused(
            f"the disk is full: nothing was written to {path}",
            hint="free some space; the head then continues by itself",
        )
    if isinstance(error, apsw.BusyError):
        return StoreRefused(
            f"{path} is locked by another process: nothing was written", hint=f"find that process: fuser -v {path}"
        )
    return StoreRefused(
        f"the database failed ({type(error).__name__}: {text}): nothing was written",
        hint=f"check the disk of {path}",
    )


def _settings(connection: apsw.Connection, *, cache_kib: int) -> None:
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("trusted_schema", 0)
    connection.pragma("cell_size_check", 1)
    connection.pragma("cache_size", -cache_kib)  # negative: in KiB, not pages


def start_integrity_check(connection: apsw.Connection, path: str, vfs: str) -> IntegrityCheck | None:
    """Start the background check of a database that is too large to be checked at the start; None if it was checked then."""
    if not _too_large(connection):
        return None
    reader = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY, vfs=vfs or None)
    _settings(reader, cache_kib=READER_CACHE_KIB)
    return IntegrityCheck(path, reader)


def _too_large(connection: apsw.Connection) -> bool:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size")) > CHECKED_AT_OPEN_BYTES


def _check(connection: apsw.Connection, path: str) -> None:
    if _too_large(connection):
        return
    if found := integrity_errors(connection):
        raise StoreUnusable(f"{path} is damaged: {found}", hint=_RESTORE)


def _check_size(path: str) -> None:
    """Refuse a truncated file: SQLite would treat it as a new database, and acknowledged jobs would be lost silently.

    Raises:
        StoreUnusable: the file is shorter than any database; or it is empty or missing, and a database existed before.
    """
    size = _size(path)
    if 0 < size < SMALLEST_BYTES:
        raise StoreUnusable(f"{path} is damaged: it has only {size} bytes", hint=_RESTORE)
    if size == 0 and _was_made(path):
        raise StoreUnusable(
            f"{path} is empty or missing, and it contained a database before",
            hint=f"restore it from a backup; or to start with an empty database, remove {path}.lock too",
        )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def _was_made(path: str) -> bool:
    try:
        with open(path + ".lock", "rb") as file:
            return file.read(len(_MADE)) == _MADE
    except FileNotFoundError:
        return False


def record_created(held: int) -> None:
    """Record in the lock file, once, that the database exists.

    Raises:
        OSError: the disk failed.
    """
    if os.pread(held, len(_MADE), 0) == _MADE:
        return
    write_at("store.open.mark", held, _MADE, 0)
    sync_file("store.open.mark", held)
