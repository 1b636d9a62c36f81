"""Checks that every store runs before it writes a batch, and the batch's newest records.

All stores use them, so they refuse the same batches with the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPTS, IDEMPOTENCY, JOBS, KIND_OF, PROJECTS, TOKENS, USERS, RecordKind
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.ports.store import Batch, StaleEpoch, StoreRefused

K = TypeVar("K")
R = TypeVar("R")


@dataclass(slots=True)
class BatchRows:
    """The newest version of each record of a batch, by kind and key. Intermediate versions were never visible and are not written."""

    removed: Sequence[tuple[RecordKind[Any, Any], Any]]
    by_kind: dict[RecordKind[Any, Any], dict[Any, Any]] = field(default_factory=dict)

    def of(self, kind: RecordKind[K, R]) -> dict[K, R]:
        """The records of one kind, by key."""
        return self.by_kind.get(kind, {})

    @property
    def changes_access(self) -> bool:
        """Whether the batch changes users, projects or tokens."""
        return not {USERS, PROJECTS, TOKENS}.isdisjoint([*self.by_kind, *(kind for kind, _ in self.removed)])


@dataclass(frozen=True, slots=True)
class StoredJobState:
    """A job's state in the store."""

    seq: int
    state: JobState
    epoch: Epoch
    live_epoch: Epoch | None  # of the attempt that has not ended, if any


def newest_records(batch: Batch) -> BatchRows:
    """The last record of each key, in the order in which keys were last put."""
    rows = BatchRows(removed=batch.removed)
    for record in batch.records:
        kind = KIND_OF[type(record)]
        table, key = rows.by_kind.setdefault(kind, {}), kind.key_of(record)
        table.pop(key, None)
        table[key] = record
    return rows


def jobs_to_check(batch: Batch, rows: BatchRows) -> set[JobId]:
    """Jobs whose stored state the checks need."""
    jobs = {*batch.epochs, *rows.of(JOBS), *(job_id for job_id, _ in rows.of(ATTEMPTS))}
    jobs.update(key.job_id for key in rows.of(IDEMPOTENCY).values())
    jobs.update(batch.archived)
    return jobs


def check(batch: Batch, rows: BatchRows, standings: Mapping[JobId, StoredJobState], last_history_seq: int) -> None:
    """Refuse a batch that would violate an invariant.

    Raises:
        StaleEpoch: the store has a newer epoch.
        StoreRefused: a gap in the history, a terminal job that would change, a live one that would be archived, an orphan, or two live
            attempts of one job.
    """
    for job_id, epoch in batch.epochs.items():
        _check_epoch(job_id, epoch, standings)
    for job in rows.of(JOBS).values():
        _check_job(job, standings)
    _check_attempts(rows, standings)
    for key in rows.of(IDEMPOTENCY).values():
        if key.job_id not in rows.of(JOBS) and key.job_id not in standings:
            raise StoreRefused(
                f"idempotency key {key.key!r} of {key.user} names job {key.job_id}, which does not exist"
            )
    for job_id in batch.archived:
        standing = standings.get(job_id)
        if (
            job_id in rows.of(JOBS)
            or standing is None
            or not standing.state.terminal
            or standing.live_epoch is not None
        ):
            raise StoreRefused(f"job {job_id} has not ended, and cannot be archived")
    check_history(batch.history, last_history_seq)


def check_history(history: Sequence[HistoryLine], last_seq: int) -> None:
    """Check that history lines continue the stored ones without gaps.

    Raises:
        StoreRefused: there would be a gap or a duplicate number.
    """
    for wanted, line in enumerate(history, start=last_seq + 1):
        if line.seq != wanted:
            raise StoreRefused(
                f"history line {line.seq} ({line.kind}) does not follow line {wanted - 1}",
                hint="another head may write to this store",
            )


def _check_epoch(job_id: JobId, epoch: Epoch, standings: Mapping[JobId, StoredJobState]) -> None:
    standing = standings.get(job_id)
    if standing is not None and standing.epoch > epoch:
        raise StaleEpoch(f"job {job_id}: epoch {epoch} is stale, the store is at epoch {standing.epoch}")


def _check_job(job: Job, standings: Mapping[JobId, StoredJobState]) -> None:
    standing = standings.get(job.id)
    if standing is None:
        return
    _check_epoch(job.id, job.epoch, standings)
    if standing.state.terminal and job.state is not standing.state:
        raise StoreRefused(f"job {job.id} has ended ({standing.state.value}) and cannot become {job.state.value}")
    if standing.seq != job.seq:
        raise StoreRefused(f"job {job.id} was submitted as number {standing.seq}, not {job.seq}")


def _check_attempts(rows: BatchRows, standings: Mapping[JobId, StoredJobState]) -> None:
    live: dict[JobId, set[Epoch]] = {}
    for (job_id, epoch), attempt in rows.of(ATTEMPTS).items():
        standing = standings.get(job_id)
        if standing is None and job_id not in rows.of(JOBS):
            raise StoreRefused(f"attempt {epoch} of job {job_id}: the job does not exist")
        if job_id not in live:
            live[job_id] = set() if standing is None or standing.live_epoch is None else {standing.live_epoch}
        if attempt.holds_allocation:
            live[job_id].add(epoch)
        else:
            live[job_id].discard(epoch)
    for job_id, epochs in live.items():
        if len(epochs) > 1:
            raise StoreRefused(
                f"job {job_id} would have {len(epochs)} live attempts (epochs {', '.join(map(str, sorted(epochs)))})"
            )
