"""Records of retention: how long files of ended jobs are kept, and runs that remove them."""

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
    """The periods that replace the earlier ones: `logs`, `outputs`, `checkpoints`, `uploads`."""

    periods_s: dict[str, float]


class CleanBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to remove now. `kinds`: all, if empty."""

    older_than_s: float
    kinds: list[str] = []
    dry_run: bool = False
