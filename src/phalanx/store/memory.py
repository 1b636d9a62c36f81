"""A store in memory, under the same contract: for the simulator and for tests that are not about disks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.fleet.documents import CALIBRATION_ID, FleetDocument
from phalanx.core.fleet.failure_rules import OPERATORS, FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, ReservationId, TokenId, UserId
from phalanx.core.state.story import StoryLine
from phalanx.core.state.world import Idempotency, World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.users import Token, User
from phalanx.ports.store import Batch, JobFilter, StoreRefused
from phalanx.store.commit_checks import (
    BatchRows,
    StoredJobState,
    check,
    jobs_to_check,
    newest_records,
)
from phalanx.store.loading import ENDED_JOBS_LOADED, KEYS_LOADED, build_world

K = TypeVar("K", bound=str | int)
V = TypeVar("V")


@dataclass(slots=True)
class _Tables:
    users: dict[UserId, User] = field(default_factory=dict)
    projects: dict[ProjectId, Project] = field(default_factory=dict)
    tokens: dict[TokenId, Token] = field(default_factory=dict)
    queues: dict[QueueId, Queue] = field(default_factory=dict)
    spent: dict[QueueId, QueueUsage] = field(default_factory=dict)
    reservations: dict[ReservationId, Reservation] = field(default_factory=dict)
    calibrations: dict[str, FleetDocument] = field(default_factory=dict)
    failure_rules: dict[str, FailureRules] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    jobs: dict[JobId, Job] = field(default_factory=dict)
    job_of_seq: dict[int, JobId] = field(default_factory=dict)
    attempts: dict[JobId, dict[Epoch, Attempt]] = field(default_factory=dict)
    idempotency: dict[tuple[UserId, str], Idempotency] = field(default_factory=dict)
    token_of_hash: dict[str, TokenId] = field(default_factory=dict)
    story: list[StoryLine] = field(default_factory=list)  # line `seq` is at index seq - 1
    audit: dict[int, AuditLine] = field(default_factory=dict)


class MemoryStore:
    """Holds records in dicts. Records are frozen, so sharing them is safe."""

    def __init__(self) -> None:
        self._tables = _Tables()
        self._lock = threading.Lock()
        self._access_version = 0
        self._closed = False

    @property
    def access_version(self) -> int:
        """Grows with every commit that touches users, projects or tokens."""
        return self._access_version

    def close(self) -> None:
        """Refuse further commits. Idempotent."""
        self._closed = True

    def commit(self, batch: Batch) -> None:
        """Write the batch.

        Raises:
            StaleEpoch: the store has a newer epoch.
            StoreRefused: the batch violates an invariant; nothing of it was written.
        """
        rows = newest_records(batch)
        with self._lock:
            if self._closed:
                raise StoreRefused("the store is closed", hint="the head is stopping")
            standings = {job: held for job in jobs_to_check(batch, rows) if (held := self._standing(job)) is not None}
            check(batch, rows, standings, len(self._tables.story))
            self._check_unique(rows)
            for line in batch.audit:
                if line.seq in self._tables.audit:
                    raise StoreRefused(f"audit line {line.seq} already exists")
            self._write(batch, rows)
        if rows.changes_access:
            self._access_version += 1

    def load(self) -> World:
        """Load the world with its indexes."""
        with self._lock:
            tables = self._tables
            jobs = sorted(tables.jobs.values(), key=lambda job: job.seq)
            ended = [job.id for job in jobs if job.state.terminal]
            dropped = set(ended[:-ENDED_JOBS_LOADED])
            return build_world(
                nodes=_by_key(tables.nodes),
                queues=_by_key(tables.queues),
                queue_usage=_by_key(tables.spent),
                projects=_by_key(tables.projects),
                users=_by_key(tables.users),
                tokens=self._tokens(),
                reservations=[one for one in _by_key(tables.reservations) if not one.ended],
                calibrations=_by_key(tables.calibrations),
                failure_rules=_by_key(tables.failure_rules),
                jobs=[job for job in jobs if job.id not in dropped],
                attempts=[live for job in jobs if (live := self._live(job.id)) is not None],
                idempotency=list(tables.idempotency.values())[-KEYS_LOADED:],
                last_job_seq=max(tables.job_of_seq, default=0),
                last_story_seq=len(tables.story),
            )

    # ---- readers ----------------------------------------------------------------------------------------------------

    def job(self, job_id: JobId) -> Job | None:
        """One job, also an ended one."""
        with self._lock:
            return self._tables.jobs.get(job_id)

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, newest first."""
        with self._lock:
            found = [job for job in self._tables.jobs.values() if _matches(job, wanted)]
        return sorted(found, key=lambda job: -job.seq)[: max(0, wanted.limit)]

    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of the jobs from a submit number on, at most `count`."""
        with self._lock:
            end = min(first_seq + max(0, count), max(self._tables.job_of_seq, default=0) + 1)
            ids = (self._tables.job_of_seq.get(seq) for seq in range(first_seq, end))
            return [(job_id, self._tables.jobs[job_id].state) for job_id in ids if job_id is not None]

    def job_counts(self) -> dict[JobState, int]:
        """Number of jobs in each state, including states without jobs."""
        counts = dict.fromkeys(JobState, 0)
        with self._lock:
            for job in self._tables.jobs.values():
                counts[job.state] += 1
        return counts

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""
        with self._lock:
            return _by_key(self._tables.attempts.get(job_id, {}))

    def newest_attempts(self, job_ids: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The newest attempt of each of these jobs that has one."""
        with self._lock:
            return {
                job_id: attempts[max(attempts)] for job_id in job_ids if (attempts := self._tables.attempts.get(job_id))
            }

    def story(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[StoryLine]:
        """Story lines with seq > after, oldest first, of one job, one node, or all."""
        with self._lock:
            lines = self._tables.story[max(0, after) :]
        found = [line for line in lines if job_id in (None, line.job_id) and node_id in (None, line.node_id)]
        return found[: max(0, limit)]

    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first."""
        with self._lock:
            lines = _by_key(self._tables.audit)
        found = [line for line in lines if user in (None, line.user) and line.at_s >= since_s]
        if after is None:
            return found[max(0, len(found) - max(0, limit)) :]
        return [line for line in found if line.seq > after][: max(0, limit)]

    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""
        with self._lock:
            return self._tables.audit[max(self._tables.audit)] if self._tables.audit else None

    def nodes(self) -> list[Node]:
        """All nodes by id."""
        with self._lock:
            return _by_key(self._tables.nodes)

    def queues(self) -> list[Queue]:
        """All queues by id."""
        with self._lock:
            return _by_key(self._tables.queues)

    def queue_usage(self) -> list[QueueUsage]:
        """Usage of each queue, by queue."""
        with self._lock:
            return _by_key(self._tables.spent)

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        with self._lock:
            return [one for one in _by_key(self._tables.reservations) if not one.ended]

    def reservation(self, reservation_id: ReservationId) -> Reservation | None:
        """One reservation, also an ended one."""
        with self._lock:
            return self._tables.reservations.get(reservation_id)

    def calibration(self) -> FleetDocument | None:
        """The result of the last calibration."""
        with self._lock:
            return self._tables.calibrations.get(CALIBRATION_ID)

    def failure_rules(self) -> FailureRules | None:
        """The operators' own failure rules."""
        with self._lock:
            return self._tables.failure_rules.get(OPERATORS)

    def projects(self) -> list[Project]:
        """All projects by id."""
        with self._lock:
            return _by_key(self._tables.projects)

    def users(self) -> list[User]:
        """All users by id."""
        with self._lock:
            return _by_key(self._tables.users)

    def tokens(self) -> list[Token]:
        """All tokens, including revoked ones, oldest first."""
        with self._lock:
            return self._tokens()

    def token(self, sha256: str) -> Token | None:
        """The token with this hash, valid or not."""
        with self._lock:
            token_id = self._tables.token_of_hash.get(sha256)
            return None if token_id is None else self._tables.tokens[token_id]

    def user(self, user_id: UserId) -> User | None:
        """One user."""
        with self._lock:
            return self._tables.users.get(user_id)

    # ---- internals, under the lock ----------------------------------------------------------------------------------

    def _write(self, batch: Batch, rows: BatchRows) -> None:
        tables = self._tables
        for token in rows.tokens.values():
            before = tables.tokens.get(token.id)
            if before is not None:
                tables.token_of_hash.pop(before.sha256, None)
        for token in rows.tokens.values():
            tables.tokens[token.id] = token
            tables.token_of_hash[token.sha256] = token.id
        tables.users.update(rows.users)
        tables.projects.update(rows.projects)
        tables.queues.update(rows.queues)
        tables.spent.update(rows.queue_usage)
        for queue_id in batch.removed_queues:
            tables.queues.pop(queue_id, None)
            tables.spent.pop(queue_id, None)
        tables.reservations.update(rows.reservations)
        tables.calibrations.update(rows.calibrations)
        tables.failure_rules.update(rows.failure_rules)
        tables.nodes.update(rows.nodes)
        for node_id in batch.removed_nodes:
            tables.nodes.pop(node_id, None)
        tables.jobs.update(rows.jobs)
        tables.job_of_seq.update((job.seq, job.id) for job in rows.jobs.values())
        for (job_id, epoch), attempt in rows.attempts.items():
            tables.attempts.setdefault(job_id, {})[epoch] = attempt
        tables.idempotency.update(rows.idempotency)
        tables.story.extend(batch.story)
        tables.audit.update((line.seq, line) for line in batch.audit)

    def _check_unique(self, rows: BatchRows) -> None:
        seqs: dict[int, JobId] = {}
        for job in rows.jobs.values():
            if self._tables.job_of_seq.get(job.seq, job.id) != job.id or seqs.setdefault(job.seq, job.id) != job.id:
                raise StoreRefused(f"job {job.id} has the submit number {job.seq} of another job")
        hashes = {token.sha256: token.id for token in self._tables.tokens.values() if token.id not in rows.tokens}
        for token in rows.tokens.values():
            if hashes.setdefault(token.sha256, token.id) != token.id:
                raise StoreRefused(f"token {token.id} has the hash of another token")

    def _standing(self, job_id: JobId) -> StoredJobState | None:
        job = self._tables.jobs.get(job_id)
        if job is None:
            return None
        live = self._live(job_id)
        return StoredJobState(
            seq=job.seq, state=job.state, epoch=job.epoch, live_epoch=None if live is None else live.epoch
        )

    def _live(self, job_id: JobId) -> Attempt | None:
        return next(
            (attempt for attempt in self._tables.attempts.get(job_id, {}).values() if attempt.holds_allocation), None
        )

    def _tokens(self) -> list[Token]:
        return sorted(self._tables.tokens.values(), key=lambda token: (token.created_s, token.id))


def _matches(job: Job, wanted: JobFilter) -> bool:
    return (
        (not wanted.states or job.state in wanted.states)
        and wanted.user in (None, job.user)
        and wanted.project in (None, job.project)
        and wanted.queue in (None, job.queue)
        and wanted.name in (None, job.name)
        and (wanted.before_seq is None or job.seq < wanted.before_seq)
    )


def _by_key(table: Mapping[K, V]) -> list[V]:
    return [record for _, record in sorted(table.items())]
