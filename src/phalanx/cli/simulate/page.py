"""The report of a simulation as one self-contained HTML page, in the reader's light or dark theme. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from phalanx.cli.simulate.chart_data import PolicyRun
from phalanx.cli.simulate.charts import draw_charts
from phalanx.cli.simulate.report_rows import REPORT_ROWS
from phalanx.cli.simulate.svg import render_svg

_CHARTS = ("GPU utilisation over time", "jobs waiting over time", "wait by size")


def build_page(runs: Sequence[PolicyRun], *, title: str, lead: str, version: str, command: str) -> str:
    """Return the page as HTML."""
    template = Template(files("phalanx.cli.simulate").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        lead=escape(lead),
        table=_table(runs),
        charts="".join(
            f"<section>{render_svg(shapes, name)}</section>"
            for shapes, name in zip(draw_charts(runs), _CHARTS, strict=True)
        ),
        footer=f"Phalanx {escape(version)}. Command: <code>{escape(command)}</code>",
    )


def _table(runs: Sequence[PolicyRun]) -> str:
    names = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    lines = [f"<tr><th></th>{names}</tr>"]
    for row in REPORT_ROWS:
        values = [row.value(run.report) for run in runs]
        cells = "".join(
            f"<td{' class=best' if len(runs) > 1 and row.best(values) == value else ''}>{escape(row.format(value))}</td>"
            for value in values
        )
        lines.append(f"<tr><td>{escape(row.name)}</td>{cells}</tr>")
    return "".join(lines)
