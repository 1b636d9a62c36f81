"""Archives: the records of jobs that ended long ago, in one folder for each month (UTC) in which they ended.

A file holds up to some thousand jobs, each followed by its attempts, what they used, and its history. Its name is the numbers of the first and
last job. A file never changes. Two files may have the same job, if a head stopped between writing one and removing the jobs from its store.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from phalanx.core.errors import NotFound
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import ATTEMPT_USES, ATTEMPTS, JOBS
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.durable_files import make_directory
from phalanx.ports.store import Store
from phalanx.store.sql.archive import ARCHIVE, VERSION, BackupManifest, read_manifest, read_records, write_backup
from phalanx.store.sql.kinds import HISTORY

JOBS_PER_FILE: Final = 2000  # about 1 MB, read whole to find one job; a larger array stays together
_MONTH: Final = re.compile(r"[0-9]{4}-[0-9]{2}")
_FILE: Final = re.compile(r"([0-9]+)-([0-9]+)(?:\.[0-9]+)?\.gz")
_HISTORY_PAGE: Final = 1000
_encode: Final = msgspec.json.Encoder().encode
StoredRecord = tuple[str, str]  # name of its kind, document


@dataclass(slots=True, kw_only=True)
class ArchivedJob:
    """A job with all that an archive has of it."""

    job: Job
    attempts: list[Attempt]
    uses: list[AttemptUse]
    history: list[HistoryLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """A file. `first_seq`, `last_seq`: the submit numbers of its first and last job."""

    month: str
    path: str
    first_seq: int
    last_seq: int
    size_bytes: int


def month_of(at_s: float) -> str:
    """The month (UTC) of a Unix time, such as 2026-08."""
    return time.strftime("%Y-%m", time.gmtime(at_s))


def has_stored_files(job: Job) -> bool:
    """Whether a job has outputs or checkpoints in an object store, as far as its record says."""
    return bool(job.spec.outputs) or any("://" in one.path for one in job.checkpoints)


def records_of(store: Store, job: Job) -> Iterator[StoredRecord]:
    """All records of a job that an archive keeps: keys of submits go without a trace."""
    yield JOBS.name, _encode(job).decode()
    for attempt in store.attempts(job.id):
        yield ATTEMPTS.name, _encode(attempt).decode()
        use = store.record(ATTEMPT_USES, (job.id, attempt.epoch))
        if use is not None:
            yield ATTEMPT_USES.name, _encode(use).decode()
    after = 0
    while lines := store.history(job_id=job.id, after=after, limit=_HISTORY_PAGE):
        for line in lines:
            yield HISTORY.name, _encode(line).decode()
        after = lines[-1].seq


class JobArchives:
    """See the module. Thread-safe."""

    def __init__(self, root: str, *, version: str, clock_s: Callable[[], float] = time.time) -> None:
        self._root, self._version, self._clock_s = root, version, clock_s

    def files(self, month: str = "") -> list[ArchiveFile]:
        """The files, of one month or of all, by month and first job."""
        months = [month] if month else sorted(filter(_MONTH.fullmatch, _names(self._root)))
        return [file for one in months if _MONTH.fullmatch(one) for file in self._month_files(one)]

    def write(self, month: str, jobs: Sequence[Job], records: Iterable[StoredRecord]) -> str:
        """Write a file, durable when this returns.

        Args:
            month: in which they ended.
            jobs: by submit number.
            records: of all of them, as by `records_of`; read once.

        Returns:
            Its name, such as 2026-08/17-2016.

        Raises:
            StoreRefused: the disk failed or is full.
        """
        manifest = BackupManifest(
            format=ARCHIVE,
            version=VERSION,
            phalanx=self._version,
            made_s=self._clock_s(),
            database="",
            migration=0,
            counts={JOBS.name: len(jobs)},
            last_job_seq=jobs[-1].seq,
            stored_jobs=sum(map(has_stored_files, jobs)),
        )
        make_directory("archives.month", os.path.join(self._root, month))
        name = f"{jobs[0].seq}-{jobs[-1].seq}"
        taken = {os.path.basename(one.path) for one in self._month_files(month)}
        number = 1
        while f"{name}.gz" in taken:
            number += 1
            name = f"{jobs[0].seq}-{jobs[-1].seq}.{number}"
        write_backup(os.path.join(self._root, month, f"{name}.gz"), manifest, records)
        return f"{month}/{name}"

    def job_count(self, file: ArchiveFile) -> int:
        """How many jobs a file has, by its first line.

        Raises:
            BadFile: it is damaged.
        """
        return read_manifest(file.path, ARCHIVE).counts[JOBS.name]

    def has_stored_jobs(self, file: ArchiveFile) -> bool:
        """Whether a file may have jobs with files in object stores, by its first line; True for one that does not say so.

        Raises:
            BadFile: it is damaged.
        """
        return read_manifest(file.path, ARCHIVE).stored_jobs != 0

    def jobs(self, file: ArchiveFile) -> Iterator[ArchivedJob]:
        """The jobs of a file, by submit number.

        Raises:
            BadFile: it is damaged, which may be found only at its end.
        """
        found: ArchivedJob | None = None
        for _, record in read_records(file.path, ARCHIVE):
            if isinstance(record, Job):
                if found is not None:
                    yield found
                found = ArchivedJob(job=record, attempts=[], uses=[], history=[])
            elif found is not None:
                _lists(found)[type(record)].append(record)
        if found is not None:
            yield found

    def find(self, job_id: JobId) -> tuple[ArchiveFile, list[ArchivedJob]]:
        """Find a job, or all elements of an array in the file that has them, by the job's own number or the array's.

        Raises:
            NotFound: no archive has it.
            BadFile: a file is damaged.
        """
        number = int(
            job_id.partition("_")[0]
        )  # of the job, or of the first element of its array, which is in the same file
        for file in self.files():
            if file.first_seq <= number <= file.last_seq:
                found = [
                    one
                    for one in self.jobs(file)
                    if one.job.id == job_id or (one.job.array is not None and one.job.array.array_id == job_id)
                ]
                if found:
                    return file, found
        raise NotFound(f"no archive has job {job_id}")

    def _month_files(self, month: str) -> list[ArchiveFile]:
        found = []
        for name in _names(os.path.join(self._root, month)):
            match = _FILE.fullmatch(name)
            if match:
                path = os.path.join(self._root, month, name)
                found.append(
                    ArchiveFile(
                        month=month,
                        path=path,
                        first_seq=int(match[1]),
                        last_seq=int(match[2]),
                        size_bytes=os.path.getsize(path),
                    )
                )
        return sorted(found, key=lambda one: (one.first_seq, one.path))


def _lists(found: ArchivedJob) -> dict[type, list[Any]]:
    return {Attempt: found.attempts, AttemptUse: found.uses, HistoryLine: found.history}


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
