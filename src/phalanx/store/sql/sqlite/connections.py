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
from phalanx.failpoints import around, sync_directory, write
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.sqlite.examination import Examination, found_in
from phalanx.store.sql.sqlite.upgrade import migrate

BUSY_TIMEOUT_MS: Final = 5000  # a checkpoint may hold others up; a reader never holds the writer
WAL_KEPT_BYTES: Final = 64 * 1024 * 1024  # a WAL that grew beyond it is cut at the next checkpoint
CHECKED_AT_OPEN_BYTES: Final = (
    128 * 1024 * 1024
)  # `integrity_check` reads 400 MB/s (2 cores, file cached): a third of a second
SMALLEST_BYTES: Final = 512  # the smallest page that SQLite has (sqlite.org/fileformat.html, 1.3.2)
_MADE: Final = b"made\n"  # first in the lock file, once the database is there
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
        with around("store.open.folder"):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with around("store.open.lock"):
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


def open_writer(path: str, vfs: str, *, held: int) -> apsw.Connection:
    """The one connection that writes: WAL, FULL (the WAL is synced at each commit), migrated, and checked when small.

    Args:
        path: the file; made when it is not there.
        vfs: the name of an apsw VFS; empty for SQLite's own.
        held: what `lock` gave for this path, which remembers from then on that there is a database; -1 where that need not be
            remembered, as of one that a restore has not put in its place yet.

    Raises:
        StoreUnusable: damaged, newer, or not ours.
        StoreRefused: the disk is full or fails.
    """
    connection = None
    try:
        _check_size(path)
        with around("store.open.create"):  # by us: jobs carry environments, and WAL and index inherit the mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with around("store.open.begin"):
            connection = apsw.Connection(
                path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, vfs=vfs or None
            )
        _settings(connection, cache_kib=WRITER_CACHE_KIB)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise StoreUnusable(
                f"{path}: the file system does not carry SQLite's WAL", hint="keep PHALANX_HOME on a local disk"
            )
        connection.pragma("synchronous", 2)  # FULL; the default of the library is only the default
        connection.pragma("foreign_keys", 1)
        connection.pragma("journal_size_limit", WAL_KEPT_BYTES)
        _check(connection, path)
        migrate(connection, migrations("sqlite"), path)
        sync_directory("store.open.directory", os.path.dirname(path))
        if held >= 0:
            remember_made(held)
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
        with around("store.close.checkpoint"):
            connection.close(force=True)
    except apsw.Error:
        pass


def refusal(error: Exception, path: str) -> StoreRefused | StoreUnusable:
    """What a failure of the disk or the database means to whoever asked."""
    said = " ".join(str(error).split())  # SQLite cites the damaged SQL, line by line
    if isinstance(error, (*_DAMAGED, ValueError)):
        return StoreUnusable(f"{path} is damaged: {said}", hint=_RESTORE)
    if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return StoreRefused(
            f"the disk is full: nothing was written to {path}", hint="free some space; the head goes on by itself"
        )
    if isinstance(error, apsw.BusyError):
        return StoreRefused(
            f"{path} is locked by another process: nothing was written", hint="which one says: fuser -v " + path
        )
    return StoreRefused(
        f"the database failed ({type(error).__name__}: {said}): nothing was written",
        hint=f"look after the disk of {path}",
    )


def _settings(connection: apsw.Connection, *, cache_kib: int) -> None:
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("trusted_schema", 0)
    connection.pragma("cell_size_check", 1)
    connection.pragma("cache_size", -cache_kib)  # negative: in KiB, not pages


def examine_large(connection: apsw.Connection, path: str, vfs: str) -> Examination | None:
    """The look at a database that was too large to be read at the start, begun; None where all was read then."""
    if not _too_large(connection):
        return None
    looking = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY, vfs=vfs or None)
    _settings(looking, cache_kib=READER_CACHE_KIB)
    return Examination(path, looking)


def _too_large(connection: apsw.Connection) -> bool:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size")) > CHECKED_AT_OPEN_BYTES


def _check(connection: apsw.Connection, path: str) -> None:
    if _too_large(connection):
        return
    if found := found_in(connection):
        raise StoreUnusable(f"{path} is damaged: {found}", hint=_RESTORE)


def _check_size(path: str) -> None:
    """SQLite takes a file that lost all, or all but some bytes, for a new one: acknowledged jobs would be gone without a word.

    Raises:
        StoreUnusable: it is shorter than any database, or it is empty or gone and was made before.
    """
    size = _size(path)
    if 0 < size < SMALLEST_BYTES:
        raise StoreUnusable(f"{path} is damaged: {size} bytes are no database", hint=_RESTORE)
    if size == 0 and _was_made(path):
        raise StoreUnusable(
            f"{path} is empty or gone, and it held a database before",
            hint=f"restore it from a copy, or remove {path}.lock too to begin anew",
        )


def begins_anew(path: str) -> bool:
    """Whether a store opened here would begin a new database: there was none, or one that a head died making."""
    return _size(path) == 0 and not _was_made(path)


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


def remember_made(held: int) -> None:
    """Say in the lock file, once, that there is a database now.

    Raises:
        OSError: the disk.
    """
    if os.pread(held, len(_MADE), 0) == _MADE:
        return
    write("store.open.mark", held, _MADE, 0)
    with around("store.open.mark_sync"):
        os.fsync(held)
