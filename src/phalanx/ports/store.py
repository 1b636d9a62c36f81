"""Where records are kept so that they survive: one writer commits, anyone reads what is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.core.access.audit import AuditLine
from phalanx.core.errors import TryLater
from phalanx.core.fleet.calibration import Calibration
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, ReservationId, UserId
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Record, World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Token, User
from phalanx.core.work.queue import Project, Queue, Spent
from phalanx.core.work.reservation import Reservation


class StoreRefused(TryLater):
    """The batch was not written, nothing of it; the world must undo it. Disk full, or the database failed."""

    code = "store_refused"


class StaleEpoch(StoreRefused):
    """The store holds a newer epoch of a job than the batch was made under."""

    code = "stale_epoch"


class StoreDiverged(StoreRefused):
    """The store holds what its head does not know of, or lacks what it wrote: this object commits nothing more, and the head has to load the store anew."""

    code = "store_diverged"


class StaleLeader(StoreDiverged):
    """Another head leads: the store is at a later term than the one that this head was given."""

    code = "stale_leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's changes: written whole, in order, or not at all.

    Attributes:
        epochs: for each job whose attempt is touched, the epoch it was touched under; the store refuses an older one than its own.
    """

    records: Sequence[Record] = ()
    removed_nodes: Sequence[NodeId] = ()
    removed_queues: Sequence[QueueId] = ()
    story: Sequence[StoryLine] = ()
    audit: Sequence[AuditLine] = ()
    epochs: Mapping[JobId, Epoch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs to list; newest first. `before_seq` pages on."""

    states: frozenset[JobState] = frozenset()
    user: UserId | None = None
    project: ProjectId | None = None
    queue: QueueId | None = None
    name: str | None = None
    before_seq: int | None = None
    limit: int = 100


class Store(Protocol):
    """The contract suite in tests/contract holds every store to it. `commit` and `load` are called by one thread, reads by any."""

    @property
    def access_version(self) -> int:
        """Grows with every commit that touches users, tokens or projects, so that what was read of them may be kept until then."""
        ...

    def load(self) -> World:
        """Everything alive: jobs not terminal (and the 1,000 newest terminal ones), live attempts, all else; indexes built."""
        ...

    def commit(self, batch: Batch) -> None:
        """Write the batch; durable (fsynced) when this returns.

        Raises:
            StaleEpoch: a newer epoch stands in the store.
            StoreRefused: it could not be written; nothing of it was.
        """
        ...

    def job(self, job_id: JobId) -> Job | None:
        """One job, ended ones too."""
        ...

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, newest first."""
        ...

    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of the jobs with submit numbers from `first_seq` on, at most `count`, in submit order; no record is read."""
        ...

    def job_counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        ...

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""
        ...

    def story(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[StoryLine]:
        """Story lines with seq > after, oldest first, of one job, one node, or all."""
        ...

    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first: those with seq > after, or without it the newest; of one user, not older than `since_s`."""
        ...

    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""
        ...

    def nodes(self) -> list[Node]:
        """All nodes by id."""
        ...

    def queues(self) -> list[Queue]:
        """All queues by id."""
        ...

    def spent(self) -> list[Spent]:
        """What queues have used, by queue, as of the end of the last attempt in each."""
        ...

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        ...

    def reservation(self, reservation_id: ReservationId) -> Reservation | None:
        """One reservation, an ended one too."""
        ...

    def calibration(self) -> Calibration | None:
        """The result of the last calibration."""
        ...

    def failure_rules(self) -> FailureRules | None:
        """The operators' own failure rules."""
        ...

    def projects(self) -> list[Project]:
        """All projects by id."""
        ...

    def users(self) -> list[User]:
        """All users by id."""
        ...

    def tokens(self) -> list[Token]:
        """All tokens, revoked ones too, oldest first."""
        ...

    def token(self, sha256: str) -> Token | None:
        """The token of this hash, whether good or not."""
        ...

    def user(self, user_id: UserId) -> User | None:
        """One user."""
        ...

    def close(self) -> None:
        """Release files and connections; harmless twice."""
        ...
