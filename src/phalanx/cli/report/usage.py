"""`phalanx report usage`: the GPU-hours of the fleet by state and by project, user, queue, GPU model or job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.tables import Cell, Column

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.usage import UsageReportView, UsageRowView

KEYS: Final = ("project", "user", "queue", "gpu", "job")  # `core.accounting.usage_report.UsageKey`, which loads more
NO_JOB: Final = "(no job)"
# Titles of the columns; the states that matter least in a narrow terminal have the highest number.
_TITLES: Final = {
    "computing": ("COMPUTING", 0),
    "low": ("LOW", 3),
    "data_bound": ("DATA-BOUND", 5),
    "communicating": ("COMMUNICATING", 6),
    "checkpointing": ("CHECKPOINTING", 9),
    "starting": ("STARTING", 8),
    "idle": ("IDLE", 1),
    "unoccupied": ("UNOCCUPIED", 2),
    "hung": ("HUNG", 4),
    "lost": ("LOST", 7),
    "preempted": ("PREEMPTED", 10),
    "reserved": ("RESERVED", 12),
    "provisioning": ("PROVISIONING", 13),
    "broken": ("BROKEN", 11),
    "draining": ("DRAINING", 14),
    "fragmented": ("FRAGMENTED", 15),
    "free_demand": ("FREE+DEMAND", 16),
    "free": ("FREE", 17),
}


@report_kind("usage", by=KEYS, labels=True)
def usage(head: Client, period: Period, *, by: str) -> ReportTable:
    """GPU-hours by state. The states of all rows add up to the GPUs of the fleet times the time, free and broken ones included.

    The report begins with the full hour. docs/usage-states.md explains each state.

    \b
    phalanx report usage --by user --since 7d
    phalanx report usage --by job --since 24h --json
    phalanx report usage --by label:exp
    """  # noqa: D301 - click reads the backspace character itself
    return usage_table(head.usage_report(by=by, since_s=period.since_s, until_s=period.until_s))


def usage_table(found: UsageReportView) -> ReportTable:
    """The report as a table; only states that occurred have a column, except in CSV."""
    total = found.total
    occurred = [state for state in _TITLES if total.by_state_us.get(state)]
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="GPU-HOURS", right=True),
        *(Column(title=title, right=True, drop_order=order) for title, order in map(_TITLES.__getitem__, occurred)),
    )
    rows: list[list[Cell | str]] = [
        [Cell(row_name(row, found.by), "bold"), hours_text(row.gpu_hours), *_hours_of(row.by_state, occurred)]
        for row in found.rows
    ]
    rows.append(["total", hours_text(total.fleet_gpu_hours), *_hours_of(total.by_state, occurred)])
    return ReportTable(
        title=f"Use of GPUs by {found.by}",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=rows if total.fleet_gpu_us else (),
        csv_rows=[
            [found.by, "gpu_hours", *_TITLES],
            *(_csv_row(row_name(row, found.by), row.gpu_hours, row.by_state) for row in found.rows),
            _csv_row("total", total.fleet_gpu_hours, total.by_state),
        ],
        notes=_notes(found),
        bars=(
            "GPU-hours",
            [
                (
                    row_name(row, found.by),
                    {_TITLES[state][0]: row.by_state[state] for state in occurred if state in row.by_state},
                )
                for row in found.rows
            ],
        ),
        next_command="" if found.by == "job" or found.by.startswith("label:") else "phalanx report usage --by job",
    )


def state_title(state: str) -> str:
    """The title of a state's column."""
    return _TITLES[state][0]


def row_name(row: UsageRowView, by: str = "") -> str:
    """The name of a row: time of no job and the rest of a long list have none of their own."""
    nothing = f"(no {by})" if by.startswith("label:") else NO_JOB
    return f"{row.merged} more" if row.merged else row.key or nothing


def hours_text(hours: float) -> str:
    """Hours with as many digits as matter; empty for none."""
    if not hours:
        return ""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 10 else f"{hours:.3f}"


def _hours_of(by_state: dict[str, float], states: list[str]) -> list[str]:
    return [hours_text(by_state.get(state, 0.0)) for state in states]


def _csv_row(name: str, hours: float, by_state: dict[str, float]) -> list[str]:
    return [name, *(f"{one:.9f}" for one in (hours, *(by_state.get(state, 0.0) for state in _TITLES)))]


def _notes(found: UsageReportView) -> tuple[str, ...]:
    by_note = found.total.by_note
    unknown = by_note.get("computing", {}).get("progress unknown", 0.0)
    unobserved = sum(notes.get("unobserved", 0.0) for notes in by_note.values())
    waits = by_note.get("free_demand", {})
    lines = []
    if unknown:
        lines.append(
            f"{hours_text(unknown)} GPU-hours of computing are of jobs that report no steps: their progress is unknown"
        )
    if unobserved:
        lines.append(f"{hours_text(unobserved)} GPU-hours were not observed: no samples came, or no head ran")
    if waits:
        named = ", ".join(f"{why} {hours_text(hours)}" for why, hours in sorted(waits.items(), key=lambda one: -one[1]))
        lines.append(f"free although a job waited, by its reason: {named}")
    return tuple(lines)
