"""The rows of a simulation report, for tables and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.cli.simulate.charts import short
from phalanx.simulator.report import Report


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value < 60 else f"{value:,.0f} s ({short(value)})"


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `less`: lower is better; None if neither is."""

    name: str
    value: Callable[[Report], float]
    shown: Callable[[float], str]
    less: bool | None = True

    def brief(self, value: float) -> str:
        """Format shorter, for several columns: a time in one unit."""
        return short(value) if self.shown is _seconds else self.shown(value)

    def best(self, values: Sequence[float]) -> float | None:
        """Return the best value; None if the row has no order or all values are equal."""
        if self.less is None or min(values) == max(values):
            return None
        return min(values) if self.less else max(values)


def _count(value: float) -> str:
    return f"{value:,.0f}"


ROWS: Final = (
    Row("jobs", lambda report: report.jobs, _count, None),
    Row("mean time from submit to end", lambda report: report.avg_jct_s, _seconds),
    Row("median", lambda report: report.median_jct_s, _seconds),
    Row("99th percentile", lambda report: report.p99_jct_s, _seconds),
    Row("mean wait", lambda report: report.avg_wait_s, _seconds),
    Row("99th percentile of waits", lambda report: report.p99_wait_s, _seconds),
    Row("mean wait of jobs with 8 or more GPUs", lambda report: report.avg_wait_large_s, _seconds),
    Row("longest wait", lambda report: report.max_wait_s, _seconds),
    Row("longest uninterrupted wait", lambda report: report.max_unbroken_wait_s, _seconds),
    Row("makespan, first submit to last end", lambda report: report.makespan_s, _seconds),
    Row(
        "GPU utilisation over the makespan", lambda report: report.utilization, lambda value: f"{value:.1%}", less=False
    ),
    Row("preemptions", lambda report: report.preemptions, _count),
    Row("moves", lambda report: report.moves, _count),
    Row("lost GPU-hours", lambda report: report.lost_gpu_s / 3600.0, lambda value: f"{value:,.1f}"),
    Row("replay time", lambda report: report.wall_s, lambda value: f"{value:.1f} s", None),
)
