"""`phalanx report waste`: GPU-hours that were wasted in a period, by state, and what to do about each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import KEYS, hours_text, row_name, state_title
from phalanx.cli.tables import Cell, Column
from phalanx.core.work.usage.waste_terms import WASTE_STATES

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.usage import UsageReportView, UsageRowView

HABITS: Final = {
    "idle": "end jobs when they are done; an idle policy of the queue does it for them",
    "unoccupied": "end jobs when they are done; an idle policy of the queue does it for them",
    "hung": "look where ranks stand when steps stop: the log has their stacks",
    "lost": "save checkpoints more often; find the nodes that fail",
    "low": "request fewer GPUs, or a part of one",
    "data_bound": "more CPUs for the loader, or faster storage",
    "communicating": "nearer nodes, or fewer",
    "broken": "repair the nodes and return them to service",
    "fragmented": "request sizes that fill a node",
}
"""What mends waste that comes again and again, by its state."""
_PARTLY: Final = ("low", "data_bound", "communicating")


@report_kind("waste", by=KEYS)
def past_waste(head: Client, period: Period, *, by: str) -> ReportTable:
    """GPU-hours that were wasted, by state: idle, hung, lost to failures, broken and so on; the worst rows first, each with what mends it.

    `phalanx waste` lists who wastes GPUs now. docs/waste.md says what counts as waste.

    \b
    phalanx report waste --by user --since 7d
    phalanx report waste --by job --month 2026-11 --csv
    """  # noqa: D301 - click reads the backspace character itself
    found = head.usage_report(by=by, since_s=period.since_s, until_s=period.until_s, waste_first=True)
    return waste_table(found)


def waste_table(found: UsageReportView) -> ReportTable:
    """The report as a table; only states that occurred have a column, except in CSV."""
    total = found.total
    rows = [row for row in found.rows if _wasted(row.by_state)]
    occurred = [state for state in WASTE_STATES if total.by_state_us.get(state)]
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="WASTED", right=True),
        Column(title="OF", right=True, drop_order=1),
        *(Column(title=state_title(state), right=True, drop_order=3 + place) for place, state in enumerate(occurred)),
        Column(title="TO MEND IT", min_width=16),
        Column(title="SEE", min_width=16, drop_order=2),
    )
    shown: list[list[Cell | str]] = [
        [
            Cell(row_name(row), "bold"),
            hours_text(_wasted(row.by_state)),
            hours_text(row.gpu_hours),
            *(hours_text(row.by_state.get(state, 0.0)) for state in occurred),
            HABITS[_worst(row.by_state)],
            _command(found.by, row),
        ]
        for row in rows
    ]
    sums = [hours_text(total.by_state[state]) for state in occurred]
    shown.append(["total", hours_text(_wasted(total.by_state)), hours_text(total.fleet_gpu_hours), *sums, "", ""])
    return ReportTable(
        title=f"Waste of GPUs by {found.by}",
        since_s=found.since_s,
        until_s=found.until_s,
        value=_value(found, rows),
        columns=columns,
        rows=shown if rows else (),
        csv_rows=[
            [found.by, "waste_gpu_hours", "gpu_hours", *WASTE_STATES, "advice", "command"],
            *(
                [
                    *_csv_row(row_name(row), row.gpu_hours, row.by_state),
                    HABITS[_worst(row.by_state)],
                    _command(found.by, row),
                ]
                for row in rows
            ),
            [*_csv_row("total", total.fleet_gpu_hours, total.by_state), "", ""],
        ],
        notes=_notes(found),
        empty="no GPU-hours were wasted" if total.fleet_gpu_us else "no GPU-hours yet",
        next_command="phalanx waste" if found.by == "job" else "phalanx report waste --by job",
    )


def _wasted(by_state: dict[str, float]) -> float:
    return sum(by_state.get(state, 0.0) for state in WASTE_STATES)


def _worst(by_state: dict[str, float]) -> str:
    return max(WASTE_STATES, key=lambda state: by_state.get(state, 0.0))


def _command(by: str, row: UsageRowView) -> str:
    """The command that shows the waste of a row, or its cause."""
    state = _worst(row.by_state)
    if row.merged or not row.key:
        return "" if row.merged else f"phalanx waste --state {state}" if state in ("broken", "fragmented") else ""
    match by:
        case "job" if state == "hung":
            return f"phalanx logs {row.key} --stacks"
        case "job":
            return f"phalanx usage {row.key}"
        case "gpu":
            return ""
        case _:
            return f"phalanx waste --{by} {row.key}"


def _value(found: UsageReportView, rows: list[UsageRowView]) -> dict[str, object]:
    """What `--json` prints. Amounts that end in `_us` are integers in GPU-microseconds."""
    total = found.total
    return {
        "by": found.by,
        "since_s": found.since_s,
        "until_s": found.until_s,
        "rows": [
            {
                "key": row.key,
                "merged": row.merged,
                "gpu_hours": row.gpu_hours,
                **_amounts(row.by_state, row.by_state_us),
                "advice": HABITS[_worst(row.by_state)],
                "command": _command(found.by, row),
            }
            for row in rows
        ],
        "total": {"fleet_gpu_hours": total.fleet_gpu_hours, **_amounts(total.by_state, total.by_state_us)},
    }


def _amounts(by_state: dict[str, float], by_state_us: dict[str, int]) -> dict[str, object]:
    return {
        "waste_gpu_hours": _wasted(by_state),
        "waste_gpu_us": sum(by_state_us.get(state, 0) for state in WASTE_STATES),
        "by_state": {state: by_state[state] for state in WASTE_STATES if by_state.get(state)},
    }


def _csv_row(name: str, hours: float, by_state: dict[str, float]) -> list[str]:
    return [
        name,
        *(f"{one:.9f}" for one in (_wasted(by_state), hours, *(by_state.get(each, 0.0) for each in WASTE_STATES))),
    ]


def _notes(found: UsageReportView) -> tuple[str, ...]:
    partly = sum(found.total.by_state.get(state, 0.0) for state in _PARTLY)
    if not partly:
        return ()
    return (
        f"{hours_text(partly)} GPU-hours of this were low, data-bound or communicating: some work was done in them",
    )
