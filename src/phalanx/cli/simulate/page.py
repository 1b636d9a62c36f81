"""The report of a simulation as one self-contained HTML page, in the reader's light or dark theme. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from phalanx.cli.simulate.charts import charts
from phalanx.cli.simulate.figures import Run
from phalanx.cli.simulate.rows import ROWS
from phalanx.cli.simulate.svg import svg

_CHARTS = ("GPU utilisation over time", "jobs waiting over time", "wait by size")


def build_page(runs: Sequence[Run], *, title: str, lead: str, version: str, command: str) -> str:
    """Return the page as HTML."""
    template = Template(files("phalanx.cli.simulate").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        lead=escape(lead),
        table=_table(runs),
        charts="".join(
            f"<section>{svg(shapes, name)}</section>" for shapes, name in zip(charts(runs), _CHARTS, strict=True)
        ),
        footer=f"Phalanx {escape(version)}. Command: <code>{escape(command)}</code>",
    )


def _table(runs: Sequence[Run]) -> str:
    names = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    lines = [f"<tr><th></th>{names}</tr>"]
    for row in ROWS:
        values = [row.value(run.report) for run in runs]
        cells = "".join(
            f"<td{' class=best' if len(runs) > 1 and row.best(values) == value else ''}>{escape(row.shown(value))}</td>"
            for value in values
        )
        lines.append(f"<tr><td>{escape(row.name)}</td>{cells}</tr>")
    return "".join(lines)
