"""Removes the files of ended jobs by age, and archives their records: when an operator asks, and every hour by the retention policy. One run at a time, on a thread of its own.

Only files of jobs that the store knows as ended are removed, each after a line in the job's history. Files of unknown jobs stay. The next run
finds files again that a run could not remove, or that it left because it was interrupted.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from phalanx.api.nodes.record_archiver import ArchivedSum, RecordArchiver
from phalanx.api.services import HeadServices
from phalanx.core.access.audit import AuditCall
from phalanx.core.errors import Conflict, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, TokenId, UserId
from phalanx.core.state.events import RecordRemovedFiles
from phalanx.core.state.records import RETENTION, REVISIONS
from phalanx.core.units import format_duration
from phalanx.core.work.job import Job
from phalanx.core.work.retention import POLICY, RetainedFiles, is_expired, uploads_in_use
from phalanx.store.checkpoints.copies import CheckpointCopies
from phalanx.store.disk_usage import job_folders, tree_bytes
from phalanx.store.job_archives import JobArchives
from phalanx.store.outputs.copies import OutputCopies
from phalanx.wire.api.retention import ExpiredFiles, RemovedFilesSum, RetentionRun

SWEEP_EVERY_S: Final = 3600.0
_BATCH: Final = 100  # jobs whose histories get their lines in one commit
_LARGEST: Final = 10  # shown
_TIMEOUT_S: Final = 120.0  # of a commit
_log: Final = logging.getLogger("phalanx.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRequest:
    """What to remove: the least age of each kind of file, in seconds since the end of the job. `dry_run`: only count it."""

    ages: Mapping[RetainedFiles, float]
    by: UserId
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Files that may go. `job`: None for uploads, which belong to no single job."""

    kind: RetainedFiles
    name: str
    size_bytes: int
    job: Job | None
    remove: Callable[[], object]


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run, as far as it has come."""

    number: int
    request: CleanRequest
    began_s: float
    ended_s: float | None = None
    error: str = ""
    folders: int = 0
    folders_done: int = 0
    sums: dict[RetainedFiles, list[int]] = field(default_factory=dict)  # files of how many jobs, bytes
    largest: list[tuple[int, str, _Found]] = field(default_factory=list)  # a heap
    archived: ArchivedSum = field(default_factory=ArchivedSum)


class FileCleaner:
    """See the module. Thread-safe."""

    def __init__(
        self, services: HeadServices, checkpoints: CheckpointCopies, outputs: OutputCopies, archives: JobArchives
    ) -> None:
        self._services, self._checkpoints, self._outputs = services, checkpoints, outputs
        self._archiver = RecordArchiver(services, archives)
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._swept_s: float | None = None

    def start(self, request: CleanRequest) -> RetentionRun:
        """Start a run.

        Raises:
            Conflict: another one is running.
        """
        with self._lock:
            if self._run is not None and self._run.ended_s is None:
                raise Conflict("another run removes files at the moment", hint=Hint(HintCode.SHOW_RETENTION))
            number = 1 if self._run is None else self._run.number + 1
            run = self._run = _Run(number=number, request=request, began_s=self._services.clock.now_s())
        threading.Thread(target=self._work, args=(run,), name="file-cleaner", daemon=True).start()
        return self._view(run)

    def newest_run(self) -> RetentionRun | None:
        """The run that is under way, or the last one since the head started."""
        with self._lock:
            run = self._run
        return None if run is None else self._view(run)

    def sweep(self) -> None:
        """Start a run by the policy, unless no policy is set, or the last sweep is less than an hour ago."""
        now_s = self._services.clock.boottime_s()
        policy = self._services.store.record(RETENTION, POLICY)
        if policy is None or not policy.periods:
            return
        if self._swept_s is None or now_s - self._swept_s >= SWEEP_EVERY_S:
            with contextlib.suppress(Conflict):
                self.start(CleanRequest(ages=dict(policy.periods), by=policy.by, dry_run=False))
                self._swept_s = now_s

    def _work(self, run: _Run) -> None:
        try:
            batch: list[_Found] = []
            for found in self._expired(run):
                batch.append(found)
                if len(batch) == _BATCH:
                    self._remove(run, batch)
                    batch = []
            self._remove(run, batch)
            if RetainedFiles.RECORDS in run.request.ages:  # jobs without files only, so after them
                wanted = run.request
                age_s = wanted.ages[RetainedFiles.RECORDS]
                self._archiver.run(age_s, wanted.by, run.archived, dry_run=wanted.dry_run)
        except (PhalanxError, OSError) as error:
            run.error = str(error)
            _log.warning("the removal of old files stopped: %s", error)
        except Exception as error:  # an internal error must not leave a run without an end
            run.error = f"internal error: {error!r}"
            raise
        finally:
            run.ended_s = self._services.clock.now_s()

    def _remove(self, run: _Run, batch: Sequence[_Found]) -> None:
        """Note the removal in the history of the jobs, durably, and then remove the files."""
        if not batch:
            return
        if not run.request.dry_run:
            self._record(run, batch)
        for found in batch:
            if not run.request.dry_run and not _is_removed(run, found):
                continue
            count = run.sums.setdefault(found.kind, [0, 0])
            count[0] += 1
            count[1] += found.size_bytes
            heapq.heappush(run.largest, (found.size_bytes, f"{found.kind}/{found.name}", found))
            if len(run.largest) > _LARGEST:
                heapq.heappop(run.largest)

    def _record(self, run: _Run, batch: Sequence[_Found]) -> None:
        by = run.request.by
        call = AuditCall(user=by, token_id=TokenId(""), origin="head", action="retention")
        for kind, age_s in run.request.ages.items():
            jobs = [(found.job.id, kind) for found in batch if found.kind is kind and found.job is not None]
            if jobs:
                why = f"the job ended more than {format_duration(age_s)} ago"
                event = RecordRemovedFiles(jobs=jobs, why=why, by=by)
                self._services.controller.request(event, call).result(timeout=_TIMEOUT_S)

    # ---- what is old --------------------------------------------------------------------------------------------------

    def _expired(self, run: _Run) -> Iterator[_Found]:
        """All files of the kinds that are asked for and old enough, kind by kind."""
        now_s, ages = self._services.clock.now_s(), run.request.ages
        finders: dict[RetainedFiles, Callable[[Job], _Found | None]] = {
            RetainedFiles.LOGS: self._logs_of,
            RetainedFiles.OUTPUTS: self._outputs_of,
            RetainedFiles.CHECKPOINTS: self._checkpoints_of,
        }
        roots = {kind: self._job_folders(kind) for kind in finders if kind in ages}
        run.folders = sum(map(len, roots.values()))
        for kind, folders in roots.items():
            for name, job_id in folders:
                job = self._services.store.job(job_id)
                if job is not None and job.folder == name and is_expired(job, ages[kind], now_s):
                    found = finders[kind](job)
                    if found is not None:
                        yield found
                run.folders_done += 1
        if RetainedFiles.UPLOADS in ages:
            yield from self._uploads(now_s - ages[RetainedFiles.UPLOADS])

    def _job_folders(self, kind: RetainedFiles) -> list[tuple[str, JobId]]:
        if kind is RetainedFiles.LOGS:
            return self._services.logs.job_folders()
        outputs = kind is RetainedFiles.OUTPUTS
        return job_folders(self._services.output_root if outputs else self._services.checkpoint_root)

    def _logs_of(self, job: Job) -> _Found:
        size = self._services.logs.stored_bytes(job.folder)
        remove = partial(self._services.logs.delete, job.folder)
        return _Found(kind=RetainedFiles.LOGS, name=job.id, size_bytes=size, job=job, remove=remove)

    def _outputs_of(self, job: Job) -> _Found:
        size = tree_bytes(os.path.join(self._services.output_root, job.folder))
        remove = partial(self._outputs.delete, job.folder)
        return _Found(kind=RetainedFiles.OUTPUTS, name=job.id, size_bytes=size, job=job, remove=remove)

    def _checkpoints_of(self, job: Job) -> _Found | None:
        stale = self._checkpoints.stale_folders(job, self._services.store.attempts(job.id))
        if not stale:
            return None
        size = sum(map(tree_bytes, stale))
        return _Found(
            kind=RetainedFiles.CHECKPOINTS,
            name=job.id,
            size_bytes=size,
            job=job,
            remove=partial(self._checkpoints.remove_stale, stale),
        )

    def _uploads(self, before_s: float) -> Iterator[_Found]:
        blobs = self._services.blobs
        for sha256, size in blobs.unused(before_s):
            # Read again for each: a job may have been submitted with it meanwhile.
            if sha256 not in self._needed_uploads():
                remove = partial(blobs.remove_unused, sha256, before_s)
                yield _Found(kind=RetainedFiles.UPLOADS, name=sha256[:12], size_bytes=size, job=None, remove=remove)

    def _needed_uploads(self) -> frozenset[str]:
        controller = self._services.controller
        jobs = [*controller.pending_jobs(), *(job for job, _ in controller.live_attempts())]
        revisions = self._services.store.records(REVISIONS)
        return uploads_in_use(jobs) | {one.spec.upload for one in revisions if one.spec.upload}

    def _view(self, run: _Run) -> RetentionRun:
        request = run.request
        return RetentionRun(
            number=run.number,
            dry_run=request.dry_run,
            by=request.by,
            began_s=run.began_s,
            ended_s=run.ended_s,
            error=run.error,
            folders=run.folders,
            folders_done=run.folders_done,
            ages_s={kind.value: age_s for kind, age_s in request.ages.items()},
            removed=_sums(run),
            kept_records=run.archived.kept,
            largest=[_expired_view(found) for _, _, found in sorted(run.largest, reverse=True)],
        )


def _is_removed(run: _Run, found: _Found) -> bool:
    """Remove files. If that fails they stay for the next run, and this one goes on with those of other jobs."""
    try:
        found.remove()
    except (PhalanxError, OSError) as error:
        if not run.error:
            _log.warning("the %s of job %s could not be removed: %s", found.kind, found.name, error)
            run.error = str(error)
        return False
    return True


def _sums(run: _Run) -> dict[str, RemovedFilesSum]:
    sums = {kind.value: RemovedFilesSum(count=count, bytes=size) for kind, (count, size) in list(run.sums.items())}
    if run.archived.jobs:
        sums[RetainedFiles.RECORDS.value] = RemovedFilesSum(count=run.archived.jobs, bytes=run.archived.bytes)
    return sums


def _expired_view(found: _Found) -> ExpiredFiles:
    job = found.job
    return ExpiredFiles(
        kind=found.kind.value,
        name=found.name,
        job_name="" if job is None else job.name,
        user="" if job is None else job.user,
        ended_s=None if job is None else job.ended_s,
        bytes=found.size_bytes,
    )
