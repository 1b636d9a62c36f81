"""How long the head keeps the files and records of ended jobs. Nothing is removed by age until an operator sets a period."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import UserId
from phalanx.core.units import format_duration
from phalanx.core.work.job import Job

POLICY: Final = "policy"
"""The id of the only document."""
MIN_AGE_S: Final = 3600.0  # nodes may send the last files and lines of a job some minutes after its end


class RetainedFiles(enum.StrEnum):
    """What is removed by age. CHECKPOINTS: all but the newest valid one of a job; UPLOADS: working directories that no job needs; RECORDS:
    of jobs that have no files any more, month by month into archives.
    """

    LOGS = "logs"
    OUTPUTS = "outputs"
    CHECKPOINTS = "checkpoints"
    UPLOADS = "uploads"
    RECORDS = "records"


FILE_KINDS: Final = tuple(kind for kind in RetainedFiles if kind is not RetainedFiles.RECORDS)
"""What a run removes by default: records leave only when they are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """For how long after the end of a job each kind of file is kept; a kind that is missing is kept for ever.

    Attributes:
        periods: kind and seconds, by kind.
        at_s: when it was set (Unix seconds).
    """

    periods: tuple[tuple[RetainedFiles, float], ...]
    by: UserId
    at_s: float
    id: str = POLICY


def retention_periods(periods: Mapping[RetainedFiles, float]) -> tuple[tuple[RetainedFiles, float], ...]:
    """Check and order periods.

    Raises:
        BadRequest: a period is shorter than MIN_AGE_S, or not finite; or files of jobs would outlive their records.
    """
    for kind, period_s in periods.items():
        check_age(period_s, what=kind.value)
    records_s = periods.get(RetainedFiles.RECORDS)
    if records_s is not None:
        for kind in (RetainedFiles.LOGS, RetainedFiles.OUTPUTS):
            if periods.get(kind, float("inf")) > records_s:
                raise BadRequest(
                    f"records: {kind.value} must not be kept longer than records, as jobs with files keep their records",
                    hint=f"set a period of {kind.value} that is at most {format_duration(records_s)}",
                )
    return tuple(sorted(periods.items()))


def check_age(age_s: float, *, what: str) -> float:
    """Return the age of files to remove.

    Raises:
        BadRequest: it is shorter than MIN_AGE_S, or not finite.
    """
    if not MIN_AGE_S <= age_s < float("inf"):
        raise BadRequest(
            f"{what}: files must be at least {format_duration(MIN_AGE_S)} old to be removed",
            hint="nodes may send the last files of a job after its end",
        )
    return age_s


def is_expired(job: Job, age_s: float, now_s: float) -> bool:
    """Whether a job ended at least `age_s` ago. Such a job never runs again, so nothing writes its files any more."""
    return job.state.terminal and job.ended_s is not None and job.ended_s <= now_s - age_s


def uploads_in_use(jobs: Iterable[Job]) -> frozenset[str]:
    """The SHA-256 of each upload that one of these jobs needs."""
    return frozenset(job.spec.upload for job in jobs if job.spec.upload)
