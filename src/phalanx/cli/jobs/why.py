"""`phalanx why`: explains why a job waits, which jobs block it, its expected start, and how to start it sooner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from phalanx.cli import cells
from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.serve.service_page import why_service_lines
from phalanx.cli.serve.services import find_service
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.hints import parse_hint
from phalanx.core.units import format_duration
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.web.command_hints import render_hint
from phalanx.wire.why import (
    BlockerView,
    DryRunReply,
    StartView,
    SuggestedChangeView,
    WhyReply,
)

if TYPE_CHECKING:
    from phalanx.client import Client

Reply = TypeVar("Reply", WhyReply, DryRunReply)


@click.command(name="why")
@JOB_ARGUMENT
@list_options
def why(job: str, as_json: bool, watch: bool) -> None:
    """Explain why a job waits, which jobs block it, its expected start, and what would start it now; of a service, why it has so many replicas.

    \b
    phalanx why 17
    phalanx why train --watch
    """  # noqa: D301 - click reads the backspace character itself
    head = connect()
    if find_service(head, job) is not None:
        show_list(lambda: _service_shown(head, job), as_json=as_json, watch=watch)
        return
    job_id = resolve_job(head, job)
    show_list(lambda: _shown(head, job_id), as_json=as_json, watch=watch)


def _service_shown(head: Client, name: str) -> ListView:
    found, now_s = head.service(name), time.time()
    waiting = next((job.id for job in found.replicas if job.state is JobState.PENDING), "")
    return ListView(
        value=found,
        lines=lambda screen: why_service_lines(found, screen, now_s),
        next_command=f"phalanx why {waiting}" if waiting else f"phalanx show {name}",
    )


def _shown(head: Client, job_id: str) -> ListView:
    found = with_commands(head.why(job_id))
    return ListView(value=found, lines=lambda screen: why_page(found, screen), next_command=_next(found))


def why_page(found: WhyReply, screen: Terminal) -> list[str]:
    """Return the lines of the explanation."""
    lines = [f"{screen.paint(f'job {found.job_id}', 'bold')} {strip_control(found.headline)}"]
    if found.speeds:
        lines.append(strip_control(f"  {', '.join(found.speeds)}"))
    if not found.reason:
        return lines
    lines += [f"  {line}" for line in start_lines(found.start, found.now_s)]
    lines += blocker_lines(found.blockers, found.blockers_more, found.now_s, screen)
    return lines + suggestion_lines(
        found.changes, screen, title="what would let it start" if found.never else "to start sooner"
    )


def with_commands(found: Reply) -> Reply:
    """Return the reply with the command of each change."""
    changes = [
        msgspec.structs.replace(one, command=render_hint(parse_hint(one.command, one.hint_code, one.hint_args)))
        for one in found.changes
    ]
    return msgspec.structs.replace(found, changes=changes)


def start_lines(start: StartView | None, now_s: float) -> list[str]:
    """Return the expected start, and why it has no upper bound."""
    if start is None:
        return []
    expected = f"expected to start {format_time_range(start, now_s)}"
    if start.latest_s is None and start.unknown:
        return [strip_control(f"{expected}: {start.unknown}")]
    return [f"{expected}, unless jobs submitted later go first"]


def format_time_range(start: StartView, now_s: float) -> str:
    """Format a range of times: `in 20m to 3h05m (14:20 to 17:05)`."""
    early, late = start.earliest_s, start.latest_s
    soon = early is None or early - now_s < 1.0
    if late is None:
        return (
            "at an unknown time"
            if early is None or soon
            else f"not before {_about(early - now_s)} from now; latest time unknown"
        )
    if late - now_s < 1.0:
        return "now"
    if soon:
        return f"within {_about(late - now_s)} ({_clock(late, now_s)} at the latest)"
    assert early is not None
    if _about(early - now_s) == _about(late - now_s):
        return f"in {_about(late - now_s)} ({_clock(late, now_s)})"
    return f"in {_about(early - now_s)} to {_about(late - now_s)} ({_clock(early, now_s)} to {_clock(late, now_s)})"


def blocker_lines(blockers: Sequence[BlockerView], more: int, now_s: float, screen: Terminal) -> list[str]:
    """Return the table of blocking jobs."""
    if not blockers:
        return []
    columns = (
        Column(title="JOB"),
        Column(title="USER"),
        Column(title="NAME", min_width=8),
        Column(title="STATE"),
        Column(title="GPUS", right=True),
        Column(title="SINCE", right=True),
        Column(title="EXPECTED TO END", min_width=12, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            one.id,
            one.user,
            strip_control(one.name),
            cells.state_cell(one.state.value),
            str(one.gpus),
            cells.age(one.since_s, now_s),
            ""
            if one.end is None
            else "unknown"
            if one.end.latest_s is None
            else format_time_range(one.end, now_s).partition(" (")[0],
        ]
        for one in blockers
    ]
    title = screen.paint("blocked by", "bold")
    return [
        "",
        title,
        *(f"  {line}" for line in table(columns, rows, screen)),
        *([f"  and {more} more"] if more else []),
    ]


def suggestion_lines(
    changes: Sequence[SuggestedChangeView], screen: Terminal, *, title: str = "to start sooner"
) -> list[str]:
    """Return the changes that would start the job now, with their commands."""
    if not changes:
        return []
    lines = ["", screen.paint(title, "bold")]
    for one in changes:
        who = " (needs an operator)" if one.operator else ""
        lines.append(strip_control(f"  {one.text}{who}"))
        if one.command:
            lines.append(f"      {strip_control(one.command)}")
    return lines


def _about(seconds: float) -> str:
    """Round a duration to the precision of a forecast."""
    seconds = max(0.0, seconds)
    if seconds < 90.0:
        return "a minute"
    if seconds < 3600.0:
        return f"{round(seconds / 60.0)} min"
    return format_duration(round(seconds / 600.0) * 600.0)


def _clock(at_s: float, now_s: float) -> str:
    """Format local time, with the day if it is more than twelve hours ahead, and the year from half a year on."""
    ahead_s = at_s - now_s
    form = "%H:%M" if ahead_s < 43_200.0 else "%a %d %b %H:%M" if ahead_s < 183 * 86_400.0 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(at_s))


def _next(found: WhyReply) -> str:
    if found.reason == WaitReasonCode.HELD:
        return f"phalanx release {found.job_id}"
    if found.reason == WaitReasonCode.PARKED:
        return f"phalanx resume {found.job_id}"
    if found.reason == WaitReasonCode.NO_NODES:
        return "phalanx nodes"
    if found.changes and found.changes[0].command and "..." not in found.changes[0].command:
        return found.changes[0].command
    return f"phalanx show {found.job_id}"
