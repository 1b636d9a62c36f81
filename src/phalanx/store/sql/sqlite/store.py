"""The Store port on SQLite: one connection commits, others read committed records."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

import apsw

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.states import JobState
from phalanx.failpoints import around, hit
from phalanx.ports.store import Batch, StoreRefused
from phalanx.store.commit_checks import (
    StoredJobState,
    check,
    jobs_to_check,
    newest_records,
)
from phalanx.store.errors import StoreUnusable, as_refused
from phalanx.store.sql import reading
from phalanx.store.sql.queries import SQLITE
from phalanx.store.sql.reading import SqlReader
from phalanx.store.sql.reads import SqlReads
from phalanx.store.sql.sqlite.connections import (
    BUSY_TIMEOUT_MS,
    SqliteReaders,
    close,
    lock,
    open_writer,
    start_integrity_check,
    to_store_error,
)
from phalanx.store.sql.sqlite.integrity_check import IntegrityCheck
from phalanx.store.sql.writing import statements

_CHECKPOINT_TIMEOUT_MS: Final = 200  # how long a refused commit waits for readers before it leaves the WAL as it is


class SqliteStore(SqlReads):
    """A database in one file. One thread calls `load` and `commit`; all other methods are thread-safe.

    Args:
        path: the file, created with its folder if missing.
        vfs: the name of an apsw VFS; tests use one to inject torn writes and full disks.

    Raises:
        StoreUnusable: the file is damaged, of a newer release, or not of Phalanx.
        StoreRefused: the disk is full or fails.
        Conflict: another head uses the database.
    """

    def __init__(self, path: str, *, vfs: str = "") -> None:
        self._path = os.path.abspath(path)
        self._vfs = vfs
        self._wal_stale = False
        self._lock = lock(self._path)
        self._writer: apsw.Connection | None = None
        self._examination: IntegrityCheck | None = None
        self._readers = SqliteReaders(self._path, vfs)
        try:
            self._writer = open_writer(self._path, vfs, held=self._lock)
            self._examination = start_integrity_check(self._writer, self._path, vfs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close files and connections. Idempotent."""
        if self._examination is not None:
            self._examination.close()
        self._readers.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            close(writer)
        held, self._lock = self._lock, -1
        if held >= 0:
            os.close(held)

    # ---- the one writer ---------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """Write the batch in one transaction; durable when this returns.

        Raises:
            StaleEpoch: the store has a newer epoch.
            StoreRefused: nothing of the batch was written.
        """
        rows = newest_records(batch)
        plan = statements(batch, rows)
        if not plan and not batch.epochs:
            return
        writer = self._connected()
        try:
            hit("store.commit.begin")
            writer.execute("BEGIN IMMEDIATE")
            standings = _standings(writer, jobs_to_check(batch, rows))
            check(batch, rows, standings, reading.number(SqlReader(SQLITE, writer.execute), "last_history_seq"))
            for name, values in plan:
                hit("store.commit.rows")
                writer.executemany(SQLITE.writes[name], values)
            hit("store.commit.commit")
            writer.execute("COMMIT")
        except apsw.ConstraintError as error:
            self._roll_back(writer)
            raise StoreRefused(
                f"the batch conflicts with stored records ({error}): nothing of it was written"
            ) from error
        except (apsw.Error, OSError, ValueError) as error:
            self._roll_back(writer)
            self._truncate_wal()
            raise as_refused(to_store_error(error, self._path)) from error
        except BaseException:
            self._roll_back(writer)
            raise
        hit("store.commit.done")
        if rows.changes_access:
            self._access_version += 1

    def _connected(self) -> apsw.Connection:
        if self._lock < 0:
            raise StoreRefused("the store is closed", hint="the head is stopping")
        try:
            self._check_examined()
            if self._writer is None:
                self._writer = open_writer(self._path, self._vfs, held=self._lock)
        except StoreUnusable as error:
            raise as_refused(error) from error
        if self._wal_stale:
            self._truncate_wal()
        return self._writer

    def _roll_back(self, writer: apsw.Connection) -> None:
        try:
            if writer.in_transaction:
                with around("store.commit.rollback"):
                    writer.execute("ROLLBACK")
        except apsw.Error:  # the connection is unusable; the next commit opens another, which recovers
            self._writer = None
            close(writer)

    def _truncate_wal(self) -> None:
        """Checkpoint and truncate the WAL after a failed commit.

        A commit whose sync failed may have left all its frames in the WAL. They are ignored now, but a crash before the next commit would
        apply them, although their batch was refused. Also, after a failed sync the kernel may consider pages as written that are not;
        copying them into the database and truncating the WAL writes them again. If this fails too, the next commit tries again.
        """
        self._wal_stale = True
        if self._writer is None:
            return
        try:
            self._writer.set_busy_timeout(_CHECKPOINT_TIMEOUT_MS)
            with around("store.settle.checkpoint"):
                self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)
            self._wal_stale = False
        except apsw.Error:
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)

    @contextmanager
    def _look(self) -> Iterator[SqlReader]:
        self._check_examined()
        with self._readers.borrow() as connection:
            yield SqlReader(SQLITE, connection.execute)

    def _check_examined(self) -> None:
        if self._examination is not None:
            self._examination.check()

    def wait_for_integrity_check(self, timeout_s: float) -> bool:
        """Wait for the integrity check of the whole file; return whether it has ended. Small files are checked when they are opened."""
        return self._examination is None or self._examination.wait(timeout_s)

    def check_integrity(self) -> list[str]:
        """Check the whole file; return SQLite's error messages, none if it is healthy.

        Raises:
            StoreUnusable: it is too damaged to be checked.
        """
        with self._readers.borrow() as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)")]
        return [] if found == ["ok"] else found


def _standings(connection: apsw.Connection, job_ids: Collection[JobId]) -> dict[JobId, StoredJobState]:
    """The stored state of each of these jobs that is stored."""
    if not job_ids:
        return {}
    rows = connection.execute(SQLITE.reads["standings"], (json.dumps(list(job_ids)),))
    return {
        JobId(job_id): StoredJobState(
            seq=seq, state=JobState(state), epoch=Epoch(epoch), live_epoch=None if live is None else Epoch(live)
        )
        for job_id, seq, state, epoch, live in rows
    }
