"""The reading half of both SQL stores. Each query borrows a connection of its own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.fleet.documents import CALIBRATION_ID, FleetDocument
from phalanx.core.fleet.failure_rules import OPERATORS, FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId, ReservationId, UserId
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.users import Token, User
from phalanx.ports.store import JobFilter
from phalanx.store.sql import documents, reading
from phalanx.store.sql.documents import RecordCodec
from phalanx.store.sql.reading import SqlReader

T = TypeVar("T")


class SqlReads(ABC):
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

    def job(self, job_id: JobId) -> Job | None:
        """One job, also an ended one."""
        return self._one(documents.JOB, "job", job_id)

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, newest first."""
        with self._look() as look:
            return reading.list_jobs(look, wanted)

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
        with self._look() as look:
            return reading.records(look, documents.ATTEMPT, "attempts_of_job", (job_id,))

    def newest_attempts(self, job_ids: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The newest attempt of each of these jobs that has one."""
        with self._look() as look:
            found = reading.records(look, documents.ATTEMPT, "newest_attempts", (json.dumps(list(job_ids)),))
        return {attempt.job_id: attempt for attempt in found}

    def story(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[StoryLine]:
        """Story lines with seq > after, oldest first, of one job, one node, or all."""
        with self._look() as look:
            return reading.list_story(look, job_id, node_id, after, limit)

    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first."""
        with self._look() as look:
            return reading.list_audit(look, after, user, since_s, limit)

    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""
        found = self._all(documents.AUDIT, "audit_tip")
        return found[0] if found else None

    def nodes(self) -> list[Node]:
        """All nodes by id."""
        return self._all(documents.NODE, "nodes")

    def queues(self) -> list[Queue]:
        """All queues by id."""
        return self._all(documents.QUEUE, "queues")

    def queue_usage(self) -> list[QueueUsage]:
        """Usage of each queue, by queue."""
        return self._all(documents.SPENT, "spent")

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        return self._all(documents.RESERVATION, "reservations")

    def reservation(self, reservation_id: ReservationId) -> Reservation | None:
        """One reservation, also an ended one."""
        return self._one(documents.RESERVATION, "reservation", reservation_id)

    def calibration(self) -> FleetDocument | None:
        """The result of the last calibration."""
        return self._one(documents.CALIBRATION, "calibration", CALIBRATION_ID)

    def failure_rules(self) -> FailureRules | None:
        """The operators' own failure rules."""
        return self._one(documents.FAILURE_RULES, "failure_rules", OPERATORS)

    def projects(self) -> list[Project]:
        """All projects by id."""
        return self._all(documents.PROJECT, "projects")

    def users(self) -> list[User]:
        """All users by id."""
        return self._all(documents.USER, "users")

    def tokens(self) -> list[Token]:
        """All tokens, including revoked ones, oldest first."""
        return self._all(documents.TOKEN, "tokens")

    def token(self, sha256: str) -> Token | None:
        """The token with this hash, valid or not."""
        return self._one(documents.TOKEN, "token_by_hash", sha256)

    def user(self, user_id: UserId) -> User | None:
        """One user."""
        return self._one(documents.USER, "user", user_id)

    def _all(self, kind: RecordCodec[T], name: str) -> list[T]:
        with self._look() as look:
            return reading.records(look, kind, name)

    def _one(self, kind: RecordCodec[T], name: str, key: str) -> T | None:
        with self._look() as look:
            return reading.record(look, kind, name, key)
