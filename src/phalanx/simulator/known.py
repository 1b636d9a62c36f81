"""What policies that look at run times may know of them: the trace's own, the users' limits, or a forecast from what has ended before.

A forecast is made at the submit and never again. It is the median that `core.scheduling.predict` tells of jobs that ended by then; a trace
names no users, so that a job's likes are those of its virtual cluster and of its size.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol

from phalanx.core.errors import BadRequest
from phalanx.core.ids import UserId
from phalanx.core.scheduling.predict import Predictor, Traits
from phalanx.core.work.job import Job
from phalanx.simulator.trace import TraceJob

LOOKING: Final = ("sjf", "srtf", "backfill")  # policies that look at run times; what others know is their own affair
_UNKNOWN_S: Final = float("inf")  # nothing has ended yet: the job counts as the longest


class Durations(enum.StrEnum):
    """What policies that look at run times may know of them."""

    EXACT = "exact"  # the trace's own: nobody knows them; for yardsticks
    LIMIT = "limit"  # the time limit that the user gave
    PREDICTED = "predicted"  # from what has ended before


class Known(Protocol):
    """What one replay's policy may know."""

    def size_s(self, job: Job) -> float:
        """How long the job will run, asked once, at its submit. Its name is the trace's id."""

    def ended(self, job: TraceJob) -> None:
        """The job's work is done; told in the order of virtual time."""


def known_of(jobs: Sequence[TraceJob], durations: Durations) -> Known:
    """What may be known of `jobs`, for one replay.

    Raises:
        BadRequest: limits are asked for and a job has none.
    """
    match durations:
        case Durations.EXACT:
            return _Stated({job.id: job.duration_s for job in jobs})
        case Durations.LIMIT:
            check_limits(jobs)
            return _Stated({job.id: job.limit_s or 0.0 for job in jobs})
        case Durations.PREDICTED:
            return _Foretold(jobs)


def check_limits(jobs: Sequence[TraceJob]) -> None:
    """Refuse a trace whose jobs have no time limit.

    Raises:
        BadRequest: a job has none.
    """
    without = next((job for job in jobs if job.limit_s is None), None)
    if without is not None:
        raise BadRequest(
            f"--durations limit: job {without.id} (line {without.line}) has no time limit",
            hint="the column limit_s of a CSV, or field 9 of an SWF file, gives it",
        )


class _Stated:
    """Numbers that the trace states."""

    def __init__(self, sizes_s: dict[str, float]) -> None:
        self.sizes_s = sizes_s

    def size_s(self, job: Job) -> float:
        return self.sizes_s[job.spec.name]

    def ended(self, job: TraceJob) -> None:
        pass


class _Foretold:
    """Medians of jobs that have ended in this replay."""

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.predictor = Predictor()

    def size_s(self, job: Job) -> float:
        own = self.jobs[job.spec.name]
        median_s = self.predictor.predict(_traits(own), run_max_s=own.limit_s).p50_s
        return _UNKNOWN_S if median_s is None else median_s

    def ended(self, job: TraceJob) -> None:
        self.predictor.ended(_traits(job), job.duration_s)


def _traits(job: TraceJob) -> Traits:
    return Traits(user=UserId(job.label), gpus=job.gpus)
