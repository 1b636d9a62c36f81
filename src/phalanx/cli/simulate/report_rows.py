"""The rows of a simulation report, for tables and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.cli.simulate.chart_data import format_short
from phalanx.simulator.report import ReplayReport


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value < 60 else f"{value:,.0f} s ({format_short(value)})"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One row. `lower_is_better`: lower is better; None if neither is. `rented`: only where nodes are rented."""

    name: str
    value: Callable[[ReplayReport], float]
    format: Callable[[float], str]
    lower_is_better: bool | None = True
    rented: bool = False

    def format_brief(self, value: float) -> str:
        """Format shorter, for several columns: a time in one unit."""
        return format_short(value) if self.format is _seconds else self.format(value)

    def best(self, values: Sequence[float]) -> float | None:
        """Return the best value; None if the row has no order or all values are equal."""
        if self.lower_is_better is None or min(values) == max(values):
            return None
        return min(values) if self.lower_is_better else max(values)


def _count(value: float) -> str:
    return f"{value:,.0f}"


REPORT_ROWS: Final = (
    ReportRow("jobs", lambda report: report.jobs, _count, None),
    ReportRow("mean time from submit to end", lambda report: report.avg_jct_s, _seconds),
    ReportRow("median", lambda report: report.median_jct_s, _seconds),
    ReportRow("99th percentile", lambda report: report.p99_jct_s, _seconds),
    ReportRow("mean wait", lambda report: report.avg_wait_s, _seconds),
    ReportRow("99th percentile of waits", lambda report: report.p99_wait_s, _seconds),
    ReportRow("mean wait of jobs with 8 or more GPUs", lambda report: report.avg_wait_large_s, _seconds),
    ReportRow("longest wait", lambda report: report.max_wait_s, _seconds),
    ReportRow("longest uninterrupted wait", lambda report: report.max_unbroken_wait_s, _seconds),
    ReportRow("makespan, first submit to last end", lambda report: report.makespan_s, _seconds),
    ReportRow(
        "GPU utilisation over the makespan",
        lambda report: report.utilization,
        lambda value: f"{value:.1%}",
        lower_is_better=False,
    ),
    ReportRow("preemptions", lambda report: report.preemptions, _count),
    ReportRow("moves", lambda report: report.moves, _count),
    ReportRow("preemptions and moves of a job", lambda report: report.stops_per_job, lambda value: f"{value:.2f}"),
    ReportRow("lost GPU-hours", lambda report: report.lost_gpu_s / 3600.0, lambda value: f"{value:,.1f}"),
    ReportRow(
        "rented GPU-hours", lambda report: report.rented_gpu_s / 3600.0, lambda value: f"{value:,.0f}", None, True
    ),
    ReportRow("rent, US dollars", lambda report: report.rented_usd, lambda value: f"{value:,.0f}", None, True),
    ReportRow("replay time", lambda report: report.wall_s, lambda value: f"{value:.1f} s", None),
)


def report_rows(reports: Sequence[ReplayReport]) -> list[ReportRow]:
    """Return the rows that say something about these reports."""
    rented = any(report.rented_nodes for report in reports)
    return [row for row in REPORT_ROWS if rented or not row.rented]
