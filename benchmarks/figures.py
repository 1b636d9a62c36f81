"""The figures of a benchmark, and the table that every benchmark prints."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure with its target and the best known result.

    Attributes:
        value: the median of `runs`, in `unit`.
        target: the target in words; `met` compares the median with it.
    """

    name: str
    value: float
    unit: str
    runs: list[float] = field(default_factory=list)
    target: str = ""
    met: bool | None = None
    peer: str = ""
    note: str = ""


def at_most(name: str, runs: Sequence[float], unit: str, bound: float, *, peer: str = "", note: str = "") -> Figure:
    """Return a figure that should not exceed `bound`."""
    middle = statistics.median(runs)
    return Figure(
        name=name,
        value=middle,
        unit=unit,
        runs=list(runs),
        target=f"<= {bound:g} {unit}",
        met=middle <= bound,
        peer=peer,
        note=note,
    )


def at_least(name: str, runs: Sequence[float], unit: str, bound: float, *, peer: str = "", note: str = "") -> Figure:
    """Return a figure that should reach `bound`."""
    middle = statistics.median(runs)
    return Figure(
        name=name,
        value=middle,
        unit=unit,
        runs=list(runs),
        target=f">= {bound:g} {unit}",
        met=middle >= bound,
        peer=peer,
        note=note,
    )


def plain_figure(name: str, runs: Sequence[float], unit: str, *, note: str = "") -> Figure:
    """Return a figure without a target."""
    return Figure(name=name, value=statistics.median(runs), unit=unit, runs=list(runs), note=note)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on stdout")
    parser.add_argument("--runs", type=int, default=None, help="runs per figure; the default depends on the benchmark")
    parser.add_argument("--only", default="", help="comma-separated names of the figures to measure")
    return parser


def print_progress(text: str) -> None:
    """Print progress on stderr, so that stdout has only the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_report(title: str, figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print all figures."""
    if as_json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        record: dict[str, Any] = {
            "title": title,
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine,
            "figures": {figure.name: asdict(figure) for figure in figures},
        }
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("what", "median", "min", "max", "runs", "target", "met", "today's best", "note"):
        table.add_column(column, justify="right" if column in ("median", "min", "max", "runs") else "left")
    for figure in figures:
        runs = figure.runs or [figure.value]
        met = "" if figure.met is None else "yes" if figure.met else "NO"
        table.add_row(
            figure.name,
            f"{figure.value:,.4g} {figure.unit}",
            f"{min(runs):,.4g}",
            f"{max(runs):,.4g}",
            str(len(runs)),
            figure.target,
            met,
            figure.peer,
            figure.note,
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table)
