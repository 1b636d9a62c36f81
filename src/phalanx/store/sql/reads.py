"""The reading half of both SQL stores. Each query borrows a connection of its own."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPTS, RESERVATIONS, TOKENS, RecordKind
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Token
from phalanx.ports.store import JobFilter, Store, Viewer
from phalanx.store.sql import reading
from phalanx.store.sql.documents import Row, key_values
from phalanx.store.sql.kinds import AUDIT
from phalanx.store.sql.reading import SqlReader

K = TypeVar("K")
R = TypeVar("R")


class SqlReads(Store):
    """The reading half of the Store port."""

    _access_version = 0  # incremented by `commit`

    @property
    def access_version(self) -> int:
        """Grows with every commit that changes users, projects or tokens; earlier reads may be out of date."""
        return self._access_version

    @abstractmethod
    def _look(self) -> AbstractContextManager[SqlReader]:
        """A connection for one read.

        Raises:
            StoreRefused: the database cannot be read now, or the store is closed.
            StoreUnusable: the database is damaged.
        """

    def load(self) -> World:
        """Load the world with its indexes.

        Raises:
            StoreUnusable: a record is damaged.
            StoreRefused: the database could not be read.
        """
        with self._look() as look:
            return reading.load_world(look)

    def records(self, kind: RecordKind[K, R]) -> list[R]:
        """All records of a kind, in its order."""
        return self._read(kind, f"all {kind.table}")

    def record(self, kind: RecordKind[K, R], key: K) -> R | None:
        """One record, or None."""
        return self._first(kind, f"one {kind.table}", key_values(key))

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, in its order."""
        with self._look() as look:
            return reading.list_jobs(look, wanted)

    def label_values(self, name: str, *, ended_since_s: float, visible_to: Viewer | None) -> dict[JobId, str]:
        """The value of a label of each job that has it and had not ended before."""
        with self._look() as look:
            return reading.label_values(look, name, ended_since_s, visible_to)

    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of the jobs from a submit number on, at most `count`."""
        with self._look() as look:
            return reading.list_states(look, first_seq, count)

    def job_counts(self) -> dict[JobState, int]:
        """Number of jobs in each state, including states without jobs."""
        with self._look() as look:
            return reading.count_jobs(look)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""
        return self._read(ATTEMPTS, "attempts_of_job", (job_id,))

    def newest_attempts(self, job_ids: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The newest attempt of each of these jobs that has one."""
        found = self._read(ATTEMPTS, "newest_attempts", (json.dumps(list(job_ids)),))
        return {attempt.job_id: attempt for attempt in found}

    def history(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[HistoryLine]:
        """History lines with seq > after, oldest first, of one job, one node, or all."""
        with self._look() as look:
            return reading.list_history(look, job_id, node_id, after, limit)

    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first."""
        with self._look() as look:
            return reading.list_audit(look, after, user, since_s, limit)

    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""
        return self._first(AUDIT, "audit_tip")

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        return self._read(RESERVATIONS, "live_reservations")

    def token(self, sha256: str) -> Token | None:
        """The token with this hash, valid or not."""
        return self._first(TOKENS, "token_by_hash", (sha256,))

    def _read(self, kind: RecordKind[K, R], name: str, values: Row = ()) -> list[R]:
        with self._look() as look:
            return reading.records(look, kind, name, values)

    def _first(self, kind: RecordKind[K, R], name: str, values: Row = ()) -> R | None:
        found = self._read(kind, name, values)
        return found[0] if found else None
