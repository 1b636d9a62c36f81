"""The Store port on PostgreSQL: one connection commits under the fence of its term, others read committed records.

A commit takes two round trips: the fence and the checks, then all rows with COMMIT in one pipeline. If the connection breaks in the second,
the outcome is unknown: the store locks the row that each commit writes, which waits for that transaction's end, and reads it.
"""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractContextManager
from typing import Final

import psycopg

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.states import JobState
from phalanx.failpoints import hit
from phalanx.ports.store import Batch, StaleLeader, StoreDiverged, StoreRefused
from phalanx.store.commit_checks import (
    BatchRows,
    StoredJobState,
    check,
    jobs_to_check,
    newest_records,
)
from phalanx.store.errors import StoreUnusable, as_refused
from phalanx.store.sql.documents import Row
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import (
    Connection,
    Cursor,
    PostgresReaders,
    abort,
    close,
    execute_with_eviction,
    is_alive,
    open_writer,
)
from phalanx.store.sql.postgres.errors import to_store_error
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.reading import SqlReader
from phalanx.store.sql.reads import SqlReads
from phalanx.store.sql.writing import statements

OUTCOME_WAIT_S: Final = (
    10.0  # how long a commit polls for its own outcome; a killed server recovers within some seconds
)
_POLL_S: Final = 0.2
_RELOAD: Final = "the head must load the store again"


class PostgresStore(SqlReads):
    """A fenced database. One thread calls `load` and `commit`; all other methods are thread-safe.

    Args:
        dsn: a URL or libpq's `key=value` words.
        term: the term under which the caller leads (election). None takes a new one, which excludes previous writers.

    Raises:
        BadRequest: invalid address.
        StoreUnusable: access denied, server too old, wrong encoding, or database of a newer release.
        StoreRefused: the server does not answer.
    """

    def __init__(self, dsn: str, *, term: int | None = None) -> None:
        self._address = Address.parse(dsn)
        self._over: StoreRefused | None = None  # why no further commit is allowed
        self._last = ""  # id of our newest commit; empty before the first
        self._unknown = ""  # id of a commit with unknown outcome
        self._lost_pid = 0  # server process of that commit
        self._readers = PostgresReaders(self._address)
        self._writer: Connection | None = open_writer(self._address)
        try:
            self._term = self._take_term(self._writer) if term is None else term
        except BaseException:
            self.close()
            raise

    @property
    def term(self) -> int:
        """The term under which this store writes."""
        return self._term

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._over = self._over or StoreRefused("the store is closed", hint="the head is stopping")
        self._readers.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            close(writer)

    def abandon(self, why: str) -> None:
        """Refuse all further commits and break one in progress, because the head may no longer lead. Thread-safe."""
        self._over = self._over or StaleLeader(why, hint=_RELOAD)
        writer = self._writer
        if writer is not None:
            abort(writer)

    # ---- the one writer ---------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """Write the batch in one transaction; durable when this returns.

        Raises:
            StaleEpoch: the store has a newer epoch.
            StaleLeader: another head leads.
            StoreDiverged: a refused batch turned out to be stored, or an acknowledged one is missing; this store commits nothing more.
            StoreRefused: the batch was not written, as far as is known.
        """
        rows = newest_records(batch)
        plan = statements(batch, rows)
        if not plan and not batch.epochs:
            return
        self._resolve_unknown()
        commit_id = secrets.token_hex(16)
        doubt = self._write(self._begin(batch, rows), plan, commit_id)
        if doubt is not None:
            self._unknown = commit_id
            if not self._was_committed(time.monotonic() + OUTCOME_WAIT_S):
                raise doubt
        self._last = commit_id
        hit("postgres.commit.done")
        if rows.changes_access:
            self._access_version += 1

    def _resolve_unknown(self) -> None:
        """Determine the outcome of the last commit, if unknown, before the next one."""
        self._check_open()
        if self._unknown and self._was_committed(0.0):
            self._over = StoreDiverged("a batch that was refused is in the database after all", hint=_RELOAD)
            raise self._over

    def _begin(self, batch: Batch, rows: BatchRows) -> Connection:
        """Begin a transaction that holds the fence, and check the batch."""
        writer = self._connected()
        try:
            hit("postgres.commit.begin")
            term, last, last_seq = _fence(writer.execute(POSTGRES.reads["begin_commit"].encode()))
            self._check_term(term)
            self._check_last(last)
            jobs = list(jobs_to_check(batch, rows))
            found = writer.execute(POSTGRES.reads["standings"].encode(), (jobs,)).fetchall() if jobs else []
            check(batch, rows, _standings(found), int(str(last_seq or 0)))
        except (psycopg.Error, OSError) as error:
            self._drop()
            raise self._refused(error) from None
        except BaseException:
            self._roll_back(writer)
            raise
        return writer

    def _write(self, writer: Connection, plan: list[tuple[str, list[Row]]], commit_id: str) -> StoreRefused | None:
        """Write and commit. Return None if the server confirmed it, else the error to raise if it turns out not to be committed.

        Raises:
            StoreRefused: it failed before COMMIT was sent.
        """
        sent = False
        self._lost_pid = writer.info.backend_pid
        try:
            with writer.pipeline():
                for name, values in plan:
                    hit("postgres.commit.rows")
                    writer.cursor().executemany(POSTGRES.writes[name].encode(), values)
                hit("postgres.commit.remember")
                writer.execute(POSTGRES.writes["remember_commit"].encode(), (commit_id,))
                # A COMMIT that waits for a synchronous standby must not be cancelled: it would be reported as done without the standby.
                hit("postgres.commit.patience")
                writer.execute("SET LOCAL statement_timeout = 0")
                hit("postgres.commit.commit")
                sent = True
                ended = writer.execute("COMMIT")
            if ended.statusmessage == "COMMIT":
                return None
            self._drop()  # the next query for the outcome must not run inside a transaction
            return StoreRefused(f"PostgreSQL at {self._address.shown} rolled the batch back: nothing of it was written")
        except (psycopg.Error, OSError, ValueError) as error:
            self._drop()
            if sent and not _rolled_back(error):
                return self._refused(error)
            raise self._refused(error) from None
        except BaseException:
            self._drop()
            if sent:
                self._unknown = commit_id
            raise

    def _was_committed(self, until: float) -> bool:
        """Whether the commit with unknown outcome is durable. Polls until this time of the monotonic clock, at least once.

        Raises:
            StaleLeader: another head leads, and will see it when it loads the store.
            StoreRefused: the database does not answer.
        """
        while True:
            try:
                writer = self._connected()
                # Waits for the end of that transaction, and ends it if the server waits for its client.
                term, last, _ = _fence(
                    execute_with_eviction(writer, POSTGRES.reads["begin_commit"], of_pid=self._lost_pid)
                )
                committed = last == self._unknown
                if committed:
                    self._lost_pid = writer.info.backend_pid
                    writer.execute(POSTGRES.reads["confirm"].encode())
                else:
                    self._check_term(term)
                self._drop()  # rolls back
                self._unknown = ""
                return committed
            except (psycopg.Error, OSError, StoreRefused) as error:
                self._drop()
                if self._over is not None:
                    raise self._over from None
                if time.monotonic() >= until:
                    raise StoreRefused(
                        f"the connection to PostgreSQL at {self._address.shown} broke during a commit, whose outcome is unknown",
                        hint="the head checks it before its next write; retrying with the same idempotency key is safe",
                    ) from error
            time.sleep(_POLL_S)

    def _check_term(self, term: object) -> None:
        if term != self._term:
            self._over = StaleLeader(
                f"another head leads: the store is at term {term}, this head's is {self._term}", hint=_RELOAD
            )
            raise self._over

    def _check_last(self, last: object) -> None:
        """Check the last commit's id. No other head commits under our term: another id means a restored database or a lagging replica."""
        if self._last and last != self._last:
            self._over = StoreDiverged("the database lacks an acknowledged batch", hint=_RELOAD)
            raise self._over

    def _take_term(self, writer: Connection) -> int:
        try:
            hit("postgres.open.term")
            row = execute_with_eviction(writer, POSTGRES.writes["take_term"]).fetchone()
        except (psycopg.Error, OSError) as error:
            raise to_store_error(error, self._address) from None
        assert row is not None, "the migrations insert the row"
        return int(row[0])

    def _check_open(self) -> None:
        if self._over is not None:
            self._drop()
            raise self._over

    def _connected(self) -> Connection:
        self._check_open()
        if self._writer is not None and not is_alive(self._writer):
            self._drop()
        if self._writer is None:
            try:
                self._writer = open_writer(self._address)
            except StoreUnusable as error:
                raise as_refused(error) from None
            self._check_open()  # `abandon` may have been called meanwhile, without a connection to cut
        return self._writer

    def _roll_back(self, writer: Connection) -> None:
        try:
            hit("postgres.commit.rollback")
            writer.execute("ROLLBACK")
        except psycopg.Error:
            self._drop()

    def _drop(self) -> None:
        """Close the connection after a failure; the next commit opens a new one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            close(writer)

    def _refused(self, error: Exception) -> StoreRefused:
        return self._over if self._over is not None else as_refused(to_store_error(error, self._address))

    def _look(self) -> AbstractContextManager[SqlReader]:
        return self._readers.borrow()


def _fence(begun: Cursor) -> tuple[object, object, object]:
    """Results of `begin_commit`: the term, the id of the last commit, the number of the last history line."""
    values = []
    while begun.nextset():
        row = begun.fetchone()
        values.append(None if row is None else row[0])
    term, last, seq = values
    return term, last, seq


def _standings(found: list[tuple[object, ...]]) -> dict[JobId, StoredJobState]:
    return {
        JobId(str(job_id)): StoredJobState(
            seq=int(str(seq)),
            state=JobState(str(state)),
            epoch=Epoch(int(str(epoch))),
            live_epoch=None if live is None else Epoch(int(str(live))),
        )
        for job_id, seq, state, epoch, live in found
    }


def _rolled_back(error: Exception) -> bool:
    """Whether the server reported an error for a statement: then it skipped the COMMIT after it."""
    return (
        isinstance(error, psycopg.Error)
        and error.sqlstate is not None
        and not isinstance(error, psycopg.OperationalError)
    )
