"""`phalanx waste`: who wastes GPUs now, since when, how much so far, and the command that mends it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click
import msgspec

from phalanx.cli import cells
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.hints import parse_hint
from phalanx.core.units import format_duration
from phalanx.core.work.usage.waste_terms import WasteKind
from phalanx.web.command_hints import render_hint

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.waste import WasteRowView, WasteView

_COLUMNS: Final = (
    Column(title="JOB", hide_empty=True),
    Column(title="NAME", min_width=6, hide_empty=True, drop_order=4),
    Column(title="USER", min_width=4, hide_empty=True, drop_order=3),
    Column(title="PROJECT", min_width=4, hide_empty=True, drop_order=5),
    Column(title="QUEUE", min_width=4, hide_empty=True, drop_order=6),
    Column(title="NODES", min_width=4, drop_order=2),
    Column(title="GPUS", right=True),
    Column(title="STATE"),
    Column(title="FOR", right=True),
    Column(title="GPU-HOURS", right=True, drop_order=1),
    Column(title="TO MEND IT", min_width=16),
)


@click.command()
@click.option("-a", "--all", "early", is_flag=True, help="Include what is below the threshold of an alarm.")
@click.option("-u", "--user", metavar="USER", help="Only jobs of this user.")
@click.option("-p", "--project", metavar="PROJECT", help="Only jobs of this project.")
@click.option("-q", "--queue", metavar="QUEUE", help="Only jobs of this queue.")
@click.option(
    "-s", "--state", "kind", type=click.Choice([kind.value for kind in WasteKind]), help="Only this kind of waste."
)
@list_options
def waste(early: bool, as_json: bool, watch: bool, **only: str | None) -> None:
    """List who wastes GPUs now: jobs that hold GPUs without using them well, and nodes whose GPUs cannot be used.

    docs/waste.md explains each state and its threshold, which a queue can set. `phalanx report waste` adds up past waste.

    \b
    phalanx waste --project vision
    phalanx waste --state idle --json
    """  # noqa: D301 - click reads the backspace character itself
    head = connect()
    filters = {key: value for key, value in only.items() if value is not None}
    show_list(lambda: _shown(head, early=early, filters=filters), as_json=as_json, watch=watch)


def _shown(head: Client, *, early: bool, filters: dict[str, str]) -> ListView:
    found = with_commands(head.waste(early=early, only=filters))
    now_s = time.time()
    return ListView(
        value=found,
        lines=lambda screen: waste_lines(found, screen, now_s, early=early),
        notes=_notes(found),
        next_command="phalanx report waste" if found.rows else "",
    )


def with_commands(found: WasteView) -> WasteView:
    """Return the list with the command of each row."""
    rows = [
        msgspec.structs.replace(row, command=render_hint(parse_hint(row.hint, row.hint_code, row.hint_args)))
        for row in found.rows
    ]
    return msgspec.structs.replace(found, rows=rows)


def waste_lines(found: WasteView, screen: Terminal, now_s: float, *, early: bool) -> list[str]:
    """Return the table."""
    if not found.at_s:
        return ["the head has not looked for waste yet: it starts"]
    if not found.rows:
        return ["no GPUs are wasted now" if early else "no GPUs are wasted now for long enough to be an alarm"]
    return table(_COLUMNS, [_row(row, now_s) for row in found.rows], screen)


def _row(row: WasteRowView, now_s: float) -> list[Cell | str]:
    more = f" and {row.nodes_more} more" if row.nodes_more else ""
    part = f" of {row.gpus_held:g}" if row.gpus < row.gpus_held else ""
    return [
        Cell(row.job, "bold"),
        row.name,
        row.user,
        row.project,
        row.queue,
        ", ".join(row.nodes) + more,
        f"{row.gpus:g}{part}",
        Cell(row.kind, "red" if row.alarm else "yellow"),
        format_duration(max(0.0, now_s - row.since_s)),
        cells.hours(row.gpu_hours),
        row.command,
    ]


def _notes(found: WasteView) -> tuple[str, ...]:
    if not found.rows:
        return ()
    reasons = dict.fromkeys(f"{row.kind}: {row.advice}" for row in found.rows)
    total = f"{found.gpus:g} GPUs now, {cells.hours(found.gpu_hours) or 0} GPU-hours so far"
    more = f"; {found.left_off} rows are not listed" if found.left_off else ""
    return (*map(strip_control, list(reasons)[:_REASONS_MAX]), total + more)


_REASONS_MAX: Final = 5  # explained below the table; --json has all
