"""A published run beside what the planner says of it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published_runs import PublishedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionScore:
    """One row with its prediction. `error` is predicted over measured, minus 1; `item_variance` the part of the variance without the source."""

    run: PublishedRun
    seconds: float
    low_s: float
    high_s: float
    item_variance: float

    @property
    def error(self) -> float:
        """The relative, signed error."""
        return self.seconds / self.run.measured_s - 1.0

    @property
    def in_interval(self) -> bool:
        """Whether the measured value is in the interval."""
        return self.low_s <= self.run.measured_s <= self.high_s
