"""The table of a simulation's page: a row for each figure, a column for each policy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.cli.simulate.chart_data import PolicyRun
from phalanx.cli.simulate.report_rows import report_rows


def report_table(runs: Sequence[PolicyRun]) -> str:
    """Return the rows as HTML."""
    names = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    lines = [f"<tr><th></th>{names}</tr>"]
    for row in report_rows([run.report for run in runs]):
        values = [row.value(run.report) for run in runs]
        cells = "".join(
            f"<td{' class=best' if len(runs) > 1 and row.best(values) == value else ''}>{escape(row.format(value))}</td>"
            for value in values
        )
        lines.append(f"<tr><td>{escape(row.name)}</td>{cells}</tr>")
    return "".join(lines)
