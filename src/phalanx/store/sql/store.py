"""The Store port on SQLite: one connection commits, others read what is committed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TypeVar

import apsw

from phalanx.core.fleet.calibration import FLEET, Calibration
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ReservationId, UserId
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Token, User
from phalanx.core.work.queue import Project, Queue, Spent
from phalanx.core.work.reservation import Reservation
from phalanx.ports.store import Batch, JobFilter, StoreRefused
from phalanx.store.batches import Rows, Standing, check, jobs_asked_about, newest_of
from phalanx.store.errors import StoreUnusable
from phalanx.store.failpoints import hit
from phalanx.store.sql import documents, reading
from phalanx.store.sql.connections import BUSY_TIMEOUT_MS, Readers, lock, open_writer, refusal, shut
from phalanx.store.sql.documents import Kind, Row
from phalanx.store.sql.queries import queries

T = TypeVar("T")
_READS: Final = queries("sqlite", "reads.sql")
_WRITES: Final = queries("sqlite", "writes.sql")
_SETTLE_TIMEOUT_MS: Final = 200  # how long a refused commit waits for readers before it leaves the WAL as it is


class SqliteStore:
    """A database in one file. `load` and `commit` belong to one thread; everything else may be called from any.

    Args:
        path: the file; made when it is not there, with its folder.
        vfs: the name of an apsw VFS; tests tear writes and fill the disk with one.

    Raises:
        StoreUnusable: the file is damaged, of a newer release, or not ours.
        StoreRefused: the disk is full or fails.
        Conflict: another head has the database.
    """

    def __init__(self, path: str, *, vfs: str = "") -> None:
        self._path = os.path.abspath(path)
        self._vfs = vfs
        self._access_version = 0
        self._unsettled = False
        self._lock = lock(self._path)
        self._writer: apsw.Connection | None = None
        self._readers = Readers(self._path, vfs)
        try:
            self._writer = open_writer(self._path, vfs)
        except BaseException:
            self.close()
            raise

    @property
    def access_version(self) -> int:
        """Grows with every commit that touches users, projects or tokens; what was read before it may be out of date."""
        return self._access_version

    def close(self) -> None:
        """Release files and connections; harmless twice."""
        self._readers.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            shut(writer)
        held, self._lock = self._lock, -1
        if held >= 0:
            os.close(held)

    # ---- the one writer ---------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """Write the batch in one transaction; durable when this returns.

        Raises:
            StaleEpoch: a newer epoch stands in the store.
            StoreRefused: it could not be written; nothing of it was.
        """
        rows = newest_of(batch)
        statements = _statements(batch, rows)
        if not statements and not batch.epochs:
            return
        writer = self._connected()
        try:
            hit("store.commit.begin")
            writer.execute("BEGIN IMMEDIATE")
            standings = {
                job: held for job in jobs_asked_about(batch, rows) if (held := _standing(writer, job)) is not None
            }
            check(batch, rows, standings, reading.number(writer, "last_story_seq"))
            for sql, values in statements:
                hit("store.commit.rows")
                writer.executemany(sql, values)
            hit("store.commit.commit")
            writer.execute("COMMIT")
        except apsw.ConstraintError as error:
            self._roll_back(writer)
            raise StoreRefused(f"the batch contradicts what is stored ({error}): nothing of it was written") from error
        except (apsw.Error, OSError, ValueError) as error:
            self._roll_back(writer)
            self._settle()
            raise _as_refused(refusal(error, self._path)) from error
        except BaseException:
            self._roll_back(writer)
            raise
        hit("store.commit.done")
        if rows.touch_access:
            self._access_version += 1

    def _connected(self) -> apsw.Connection:
        if self._lock < 0:
            raise StoreRefused("the store is closed", hint="the head is stopping")
        if self._writer is None:
            try:
                self._writer = open_writer(self._path, self._vfs)
            except StoreUnusable as error:
                raise _as_refused(error) from error
        if self._unsettled:
            self._settle()
        return self._writer

    def _roll_back(self, writer: apsw.Connection) -> None:
        try:
            if writer.in_transaction:
                hit("store.commit.rollback")
                writer.execute("ROLLBACK")
        except apsw.Error:  # the connection is of no more use; the next commit opens another, and recovers
            self._writer = None
            shut(writer)

    def _settle(self) -> None:
        """Empty the WAL after a failed commit.

        A commit whose sync failed may have left all its frames in the WAL. They count for nothing now, but a crash before the next
        commit would bring them back to life, though their batch was refused. Also, after a failed sync the kernel may take pages for
        written that are not; copying them into the database and cutting the WAL writes them anew. If the disk refuses even that, the next
        commit tries again.
        """
        self._unsettled = True
        if self._writer is None:
            return
        try:
            self._writer.set_busy_timeout(_SETTLE_TIMEOUT_MS)
            hit("store.settle.checkpoint")
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)
            self._unsettled = False
        except apsw.Error:
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)

    # ---- readers ----------------------------------------------------------------------------------------------------

    def load(self) -> World:
        """Everything alive, with indexes built.

        Raises:
            StoreUnusable: a record is damaged.
            StoreRefused: the database could not be read.
        """
        with self._readers.lend() as connection:
            return reading.load_world(connection)

    def job(self, job_id: JobId) -> Job | None:
        """One job, ended ones too."""
        return self._one(documents.JOB, "job", job_id)

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, newest first."""
        with self._readers.lend() as connection:
            return reading.list_jobs(connection, wanted)

    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of the jobs from a submit number on, at most `count`."""
        with self._readers.lend() as connection:
            return reading.list_states(connection, first_seq, count)

    def job_counts(self) -> dict[JobState, int]:
        """How many jobs are in each state; every state is named."""
        with self._readers.lend() as connection:
            return reading.count_jobs(connection)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""
        with self._readers.lend() as connection:
            return reading.records(connection, documents.ATTEMPT, "attempts_of_job", (job_id,))

    def story(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[StoryLine]:
        """Story lines with seq > after, oldest first, of one job, one node, or all."""
        with self._readers.lend() as connection:
            return reading.list_story(connection, job_id, node_id, after, limit)

    def nodes(self) -> list[Node]:
        """All nodes by id."""
        return self._all(documents.NODE, "nodes")

    def queues(self) -> list[Queue]:
        """All queues by id."""
        return self._all(documents.QUEUE, "queues")

    def spent(self) -> list[Spent]:
        """What queues have used, by queue."""
        return self._all(documents.SPENT, "spent")

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        return self._all(documents.RESERVATION, "reservations")

    def reservation(self, reservation_id: ReservationId) -> Reservation | None:
        """One reservation, an ended one too."""
        return self._one(documents.RESERVATION, "reservation", reservation_id)

    def calibration(self) -> Calibration | None:
        """What the last calibration found."""
        return self._one(documents.CALIBRATION, "calibration", FLEET)

    def projects(self) -> list[Project]:
        """All projects by id."""
        return self._all(documents.PROJECT, "projects")

    def users(self) -> list[User]:
        """All users by id."""
        return self._all(documents.USER, "users")

    def tokens(self) -> list[Token]:
        """All tokens, revoked ones too, oldest first."""
        return self._all(documents.TOKEN, "tokens")

    def token(self, sha256: str) -> Token | None:
        """The token of this hash, whether good or not."""
        return self._one(documents.TOKEN, "token_by_hash", sha256)

    def user(self, user_id: UserId) -> User | None:
        """One user."""
        return self._one(documents.USER, "user", user_id)

    def examine(self) -> list[str]:
        """What is wrong with the file, in SQLite's words; nothing for a sound one. Reads all of it: a starting head does so only while it is small.

        Raises:
            StoreUnusable: so damaged that it cannot even be examined.
        """
        with self._readers.lend() as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)")]
        return [] if found == ["ok"] else found

    def _all(self, kind: Kind[T], name: str) -> list[T]:
        with self._readers.lend() as connection:
            return reading.records(connection, kind, name)

    def _one(self, kind: Kind[T], name: str, key: str) -> T | None:
        with self._readers.lend() as connection:
            return reading.record(connection, kind, name, key)


def _statements(batch: Batch, rows: Rows) -> list[tuple[str, list[Row]]]:
    """What to run, in an order in which each row finds what it refers to. Removals come after records: a node put and removed is gone."""
    plan: list[tuple[str, list[Row]]] = [
        ("put_user", [documents.user_row(user) for user in rows.users.values()]),
        ("put_project", [documents.project_row(project) for project in rows.projects.values()]),
        ("put_token", [documents.token_row(token) for token in rows.tokens.values()]),
        ("put_queue", [documents.queue_row(queue) for queue in rows.queues.values()]),
        ("put_spent", [documents.spent_row(spent) for spent in rows.spent.values()]),
        ("remove_queue", [(queue_id,) for queue_id in batch.removed_queues]),
        ("remove_spent", [(queue_id,) for queue_id in batch.removed_queues]),
        ("put_reservation", [documents.reservation_row(one) for one in rows.reservations.values()]),
        ("put_calibration", [documents.calibration_row(one) for one in rows.calibrations.values()]),
        ("put_node", [documents.node_row(node) for node in rows.nodes.values()]),
        ("remove_node", [(node_id,) for node_id in batch.removed_nodes]),
        ("put_job", [documents.job_row(job) for job in rows.jobs.values()]),
        ("put_attempt", [documents.attempt_row(attempt) for attempt in _ended_first(rows.attempts.values())]),
        ("put_idempotency", [documents.idempotency_row(key) for key in rows.idempotency.values()]),
        ("add_story", [documents.story_row(line) for line in batch.story]),
    ]
    return [(_WRITES[name], values) for name, values in plan if values]


def _ended_first(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Ends before beginnings, so that no job has two live attempts on the way."""
    return sorted(attempts, key=lambda attempt: attempt.live)


def _standing(connection: apsw.Connection, job_id: JobId) -> Standing | None:
    row = connection.execute(_READS["standing"], (job_id,)).fetchone()
    if row is None:
        return None
    seq, state, epoch, live_epoch = row
    return Standing(seq=seq, state=JobState(state), epoch=Epoch(epoch), live_epoch=live_epoch)


def _as_refused(error: StoreRefused | StoreUnusable) -> StoreRefused:
    """A commit is refused whatever the cause: the driver undoes its step and goes on."""
    return error if isinstance(error, StoreRefused) else StoreRefused(error.message, hint=error.hint)
