"""Views of archived jobs. All functions read files: call them on a thread."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import msgspec

from phalanx.api.auth.authenticator import may_see_all_of
from phalanx.api.auth.redaction import redact_line
from phalanx.api.views.job_records import attempt_view, job_view
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.job import Job
from phalanx.store.job_archives import ArchivedJob, ArchiveFile, JobArchives, has_stored_files
from phalanx.wire.api.jobs import JobDetail
from phalanx.wire.api.retention import ArchivedJobRow, ArchivedJobs, ArchivedMonth, ArchiveList

_MONTH: Final = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
_STORED_MAX: Final = 200  # rows of one answer that have addresses
_JOB_ID: Final = re.compile(r"[0-9]{1,15}(_[0-9]{1,15})?")


def archive_list(archives: JobArchives, folder: str) -> ArchiveList:
    """All months.

    Raises:
        BadFile: a file is damaged.
    """
    months: dict[str, list[ArchiveFile]] = {}
    for file in archives.files():
        months.setdefault(file.month, []).append(file)
    found = [
        ArchivedMonth(
            month=month,
            jobs=sum(map(archives.job_count, files)),
            files=len(files),
            bytes=sum(one.size_bytes for one in files),
        )
        for month, files in months.items()
    ]
    return ArchiveList(months=found, folder=folder)


def archived_jobs(
    archives: JobArchives, month: str, *, user: str, after: int, limit: int, stored: bool = False
) -> ArchivedJobs:
    """A page of the jobs of a month; with `stored` only those with files in object stores, and the addresses.

    Raises:
        BadRequest: it is not a month.
        NotFound: it has no archive.
        BadFile: a file is damaged.
    """
    if not _MONTH.fullmatch(month):
        raise BadRequest(f"{month[:20]!r} is not a month", hint="write it as 2026-08")
    files = archives.files(month)
    if not files:
        raise NotFound(f"no job that ended in {month} is archived", hint=Hint(HintCode.LIST_ARCHIVES))
    wanted = [one for one in files if one.last_seq > after and (not stored or archives.has_stored_jobs(one))]
    limit = min(limit, _STORED_MAX) if stored else limit
    rows: list[ArchivedJobRow] = []
    for job in _by_number(archives, wanted):
        if job.seq > after and user in ("", job.user) and (not stored or has_stored_files(job)):
            if len(rows) == limit:
                return ArchivedJobs(jobs=rows, next=rows[-1].seq)
            rows.append(_stored_row(job) if stored else _row(job))
            after = job.seq  # a job may be in two files
    return ArchivedJobs(jobs=rows)


def find_archived(archives: JobArchives, job_id: JobId) -> tuple[ArchiveFile, ArchivedJob]:
    """An archived job and its file.

    Raises:
        NotFound: no job has this id, archived or not.
        BadRequest: the id names an array, and one element is needed.
        BadFile: a file is damaged.
    """
    try:
        if not _JOB_ID.fullmatch(job_id):
            raise NotFound("not an id of a job")
        file, found = archives.find(job_id)
    except NotFound:
        raise NotFound(f"no job {job_id}", hint=Hint(HintCode.LIST_JOBS)) from None
    if found[0].job.id != job_id:
        raise BadRequest(
            f"job {job_id} is an array, archived in {file.month}",
            hint=f"name one element, {found[0].job.id} to {found[-1].job.id}",
        )
    return file, found[0]


def archived_detail(archives: JobArchives, caller: Caller, job_id: JobId, output_root: str) -> JobDetail:
    """An archived job with its attempts. Raises as `find_archived`."""
    file, found = find_archived(archives, job_id)
    show_all = may_see_all_of(caller, found.job)
    view = job_view(
        found.job,
        attempt=found.attempts[-1] if found.attempts else None,
        waiting=None,
        progress=None,
        utilization=None,
        show_all=show_all,
        output_root=output_root,
    )
    attempts = [attempt_view(attempt, show_all=show_all) for attempt in found.attempts]
    return JobDetail(job=view, attempts=attempts, archived=file.month)


def archived_history(archives: JobArchives, caller: Caller, job_id: JobId, after: int, limit: int) -> list[HistoryLine]:
    """History lines of an archived job with seq > after, as the caller may read them. Raises as `find_archived`."""
    _, found = find_archived(archives, job_id)
    lines = [line for line in found.history if line.seq > after][:limit]
    return lines if may_see_all_of(caller, found.job) else [redact_line(line) for line in lines]


def _by_number(archives: JobArchives, files: list[ArchiveFile]) -> Iterator[Job]:
    jobs = [(one.job for one in archives.jobs(file)) for file in files]
    return heapq.merge(*jobs, key=attrgetter("seq"))


def _stored_row(job: Job) -> ArchivedJobRow:
    output_dir = f"{job.spec.outputs}/{job.folder}" if job.spec.outputs else ""
    checkpoints = [one.path for one in job.checkpoints if "://" in one.path]
    return msgspec.structs.replace(_row(job), output_dir=output_dir, checkpoints=checkpoints)


def _row(job: Job) -> ArchivedJobRow:
    return ArchivedJobRow(
        id=job.id,
        seq=job.seq,
        name=job.name,
        state=job.state.value,
        user=job.user,
        project=job.project,
        queue=job.queue,
        gpu_milli=job.gpu_milli,
        submit_s=job.submit_s,
        ended_s=job.ended_s or 0.0,
        attempts=job.epoch,
    )
