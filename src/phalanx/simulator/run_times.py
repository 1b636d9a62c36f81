"""Sources of run times for policies that use them: the trace itself, the users' time limits, or a forecast from earlier jobs.

The forecast is made once, at submit. It is the median of `core.scheduling.estimates.run_time_prediction` over similar jobs that have ended. A trace names no
users, so similar jobs have the same virtual cluster and size.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol

from phalanx.core.errors import BadRequest
from phalanx.core.ids import UserId
from phalanx.core.scheduling.estimates.run_time_prediction import JobTraits, RunTimePredictor
from phalanx.simulator.trace import TraceJob

_UNKNOWN_S: Final = float("inf")  # no similar job has ended yet: assume the longest


class RunTimeKnowledge(enum.StrEnum):
    """Source of run times for policies that use them."""

    EXACT = "exact"  # those of the trace, unknown in practice; for reference policies
    LIMIT = "limit"  # the user's time limit
    PREDICTED = "predicted"  # a forecast from earlier jobs


class RunTimeSource(Protocol):
    """The run times that one replay's policy uses."""

    def run_time_s(self, job_id: str) -> float:
        """Return the run time of a job of the trace, called once at submit."""

    def record_end(self, job: TraceJob) -> None:
        """Record the end of a job; called in the order of virtual time."""


def run_times_for(jobs: Sequence[TraceJob], durations: RunTimeKnowledge, *, by_model: bool = False) -> RunTimeSource:
    """Return the run times of `jobs` for one replay.

    Args:
        jobs: of the replay.
        durations: the source.
        by_model: the fleet names GPU models: exact run times are those on the fastest model that the job accepts.

    Raises:
        BadRequest: a job lacks the time limit.
    """
    match durations:
        case RunTimeKnowledge.EXACT:
            return _TraceDurations({job.id: job.run_time_min_s if by_model else job.duration_s for job in jobs})
        case RunTimeKnowledge.LIMIT:
            check_limits(jobs)
            return _TraceDurations({job.id: job.limit_s or 0.0 for job in jobs})
        case RunTimeKnowledge.PREDICTED:
            return _ForecastDurations(jobs)


def check_limits(jobs: Sequence[TraceJob]) -> None:
    """Check that all jobs have time limits.

    Raises:
        BadRequest: a job has none.
    """
    without = next((job for job in jobs if job.limit_s is None), None)
    if without is not None:
        raise BadRequest(
            f"--durations limit: job {without.id} (line {without.line}) has no time limit",
            hint="set column limit_s of a CSV, or field 9 of an SWF file",
        )


class _TraceDurations:
    """Run times from the trace."""

    def __init__(self, sizes_s: dict[str, float]) -> None:
        self.sizes_s = sizes_s

    def run_time_s(self, job_id: str) -> float:
        return self.sizes_s[job_id]

    def record_end(self, job: TraceJob) -> None:
        pass


class _ForecastDurations:
    """Medians of the jobs that have ended in this replay."""

    def __init__(self, jobs: Sequence[TraceJob]) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.predictor = RunTimePredictor()

    def run_time_s(self, job_id: str) -> float:
        own = self.jobs[job_id]
        median_s = self.predictor.predict(_traits(own), run_max_s=own.limit_s).p50_s
        return _UNKNOWN_S if median_s is None else median_s

    def record_end(self, job: TraceJob) -> None:
        self.predictor.record_end(_traits(job), job.duration_s)


def _traits(job: TraceJob) -> JobTraits:
    return JobTraits(user=UserId(job.virtual_cluster), gpus=job.gpus)
