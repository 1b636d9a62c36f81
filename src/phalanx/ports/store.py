"""Durable storage of records: one writer commits, any thread reads committed records."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.errors import TryLater
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import JOBS, NODES, PROJECTS, QUEUES, TOKENS, USERS, Record, RecordKind
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.labels import LabelFilter
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Token, User

K = TypeVar("K")
R = TypeVar("R")


class StoreRefused(TryLater):
    """Nothing of the batch was written; the caller must undo it. The disk is full, or the database failed."""

    code = "store_refused"


class StaleEpoch(StoreRefused):
    """The store has a newer epoch of a job than the batch."""

    code = "stale_epoch"


class StoreDiverged(StoreRefused):
    """The store has records that its head does not know, or lacks some that it wrote. The head must load the store again; this object
    commits nothing more.
    """

    code = "store_diverged"


class StaleLeader(StoreDiverged):
    """Another head leads: the store is at a later term than this head."""

    code = "stale_leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's changes, written atomically and in order.

    Attributes:
        removed: kinds and keys of removed records; applied after the records.
        archived: ended jobs that leave the store with their attempts, history and all else of theirs; applied last.
        epochs: current epoch of each job whose attempt changed; the store refuses one older than its own.
    """

    records: Sequence[Record] = ()
    removed: Sequence[tuple[RecordKind[Any, Any], Any]] = ()
    history: Sequence[HistoryLine] = ()
    audit: Sequence[AuditLine] = ()
    epochs: Mapping[JobId, Epoch] = field(default_factory=dict)
    archived: Sequence[JobId] = ()


class JobOrder(enum.Enum):
    """What a list of jobs is sorted by; texts sort by bytes. `attribute`: of a job, and the column of the databases."""

    attribute: str

    def __new__(cls, word: str, attribute: str) -> Self:
        """A member whose value is the word."""
        member = object.__new__(cls)
        member._value_ = word
        member.attribute = attribute
        return member

    NUMBER = "number", "seq"
    NAME = "name", "name"
    STATE = "state", "state"
    USER = "user", "user"
    PROJECT = "project", "project"
    QUEUE = "queue", "queue"
    GPUS = "gpus", "gpu_milli"

    def key_of(self, job: Job) -> tuple[str | int, int]:
        """The sort key of a job; its number breaks ties."""
        value = getattr(job, self.attribute)
        return (value.value if isinstance(value, JobState) else value), job.seq


Viewer = tuple[UserId, frozenset[ProjectId]]
"""A user and the projects of which they see all jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs to list, and in which order; newest first by default.

    Attributes:
        labels: only jobs with all of these.
        visible_to: only jobs of this user or of these projects; None for all.
        before_seq: only jobs with smaller numbers: the next page of a list that is newest first.
        ended_since_s: only jobs that ended then or later.
        order, ascending: the order; `after`: only jobs behind this sort key (`JobOrder.key_of`): the next page in any order.
    """

    states: frozenset[JobState] = frozenset()
    user: UserId | None = None
    project: ProjectId | None = None
    queue: QueueId | None = None
    name: str | None = None
    labels: tuple[LabelFilter, ...] = ()
    visible_to: Viewer | None = None
    before_seq: int | None = None
    ended_since_s: float | None = None
    order: JobOrder = JobOrder.NUMBER
    ascending: bool = False
    after: tuple[str | int, int] | None = None
    limit: int = 100


class Store(ABC):
    """Storage of records; tests/contract checks every implementation. One thread calls `commit` and `load`, any thread reads."""

    @property
    @abstractmethod
    def access_version(self) -> int:
        """Grows with every commit that changes users, tokens or projects: until then, cached reads of them are valid."""

    @abstractmethod
    def load(self) -> World:
        """Load the world with its indexes: live jobs, the 1,000 newest ended ones, live attempts, and all other records."""

    @abstractmethod
    def commit(self, batch: Batch) -> None:
        """Write the batch; durable (fsynced) when this returns.

        Raises:
            StaleEpoch: the store has a newer epoch.
            StoreRefused: nothing of the batch was written.
        """

    @abstractmethod
    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, in its order."""

    @abstractmethod
    def label_values(self, name: str, *, ended_since_s: float, visible_to: Viewer | None) -> dict[JobId, str]:
        """The value of a label of each job that has it and had not ended before. `visible_to`: as in `JobFilter`."""

    @abstractmethod
    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of at most `count` jobs with submit numbers from `first_seq` on, in submit order. Decodes no record."""

    @abstractmethod
    def job_counts(self) -> dict[JobState, int]:
        """Number of jobs in each state."""

    @abstractmethod
    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""

    @abstractmethod
    def newest_attempts(self, job_ids: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The newest attempt of each of these jobs, in one query; jobs without an attempt are left out."""

    @abstractmethod
    def history(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[HistoryLine]:
        """History lines with seq > after, oldest first, of one job, one node, or all."""

    @abstractmethod
    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first: those with seq > `after`, or the newest; of one user, and not older than `since_s`."""

    @abstractmethod
    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""

    @abstractmethod
    def records(self, kind: RecordKind[K, R]) -> list[R]:
        """All records of a kind, also ended reservations, in the order that the kind declares."""

    @abstractmethod
    def record(self, kind: RecordKind[K, R], key: K) -> R | None:
        """One record, or None."""

    @abstractmethod
    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""

    @abstractmethod
    def token(self, sha256: str) -> Token | None:
        """The token with this hash, valid or not."""

    def job(self, job_id: JobId) -> Job | None:
        """One job, also an ended one."""
        return self.record(JOBS, job_id)

    def nodes(self) -> list[Node]:
        """All nodes by id."""
        return self.records(NODES)

    def queues(self) -> list[Queue]:
        """All queues by id."""
        return self.records(QUEUES)

    def projects(self) -> list[Project]:
        """All projects by id."""
        return self.records(PROJECTS)

    def users(self) -> list[User]:
        """All users by id."""
        return self.records(USERS)

    def user(self, user_id: UserId) -> User | None:
        """One user."""
        return self.record(USERS, user_id)

    def tokens(self) -> list[Token]:
        """All tokens, including revoked ones, oldest first."""
        return self.records(TOKENS)

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Idempotent."""
