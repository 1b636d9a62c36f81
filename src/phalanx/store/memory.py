"""A store in memory, under the same contract: for the simulator and for tests that are not about disks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx.core.access.audit import AuditLine
from phalanx.core.ids import Epoch, JobId, NodeId, TokenId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import (
    ATTEMPT_USES,
    ATTEMPTS,
    IDEMPOTENCY,
    JOBS,
    RECORDS,
    RESERVATIONS,
    TOKENS,
    RecordKind,
)
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.labels import has_labels
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Token
from phalanx.ports.store import Batch, JobFilter, Store, StoreRefused, Viewer
from phalanx.store.commit_checks import (
    BatchRows,
    StoredJobState,
    check,
    jobs_to_check,
    newest_records,
)
from phalanx.store.loading import ENDED_JOBS_LOADED, KEYS_LOADED, build_world

K = TypeVar("K")
R = TypeVar("R")


@dataclass(slots=True)
class _Tables:
    records: dict[RecordKind[Any, Any], dict[Any, Any]] = field(default_factory=lambda: {kind: {} for kind in RECORDS})
    history: list[HistoryLine | None] = field(default_factory=list)  # line `seq` is at index seq - 1; None: archived
    audit: dict[int, AuditLine] = field(default_factory=dict)
    # Indexes.
    job_of_seq: dict[int, JobId] = field(default_factory=dict)
    attempts: dict[JobId, dict[Epoch, Attempt]] = field(default_factory=dict)
    token_of_hash: dict[str, TokenId] = field(default_factory=dict)

    def of(self, kind: RecordKind[K, R]) -> dict[K, R]:
        """All records of a kind, by key."""
        return self.records[kind]


class MemoryStore(Store):
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
            check(batch, rows, standings, len(self._tables.history))
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
            jobs = _in_order(JOBS, tables.of(JOBS))
            dropped = {job.id for job in [job for job in jobs if job.state.terminal][:-ENDED_JOBS_LOADED]}
            loaded: dict[RecordKind[Any, Any], list[Any]] = {
                RESERVATIONS: self._live_reservations(),
                JOBS: [job for job in jobs if job.id not in dropped],
                ATTEMPTS: [live for job in jobs if (live := self._live(job.id)) is not None],
                IDEMPOTENCY: list(tables.of(IDEMPOTENCY).values())[-KEYS_LOADED:],
            }
            return build_world(
                lambda kind: loaded[kind] if kind in loaded else _in_order(kind, tables.of(kind)),
                last_job_seq=max(tables.job_of_seq, default=0),
                last_history_seq=len(tables.history),
            )

    # ---- readers ----------------------------------------------------------------------------------------------------

    def records(self, kind: RecordKind[K, R]) -> list[R]:
        """All records of a kind, in its order."""
        with self._lock:
            return _in_order(kind, self._tables.of(kind))

    def record(self, kind: RecordKind[K, R], key: K) -> R | None:
        """One record, or None."""
        with self._lock:
            return self._tables.of(kind).get(key)

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs by filter, in its order."""
        with self._lock:
            found = [job for job in self._tables.of(JOBS).values() if _matches(job, wanted)]
        return sorted(found, key=wanted.order.key_of, reverse=not wanted.ascending)[: max(0, wanted.limit)]

    def label_values(self, name: str, *, ended_since_s: float, visible_to: Viewer | None) -> dict[JobId, str]:
        """The value of a label of each job that has it and had not ended before."""
        wanted = JobFilter(labels=((name, None),), visible_to=visible_to)
        with self._lock:
            jobs = [job for job in self._tables.of(JOBS).values() if _matches(job, wanted)]
        return {
            job.id: dict(job.spec.labels)[name] for job in jobs if job.ended_s is None or job.ended_s >= ended_since_s
        }

    def states(self, first_seq: int, count: int) -> list[tuple[JobId, JobState]]:
        """Ids and states of the jobs from a submit number on, at most `count`."""
        with self._lock:
            end = min(first_seq + max(0, count), max(self._tables.job_of_seq, default=0) + 1)
            ids = (self._tables.job_of_seq.get(seq) for seq in range(first_seq, end))
            return [(job_id, self._tables.of(JOBS)[job_id].state) for job_id in ids if job_id is not None]

    def job_counts(self) -> dict[JobState, int]:
        """Number of jobs in each state, including states without jobs."""
        counts = dict.fromkeys(JobState, 0)
        with self._lock:
            for job in self._tables.of(JOBS).values():
                counts[job.state] += 1
        return counts

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job, oldest first."""
        with self._lock:
            return [attempt for _, attempt in sorted(self._tables.attempts.get(job_id, {}).items())]

    def newest_attempts(self, job_ids: Sequence[JobId]) -> dict[JobId, Attempt]:
        """The newest attempt of each of these jobs that has one."""
        with self._lock:
            return {
                job_id: attempts[max(attempts)] for job_id in job_ids if (attempts := self._tables.attempts.get(job_id))
            }

    def history(
        self, *, job_id: JobId | None = None, node_id: NodeId | None = None, after: int = 0, limit: int = 1000
    ) -> list[HistoryLine]:
        """History lines with seq > after, oldest first, of one job, one node, or all."""
        with self._lock:
            lines = [line for line in self._tables.history[max(0, after) :] if line is not None]
        found = [line for line in lines if job_id in (None, line.job_id) and node_id in (None, line.node_id)]
        return found[: max(0, limit)]

    def audit(
        self, *, after: int | None = None, user: UserId | None = None, since_s: float = 0.0, limit: int = 1000
    ) -> list[AuditLine]:
        """Lines of the audit trail, oldest first."""
        with self._lock:
            lines = [line for _, line in sorted(self._tables.audit.items())]
        found = [line for line in lines if user in (None, line.user) and line.at_s >= since_s]
        if after is None:
            return found[max(0, len(found) - max(0, limit)) :]
        return [line for line in found if line.seq > after][: max(0, limit)]

    def audit_tip(self) -> AuditLine | None:
        """The newest line of the audit trail."""
        with self._lock:
            return self._tables.audit[max(self._tables.audit)] if self._tables.audit else None

    def reservations(self) -> list[Reservation]:
        """All reservations that have not ended, by id."""
        with self._lock:
            return self._live_reservations()

    def token(self, sha256: str) -> Token | None:
        """The token with this hash, valid or not."""
        with self._lock:
            token_id = self._tables.token_of_hash.get(sha256)
            return None if token_id is None else self._tables.of(TOKENS).get(token_id)

    # ---- internals, under the lock ----------------------------------------------------------------------------------

    def _write(self, batch: Batch, rows: BatchRows) -> None:
        tables = self._tables
        for token in rows.of(TOKENS).values():
            before = tables.of(TOKENS).get(token.id)
            if before is not None:
                tables.token_of_hash.pop(before.sha256, None)
        for kind, records in rows.by_kind.items():
            tables.records[kind].update(records)
        for kind, key in rows.removed:
            tables.records[kind].pop(key, None)
        tables.token_of_hash.update((token.sha256, token.id) for token in rows.of(TOKENS).values())
        tables.job_of_seq.update((job.seq, job.id) for job in rows.of(JOBS).values())
        for (job_id, epoch), attempt in rows.of(ATTEMPTS).items():
            tables.attempts.setdefault(job_id, {})[epoch] = attempt
        tables.history.extend(batch.history)
        tables.audit.update((line.seq, line) for line in batch.audit)
        if batch.archived:
            self._drop_jobs(frozenset(batch.archived))

    def _drop_jobs(self, job_ids: frozenset[JobId]) -> None:
        tables = self._tables
        for job_id in job_ids:
            tables.job_of_seq.pop(tables.of(JOBS).pop(job_id).seq)
            for epoch in tables.attempts.pop(job_id, {}):
                tables.of(ATTEMPTS).pop((job_id, epoch))
        for key in [key for key in tables.of(ATTEMPT_USES) if key[0] in job_ids]:
            del tables.of(ATTEMPT_USES)[key]
        for name in [name for name, one in tables.of(IDEMPOTENCY).items() if one.job_id in job_ids]:
            del tables.of(IDEMPOTENCY)[name]
        tables.history = [None if line is not None and line.job_id in job_ids else line for line in tables.history]

    def _check_unique(self, rows: BatchRows) -> None:
        seqs: dict[int, JobId] = {}
        for job in rows.of(JOBS).values():
            if self._tables.job_of_seq.get(job.seq, job.id) != job.id or seqs.setdefault(job.seq, job.id) != job.id:
                raise StoreRefused(f"job {job.id} has the submit number {job.seq} of another job")
        hashes = {
            token.sha256: token.id for token in self._tables.of(TOKENS).values() if token.id not in rows.of(TOKENS)
        }
        for token in rows.of(TOKENS).values():
            if hashes.setdefault(token.sha256, token.id) != token.id:
                raise StoreRefused(f"token {token.id} has the hash of another token")

    def _standing(self, job_id: JobId) -> StoredJobState | None:
        job = self._tables.of(JOBS).get(job_id)
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

    def _live_reservations(self) -> list[Reservation]:
        return [one for one in _in_order(RESERVATIONS, self._tables.of(RESERVATIONS)) if not one.ended]


def _matches(job: Job, wanted: JobFilter) -> bool:
    return (
        (not wanted.states or job.state in wanted.states)
        and wanted.user in (None, job.user)
        and wanted.project in (None, job.project)
        and wanted.queue in (None, job.queue)
        and wanted.name in (None, job.name)
        and (not wanted.labels or has_labels(job.spec.labels, wanted.labels))
        and (wanted.visible_to is None or job.user == wanted.visible_to[0] or job.project in wanted.visible_to[1])
        and (wanted.before_seq is None or job.seq < wanted.before_seq)
        and (wanted.ended_since_s is None or (job.ended_s is not None and job.ended_s >= wanted.ended_since_s))
        and (wanted.after is None or _is_behind(job, wanted, wanted.after))
    )


def _is_behind(job: Job, wanted: JobFilter, key: tuple[str | int, int]) -> bool:
    return wanted.order.key_of(job) > key if wanted.ascending else wanted.order.key_of(job) < key


def _in_order(kind: RecordKind[K, R], table: Mapping[K, R]) -> list[R]:
    return sorted(table.values(), key=kind.order_of)
