"""Moves the records of jobs that ended long ago out of the store, into archives by month.

A month is archived when all of it is old enough. Jobs stay that the controller holds in memory (the newest), that have files, or that a pending job
depends on; so do arrays with such an element. A file is written whole and synced before the first of its jobs leaves the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.access.audit import AuditCall
from phalanx.core.ids import JobId, TokenId, UserId
from phalanx.core.state.events import RemoveArchivedJobs
from phalanx.core.work.job import Job
from phalanx.core.work.retention import is_expired
from phalanx.core.work.states import JobState
from phalanx.ports.store import JobFilter, JobOrder
from phalanx.store.disk_usage import job_folders
from phalanx.store.job_archives import JOBS_PER_FILE, JobArchives, StoredRecord, month_of, records_of

_PAGE: Final = 500
_BATCH: Final = 200  # jobs that leave in one commit
_TIMEOUT_S: Final = 120.0
_ENDED: Final = frozenset(state for state in JobState if state.terminal)


@dataclass(slots=True)
class ArchivedSum:
    """What a run has archived. `kept`: jobs that are old enough, and stay."""

    jobs: int = 0
    bytes: int = 0
    kept: int = 0


@dataclass(slots=True)
class _Months:
    """Jobs that may go, by the month of their end, until they are enough for a file."""

    jobs: dict[str, list[Job]] = field(default_factory=dict)

    def add(self, group: Sequence[Job]) -> str:
        """Add a job, or a whole array to the month in which it ended."""
        month = month_of(max(job.ended_s or 0.0 for job in group))
        self.jobs.setdefault(month, []).extend(group)
        return month


class RecordArchiver:
    """See the module. `sum` counts while it runs."""

    def __init__(self, services: HeadServices, archives: JobArchives, *, jobs_per_file: int = JOBS_PER_FILE) -> None:
        self._services, self._archives, self._jobs_per_file = services, archives, jobs_per_file

    def run(self, age_s: float, by: UserId, done: ArchivedSum, *, dry_run: bool) -> None:
        """Archive all whole months that ended at least `age_s` ago; in a dry run only count.

        Raises:
            PhalanxError, OSError: it stopped early; the next run goes on.
        """
        months = _Months()
        for group in self._groups(age_s, done):
            month = months.add(group)
            if len(months.jobs[month]) >= self._jobs_per_file:
                self._archive(month, months.jobs.pop(month), by, done, dry_run=dry_run)
        for month, jobs in sorted(months.jobs.items()):
            self._archive(month, jobs, by, done, dry_run=dry_run)

    def _archive(self, month: str, jobs: Sequence[Job], by: UserId, done: ArchivedSum, *, dry_run: bool) -> None:
        if dry_run:
            for _ in self._records(jobs, done):
                pass
            done.jobs += len(jobs)
            return
        name = self._archives.write(month, jobs, self._records(jobs, done))
        call = AuditCall(user=by, token_id=TokenId(""), origin="head", action="retention")
        last_first = list(reversed(jobs))  # an array is found by its first element, which goes last
        for start in range(0, len(jobs), _BATCH):
            batch = last_first[start : start + _BATCH]
            event = RemoveArchivedJobs(jobs=[job.id for job in batch], newest_seq=batch[0].seq, archive=name, by=by)
            self._services.controller.request(event, call).result(timeout=_TIMEOUT_S)
            done.jobs += len(batch)

    def _records(self, jobs: Sequence[Job], done: ArchivedSum) -> Iterator[StoredRecord]:
        for job in jobs:
            for kind, document in records_of(self._services.store, job):
                done.bytes += len(document)
                yield kind, document

    def _groups(self, age_s: float, done: ArchivedSum) -> Iterator[Sequence[Job]]:
        """Jobs that may go, and whole arrays, by submit number."""
        now_s = self._services.clock.now_s()
        newest = month_of(now_s - age_s)
        stays = self._stays()
        array: list[Job] = []
        for job in self._ended_jobs(before_s=now_s - age_s):
            if array and (job.array is None or array[0].array is None or job.array.array_id != array[0].array.array_id):
                yield from self._whole(array, done)
                array = []
            if not is_expired(job, age_s, now_s) or month_of(job.ended_s or 0.0) >= newest:
                continue
            if stays(job):
                done.kept += 1
            elif job.array is None:
                yield [job]
            else:
                array.append(job)
        yield from self._whole(array, done)

    def _whole(self, array: Sequence[Job], done: ArchivedSum) -> Iterator[Sequence[Job]]:
        """The array, if all its elements may go."""
        if array and array[0].array is not None:
            if len(array) == array[0].array.size:
                yield array
            else:
                done.kept += len(array)

    def _ended_jobs(self, *, before_s: float) -> Iterator[Job]:
        after = 0
        while jobs := self._services.store.jobs(
            JobFilter(states=_ENDED, order=JobOrder.NUMBER, ascending=True, after=(after, after), limit=_PAGE)
        ):
            yield from jobs
            if jobs[0].submit_s > before_s:  # later ones ended later still
                return
            after = jobs[-1].seq

    def _stays(self) -> Callable[[Job], bool]:
        """Whether a job stays, however old it is."""
        services = self._services
        held = services.controller.held_jobs()
        needed: set[JobId] = {one.job_id for job in services.controller.pending_jobs() for one in job.spec.dependencies}
        folders = {name for root in (services.output_root, services.checkpoint_root) for name, _ in job_folders(root)}
        folders.update(name for name, _ in services.logs.job_folders())

        def stays(job: Job) -> bool:
            array_id = None if job.array is None else job.array.array_id
            return job.id in held or job.id in needed or array_id in needed or job.folder in folders

        return stays
