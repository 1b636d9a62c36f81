"""Records of retention: how long files of ended jobs are kept, runs that remove them, and archives of jobs."""

from __future__ import annotations

import msgspec


class RemovedFilesSum(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one kind in a run. `count`: jobs, or uploads; `bytes`: on the disk."""

    count: int
    bytes: int


class ExpiredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one kind of one job. `name`: the job, or the beginning of an upload's SHA-256."""

    kind: str
    name: str
    bytes: int
    job_name: str = ""
    user: str = ""
    ended_s: float | None = None


class RetentionRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that removes files, or in a dry run counts them.

    Attributes:
        ages_s: the least age of each kind of file, in seconds since the end of the job.
        began_s, ended_s: Unix seconds; `ended_s` is None while it runs.
        error: why it did not remove all files: the first error.
        folders, folders_done: how many folders of jobs there are, and how many it has looked at.
        removed: by kind; in a dry run what would be removed.
        largest: the largest of them.
        kept_records: jobs that are old enough for an archive, and stay: they have files, are among the newest, or a job depends on them.
    """

    number: int
    dry_run: bool
    by: str
    began_s: float
    ages_s: dict[str, float]
    ended_s: float | None = None
    error: str = ""
    folders: int = 0
    folders_done: int = 0
    removed: dict[str, RemovedFilesSum] = {}
    largest: list[ExpiredFiles] = []
    kept_records: int = 0


class RetentionView(msgspec.Struct, frozen=True, kw_only=True):
    """For how long after the end of a job each kind of file is kept, in seconds; a kind that is missing is kept for ever.

    Attributes:
        by, at_s: who set it, and when.
        run: the newest run since the head started.
    """

    periods_s: dict[str, float]
    by: str = ""
    at_s: float | None = None
    run: RetentionRun | None = None


class RetentionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The periods that replace the earlier ones: `logs`, `outputs`, `checkpoints`, `uploads`, `records`."""

    periods_s: dict[str, float]


class CleanBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to remove now. `kinds`: all but `records`, if empty."""

    older_than_s: float
    kinds: list[str] = []
    dry_run: bool = False


class ArchivedMonth(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that ended in one month (UTC). `bytes`: of its files on the disk; a job in two files counts twice."""

    month: str
    jobs: int
    files: int
    bytes: int


class ArchiveList(msgspec.Struct, frozen=True, kw_only=True):
    """All months, oldest first. `folder`: where the files are, on the head."""

    months: list[ArchivedMonth]
    folder: str


class ArchivedJobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One archived job. Times are Unix seconds.

    Attributes:
        output_dir, checkpoints: addresses in object stores, where they were when the job was archived; only in lists of such jobs.
    """

    id: str
    seq: int
    name: str
    state: str
    user: str
    project: str
    queue: str
    gpu_milli: int
    submit_s: float
    ended_s: float
    attempts: int
    output_dir: str = ""
    checkpoints: list[str] = []


class ArchivedJobs(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the jobs of one month, by number. `next`: goes into `after` for the next page; None at the end."""

    jobs: list[ArchivedJobRow]
    next: int | None = None
