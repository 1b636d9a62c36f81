"""The Store port on PostgreSQL: one connection commits under the fence of its term, a few read what is committed.

A commit is two round trips: the fence and the checks, then all rows with COMMIT in one pipeline. Where the connection breaks in the
second, nobody has said how it ended: the store locks the row that each commit writes, which waits for that transaction's end, and reads.
"""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractContextManager
from typing import Final

import psycopg

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.job import JobState
from phalanx.failpoints import hit
from phalanx.ports.store import Batch, StaleLeader, StoreDiverged, StoreRefused
from phalanx.store.batches import Rows, Standing, check, jobs_asked_about, newest_of
from phalanx.store.errors import StoreUnusable, as_refused
from phalanx.store.sql.documents import Row
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import (
    Connection,
    Cursor,
    Readers,
    alive,
    cut,
    held_by_me,
    open_writer,
    shut,
)
from phalanx.store.sql.postgres.refusals import refusal
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.reading import Look
from phalanx.store.sql.reads import SqlReads
from phalanx.store.sql.writing import statements

FIND_OUT_S: Final = (
    10.0  # how long a commit asks for its own outcome: a server that was killed recovers within some seconds
)
_AGAIN_S: Final = 0.2  # between two such questions
_RELOAD: Final = "the head has to load the store anew"


class PostgresStore(SqlReads):
    """A database behind a fence. `load` and `commit` belong to one thread; everything else may be called from any.

    Args:
        dsn: a URL or libpq's words.
        term: under which the caller leads (election). None takes a new one, which shuts out whoever wrote before.

    Raises:
        BadRequest: the address cannot be read.
        StoreUnusable: not let in, too old, another encoding, of a newer release.
        StoreRefused: it does not answer.
    """

    def __init__(self, dsn: str, *, term: int | None = None) -> None:
        self._address = Address.parse(dsn)
        self._over: StoreRefused | None = None  # why nothing is committed any more
        self._last = ""  # id of our newest commit; empty before the first
        self._unknown = ""  # id of a commit of which nobody knows how it ended
        self._lost_pid = 0  # of the server's process that had it
        self._readers = Readers(self._address)
        self._writer: Connection | None = open_writer(self._address)
        try:
            self._term = self._take_term(self._writer) if term is None else term
        except BaseException:
            self.close()
            raise

    @property
    def term(self) -> int:
        """Under which this store writes."""
        return self._term

    def close(self) -> None:
        """Release connections; harmless twice."""
        self._over = self._over or StoreRefused("the store is closed", hint="the head is stopping")
        self._readers.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            shut(writer)

    def abandon(self, why: str) -> None:
        """Commit nothing more, from now on and whoever waits in a commit; for a head that may no longer lead. From any thread."""
        self._over = self._over or StaleLeader(why, hint=_RELOAD)
        writer = self._writer
        if writer is not None:
            cut(writer)

    # ---- the one writer ---------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """Write the batch in one transaction; durable when this returns.

        Raises:
            StaleEpoch: a newer epoch stands in the store.
            StaleLeader: another head leads.
            StoreDiverged: a batch that was refused turned out to be there, or one that was acknowledged is not; this store commits nothing more.
            StoreRefused: it could not be written; nothing of it was, as far as can be known.
        """
        rows = newest_of(batch)
        plan = statements(batch, rows)
        if not plan and not batch.epochs:
            return
        self._settle()
        commit_id = secrets.token_hex(16)
        doubt = self._write(self._begun(batch, rows), plan, commit_id)
        if doubt is not None:
            self._unknown = commit_id
            if not self._is_there(time.monotonic() + FIND_OUT_S):
                raise doubt
        self._last = commit_id
        hit("postgres.commit.done")
        if rows.touch_access:
            self._access_version += 1

    def _settle(self) -> None:
        """Before anything new: how did the last commit end, if nobody said?"""
        self._check_going_on()
        if self._unknown and self._is_there(0.0):
            self._over = StoreDiverged("a batch that was refused as unknown is in the database after all", hint=_RELOAD)
            raise self._over

    def _begun(self, batch: Batch, rows: Rows) -> Connection:
        """A transaction that holds the fence and in which the batch may be written."""
        writer = self._connected()
        try:
            hit("postgres.commit.begin")
            term, last, last_seq = _fence(writer.execute(POSTGRES.reads["begin_commit"].encode()))
            self._check_term(term)
            self._check_last(last)
            jobs = list(jobs_asked_about(batch, rows))
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
        """Write and commit; None when the server said that it did, else what to say if it turns out that it did not.

        Raises:
            StoreRefused: it broke off before COMMIT was sent.
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
                # A COMMIT that waits for a synchronous standby must not be cancelled: it would count as done where it is not.
                hit("postgres.commit.patience")
                writer.execute("SET LOCAL statement_timeout = 0")
                hit("postgres.commit.commit")
                sent = True
                ended = writer.execute("COMMIT")
            if ended.statusmessage == "COMMIT":
                return None
            self._drop()  # nobody may look from inside a transaction for what is committed
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

    def _is_there(self, until: float) -> bool:
        """Whether the commit of unknown outcome was made, and is durable; asks until this time on the monotonic clock, and at least once.

        Raises:
            StaleLeader: another head leads: whoever loads the store knows.
            StoreRefused: the database does not say.
        """
        while True:
            try:
                writer = self._connected()
                # Waits for the end of the transaction in question, and ends it where the server waits for us to go on with it.
                term, last, _ = _fence(held_by_me(writer, POSTGRES.reads["begin_commit"], of_pid=self._lost_pid))
                there = last == self._unknown
                if there:
                    self._lost_pid = writer.info.backend_pid
                    writer.execute(POSTGRES.reads["confirm"].encode())
                else:
                    self._check_term(term)
                self._drop()  # which rolls back
                self._unknown = ""
                return there
            except (psycopg.Error, OSError, StoreRefused) as error:
                self._drop()
                if self._over is not None:
                    raise self._over from None
                if time.monotonic() >= until:
                    raise StoreRefused(
                        f"the connection to PostgreSQL at {self._address.shown} broke while it committed, and it does not say whether it did",
                        hint="the head asks again before it writes anything else; a request with the same idempotency key is safe",
                    ) from error
            time.sleep(_AGAIN_S)

    def _check_term(self, term: object) -> None:
        if term != self._term:
            self._over = StaleLeader(
                f"another head leads: the store is at term {term}, this head's is {self._term}", hint=_RELOAD
            )
            raise self._over

    def _check_last(self, last: object) -> None:
        """Under our term nobody else commits: another id is an older one, of a database that was taken back or a replica that lagged."""
        if self._last and last != self._last:
            self._over = StoreDiverged("the database lacks a batch that was acknowledged", hint=_RELOAD)
            raise self._over

    def _take_term(self, writer: Connection) -> int:
        try:
            hit("postgres.open.term")
            row = held_by_me(writer, POSTGRES.writes["take_term"]).fetchone()
        except (psycopg.Error, OSError) as error:
            raise refusal(error, self._address) from None
        assert row is not None, "the migrations put the row there"
        return int(row[0])

    def _check_going_on(self) -> None:
        if self._over is not None:
            self._drop()
            raise self._over

    def _connected(self) -> Connection:
        self._check_going_on()
        if self._writer is not None and not alive(self._writer):
            self._drop()
        if self._writer is None:
            try:
                self._writer = open_writer(self._address)
            except StoreUnusable as error:
                raise as_refused(error) from None
            self._check_going_on()  # said meanwhile: `abandon` saw no connection to cut
        return self._writer

    def _roll_back(self, writer: Connection) -> None:
        try:
            hit("postgres.commit.rollback")
            writer.execute("ROLLBACK")
        except psycopg.Error:
            self._drop()

    def _drop(self) -> None:
        """After any failure the next commit takes a new connection: what this one has prepared or half read is of no more use."""
        writer, self._writer = self._writer, None
        if writer is not None:
            shut(writer)

    def _refused(self, error: Exception) -> StoreRefused:
        return self._over if self._over is not None else as_refused(refusal(error, self._address))

    def _look(self) -> AbstractContextManager[Look]:
        return self._readers.lend()


def _fence(begun: Cursor) -> tuple[object, object, object]:
    """What a commit begins with: the term, the id of the last commit, the number of the last story line."""
    values = []
    while begun.nextset():
        row = begun.fetchone()
        values.append(None if row is None else row[0])
    term, last, seq = values
    return term, last, seq


def _standings(found: list[tuple[object, ...]]) -> dict[JobId, Standing]:
    return {
        JobId(str(job_id)): Standing(
            seq=int(str(seq)),
            state=JobState(str(state)),
            epoch=Epoch(int(str(epoch))),
            live_epoch=None if live is None else Epoch(int(str(live))),
        )
        for job_id, seq, state, epoch, live in found
    }


def _rolled_back(error: Exception) -> bool:
    """Whether the server itself said that it refused a statement: then COMMIT behind it was passed over."""
    return (
        isinstance(error, psycopg.Error)
        and error.sqlstate is not None
        and not isinstance(error, psycopg.OperationalError)
    )
