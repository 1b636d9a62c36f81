"""`phalanx report usage`: the GPU-hours of the fleet by state and by project, user, queue, GPU model or job."""

from __future__ import annotations

import csv
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, show_list
from phalanx.cli.option_types import DURATION
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s

if TYPE_CHECKING:
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


@click.group(cls=CommandGroup)
def report() -> None:
    """Report what the GPUs of the fleet were used for."""


@report.command()
@click.option("--by", type=click.Choice(KEYS), default="project", show_default=True, help="What each row stands for.")
@click.option(
    "--since", type=DURATION, metavar="TIME", default="30d", show_default=True, help="Only the last 12h, 7d, 30d."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with the total in the last row.")
def usage(by: str, since: str, as_json: bool, as_csv: bool) -> None:
    r"""GPU-hours by state. The states of all rows add up to the GPUs of the fleet times the time, free and broken ones included.

    The report begins with the full hour. docs/usage-states.md explains each state.

    \b
    phalanx report usage --by user --since 7d
    phalanx report usage --by job --since 24h --json
    """
    if as_json and as_csv:
        raise BadRequest("--json and --csv are two formats", hint="give one of them")
    found = connect().usage_report(by=by, since_s=max(0.0, time.time() - parse_duration_s(since)))
    if as_csv:
        _print_csv(found)
        return
    show_list(
        lambda: ListView(
            value=found,
            lines=lambda screen: _lines(found, screen),
            notes=_notes(found),
            next_command="" if by == "job" else "phalanx report usage --by job",
        ),
        as_json=as_json,
        watch=False,
    )


def _lines(found: UsageReportView, screen: Terminal) -> list[str]:
    if not found.total.fleet_gpu_us:
        return ["no GPU-hours yet"]
    occurred = [state for state in _TITLES if found.total.by_state_us.get(state)]
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="GPU-HOURS", right=True),
        *(Column(title=title, right=True, drop_order=order) for title, order in map(_TITLES.__getitem__, occurred)),
    )
    rows: list[list[Cell | str]] = [
        [Cell(_name(row), "bold"), _hours(row.gpu_hours), *(_hours(row.by_state.get(state, 0.0)) for state in occurred)]
        for row in found.rows
    ]
    total = found.total
    rows.append(["total", _hours(total.fleet_gpu_hours), *(_hours(total.by_state[state]) for state in occurred)])
    return table(columns, rows, screen)


def _notes(found: UsageReportView) -> tuple[str, ...]:
    by_note = found.total.by_note
    unknown = by_note.get("computing", {}).get("progress unknown", 0.0)
    unobserved = sum(notes.get("unobserved", 0.0) for notes in by_note.values())
    waits = by_note.get("free_demand", {})
    lines = []
    if unknown:
        lines.append(
            f"{_hours(unknown)} GPU-hours of computing are of jobs that report no steps: their progress is unknown"
        )
    if unobserved:
        lines.append(f"{_hours(unobserved)} GPU-hours were not observed: no samples came, or no head ran")
    if waits:
        named = ", ".join(f"{why} {_hours(hours)}" for why, hours in sorted(waits.items(), key=lambda one: -one[1]))
        lines.append(f"free although a job waited, by its reason: {named}")
    return tuple(lines)


def _name(row: UsageRowView) -> str:
    return f"{row.merged} more" if row.merged else row.key or NO_JOB


def _hours(hours: float) -> str:
    """Hours with as many digits as matter; empty for none."""
    if not hours:
        return ""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 10 else f"{hours:.3f}"


def _print_csv(found: UsageReportView) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([found.by, "gpu_hours", *_TITLES])
    for row in found.rows:
        hours = [row.gpu_hours, *(row.by_state.get(state, 0.0) for state in _TITLES)]
        writer.writerow([strip_control(_name(row)), *(f"{one:.9f}" for one in hours)])
    hours = [found.total.fleet_gpu_hours, *(found.total.by_state[state] for state in _TITLES)]
    writer.writerow(["total", *(f"{one:.9f}" for one in hours)])
