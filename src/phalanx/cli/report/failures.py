"""`phalanx report failures`: failed attempts, the work that they lost, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.report.cost import money_text
from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import hours_text
from phalanx.cli.tables import Cell, Column

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.cost import FailureRowView, FailuresReportView

KEYS: Final = ("cause", "node", "user", "project", "queue", "job")  # `core.accounting.failure_report.FailureKey`


@report_kind("failures", by=KEYS)
def failures(head: Client, period: Period, *, by: str) -> ReportTable:
    """Failed attempts by cause, node or owner, the GPU-hours that they held and lost, and what the lost ones cost.

    LOST is work that is not part of a result, as in the usage summary of `phalanx show JOB`. Its cost is an estimate: the job's mean price.

    \b
    phalanx report failures --since 7d
    phalanx report failures --by node --csv
    """  # noqa: D301 - click reads the backspace character itself
    return failures_table(head.failures_report(by=by, since_s=period.since_s, until_s=period.until_s))


def failures_table(found: FailuresReportView) -> ReportTable:
    """The report as a table."""
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="FAILURES", right=True),
        Column(title="JOBS", right=True),
        Column(title="HELD HOURS", right=True, drop_order=1),
        Column(title="LOST HOURS", right=True),
        Column(title=f"COST {found.currency}".rstrip(), right=True, hide_empty=True),
    )
    rows = [_row(_name(row, found.by), row, priced=bool(found.currency)) for row in found.rows]
    notes = [f"{found.unread_jobs} older failed jobs are not in these figures"] if found.unread_jobs else []
    return ReportTable(
        title=f"Failures by {found.by}",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=[*rows, _row("total", found.total, priced=bool(found.currency))] if rows else (),
        csv_rows=[
            [found.by, "failures", "jobs", "held_gpu_hours", "lost_gpu_hours", "cost", "currency"],
            *(_csv_row(_name(row, found.by), row, found.currency) for row in found.rows),
            _csv_row("total", found.total, found.currency),
        ],
        notes=notes,
        empty="no failures in this period",
        next_command="phalanx show JOB" if found.by == "job" and rows else "phalanx report failures --by job",
    )


def _name(row: FailureRowView, by: str) -> str:
    return f"{row.merged} more" if row.merged else row.key or f"(no {by})"


def _row(name: str, row: FailureRowView, *, priced: bool) -> list[Cell | str]:
    return [
        Cell(name, "bold") if name != "total" else name,
        str(row.failures),
        str(row.jobs),
        hours_text(row.held_gpu_hours),
        hours_text(row.lost_gpu_hours),
        money_text(row.cost) if priced else "",
    ]


def _csv_row(name: str, row: FailureRowView, currency: str) -> list[str]:
    hours = (f"{row.held_gpu_hours:.9f}", f"{row.lost_gpu_hours:.9f}")
    return [name, str(row.failures), str(row.jobs), *hours, row.cost, currency]
