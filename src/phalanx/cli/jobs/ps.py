"""`phalanx ps`: lists jobs with their progress, and why they wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli import cells
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import BadRequest
from phalanx.core.units import format_duration
from phalanx.core.work.array import parse_array
from phalanx.core.work.exit_code import code_beside
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.wire.api.jobs import JobView, staging_text

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.services import ServiceView

_LIMIT: Final = 100  # jobs on a page
_RECENT_S: Final = 600.0  # ended jobs stay in the short list for this long
_RECENT_MAX: Final = 5  # rows of ended jobs in the short list
_RECENT_READ_MAX: Final = 1000  # the head's limit for a page
_NUMBERS_MAX: Final = 24  # characters of element numbers in one line
_REASONS_MAX: Final = 3  # printed in full below the table
_STATES: Final = tuple(state.value for state in JobState)


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Include ended jobs.")
@click.option("-s", "--state", "states", multiple=True, metavar="STATE", help=f"Only these: {', '.join(_STATES)}.")
@click.option("-u", "--user", metavar="USER", help="Only jobs of this user.")
@click.option("-p", "--project", metavar="PROJECT", help="Only jobs of this project.")
@click.option("-q", "--queue", metavar="QUEUE", help="Only jobs of this queue.")
@click.option("--name", metavar="NAME", help="Only jobs of this name.")
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Only jobs with this label, and this value of it; repeatable.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 1000),
    default=_LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum number of jobs.",
)
@click.option("-1", "--no-fold", "no_fold", is_flag=True, help="List each element of an array, as --json does.")
@list_options
def ps(
    everything: bool,
    states: tuple[str, ...],
    labels: tuple[str, ...],
    limit: int,
    no_fold: bool,
    as_json: bool,
    watch: bool,
    **only: str | None,
) -> None:
    """List running and waiting jobs, and those that ended last; -a lists all."""
    head = connect()
    for word in states:
        if word not in _STATES:
            hint = suggestion(word, _STATES, f"one of {', '.join(_STATES)}")
            raise BadRequest(f"--state: no state {word!r}", hint=hint)
    filters: dict[str, Any] = {key: value for key, value in only.items() if value is not None}
    filters["fold"] = not (no_fold or as_json)
    filters["label"] = labels
    show_list(
        lambda: _shown(
            head,
            everything=everything,
            states=states,
            limit=limit,
            filters=filters,
            with_services=not (as_json or labels),
        ),
        as_json=as_json,
        watch=watch,
    )


def _shown(
    head: Client, *, everything: bool, states: Sequence[str], limit: int, filters: dict[str, Any], with_services: bool
) -> ListView:
    now_s = time.time()
    extra: tuple[str, ...] = ()
    if everything or states:
        found = head.jobs(state=states, limit=limit, **filters)
        jobs, more = sorted(found.jobs, key=lambda job: job.seq), found.next is not None
    else:
        active = head.jobs(state=["pending", "running"], limit=limit, **filters)
        recent, more_ended = _recently_ended(head, now_s, filters)
        listed = sorted(active.jobs, key=lambda job: job.seq)
        shown = recent[: min(_RECENT_MAX, max(0, limit - len(listed)))]
        jobs, more = [*listed, *shown][:limit], active.next is not None or len(listed) > limit
        extra = _unlisted_note(recent[len(shown) :], more=more_ended)
    services = head.services() if with_services else []
    extra = (*((f"only the newest {limit} jobs; -n lists more",) if more else ()), *extra)
    chosen = bool(states or filters.get("label") or filters.keys() - {"fold", "label"})
    none = "no job matches" if chosen else "no jobs yet" if everything else "no running or waiting jobs"
    return ListView(
        value=jobs,
        lines=lambda screen: [*job_lines(jobs, screen, now_s, none=none), *_service_table(services, screen)],
        next_command="phalanx ps -a" if chosen and not jobs else _next(jobs),
        notes=extra,
    )


def _recently_ended(head: Client, now_s: float, filters: dict[str, Any]) -> tuple[list[JobView], bool]:
    """Return the jobs that ended in the last minutes, and whether there are more: failed ones first, then the newest end first.

    Without replicas that their service replaced: those are no news to its user.
    """
    found = head.jobs(state=_ENDED, ended_since_s=max(0.0, now_s - _RECENT_S), limit=_RECENT_READ_MAX, **filters)
    ended = [job for job in found.jobs if not (job.service and job.cancelled_by)]
    ended.sort(key=lambda job: (job.state not in _UNSUCCESSFUL, -(job.ended_s or 0.0), -job.seq))
    return ended, found.next is not None


def _unlisted_note(jobs: Sequence[JobView], *, more: bool) -> tuple[str, ...]:
    """Return the line that counts recently ended jobs without a row: `12 more ended in the last 10 minutes, 1 failed: phalanx ps -a`."""
    if not jobs:
        return ()
    failed = sum(_size(job) for job in jobs if job.state in _UNSUCCESSFUL)
    failures = f", {failed} failed" if failed else ""
    count = f"{'at least ' if more else ''}{sum(map(_size, jobs))}"
    return (f"{count} more ended in the last {_RECENT_S / 60:.0f} minutes{failures}: phalanx ps -a",)


def _size(job: JobView) -> int:
    """Return the number of jobs in a row: one, or the elements of an array."""
    return len(parse_array(job.elements).indices) if job.elements else 1


_UNSUCCESSFUL: Final = (JobState.FAILED, JobState.TIMEOUT)
_ENDED: Final = [state.value for state in JobState if state.terminal]
_COLUMNS: Final = (
    Column(title="JOB", right=True),
    Column(title="NAME", min_width=10),
    Column(title="STATE"),
    Column(title="GPUS"),
    Column(title="UTIL", hide_empty=True),
    Column(title="STEP", hide_empty=True, drop_order=1),
    Column(title="LOSS", right=True, hide_empty=True, drop_order=2),
    Column(title="TOKENS", right=True, hide_empty=True, drop_order=3),
    Column(title="TIME", right=True),
    Column(title="TRY", right=True, hide_empty=True, drop_order=4),
    Column(title="USER", min_width=4, drop_order=6),
    Column(title="QUEUE", min_width=4, drop_order=7),
    Column(title="WHERE OR WHY", min_width=16),
)


def job_lines(
    jobs: Sequence[JobView], screen: Terminal, now_s: float, *, none: str = "no running or waiting jobs"
) -> list[str]:
    """Return the table of jobs, or `none`. The column QUEUE is shown only if there are several queues."""
    if not jobs:
        return [none]
    several_queues = len({job.queue for job in jobs}) > 1
    columns = [column for column in _COLUMNS if several_queues or column.title != "QUEUE"]
    rows = []
    for job in jobs:
        row = _row(job, screen, now_s)
        rows.append(
            row
            if several_queues
            else [cell for cell, column in zip(row, _COLUMNS, strict=True) if column.title != "QUEUE"]
        )
    lines = table(columns, rows, screen)
    return [*lines, *_truncated_reasons(jobs, lines, now_s)]


def _service_table(services: Sequence[ServiceView], screen: Terminal) -> list[str]:
    if not services:
        return []
    from phalanx.cli.serve.service_page import service_lines

    return ["", *service_lines(services, screen)]


def _truncated_reasons(jobs: Sequence[JobView], lines: Sequence[str], now_s: float) -> list[str]:
    """Return in full the reasons of waiting jobs that are truncated in the table."""
    waiting = [(job, strip_control(waiting_reason(job, now_s))) for job in jobs if job.state is JobState.PENDING]
    cut = [(job, reason) for job, reason in waiting if not any(reason in line for line in lines)]
    reasons = [f"job {_display_id(job)} waits: {reason}" for job, reason in cut[:_REASONS_MAX]]
    more = len(cut) - _REASONS_MAX
    return [*reasons, *([f"and {more} more; see phalanx show JOB"] if more > 0 else [])]


def _row(job: JobView, screen: Terminal, now_s: float) -> list[Cell | str]:
    progress = job.progress
    shape = job.shape.replace(" ", "") if job.gpu_count else "cpu"
    return [
        Cell(_display_id(job), "bold"),
        job.name,
        cells.state_cell(cells.job_state(job)),
        shape or job.gpus,
        ""
        if job.utilization is None or job.state is not JobState.RUNNING
        else f"{cells.bar(job.utilization, 4, screen)} {cells.percent(job.utilization)}",
        "" if progress is None else cells.step(progress.step, progress.steps_total),
        "" if progress is None or progress.loss is None else f"{progress.loss:.3f}",
        "" if progress is None or job.state is not JobState.RUNNING else cells.rate(progress.tokens_per_s),
        _time(job, now_s),
        str(job.attempts) if job.attempts > 1 else "",
        job.user,
        job.queue,
        _where_or_why(job, now_s),
    ]


def _display_id(job: JobView) -> str:
    """Return the id for tables: `17`, `17_3`, `17_[40-99]%8` for waiting elements, `17_[0-4]` for ended ones."""
    if not job.elements:
        return job.id
    at_once = "" if job.array_max is None or job.state.terminal else f"%{job.array_max}"
    numbers = (
        job.elements if len(job.elements) <= _NUMBERS_MAX else job.elements[:_NUMBERS_MAX].rpartition(",")[0] + ",..."
    )
    return f"{job.array_id}_[{numbers}]{at_once}"


def _time(job: JobView, now_s: float) -> str:
    """Return how long the job ran, has been running, or has waited; nothing for several ended elements."""
    if job.elements and job.state.terminal:
        return ""
    begun = job.started_s if job.started_s is not None and job.state is not JobState.PENDING else job.submit_s
    return format_duration(max(0.0, (job.ended_s or now_s) - begun))


def waiting_reason(job: JobView, now_s: float) -> str:
    """Return why the job waits: the reason of the head, or its begin time in local time."""
    if job.reason == WaitReasonCode.BEGIN_TIME and job.begin_s is not None:
        from phalanx.cli.jobs.request.begin_time import format_time

        return f"not before {format_time(job.begin_s, now_s)}"
    if job.reason == WaitReasonCode.STAGING and job.staging:
        return wait_text(job.reason, staging_text(job.staging))
    return wait_text(job.reason, job.detail)


def waste_text(job: JobView, now_s: float) -> str:
    """Return the alarm of a job that wastes GPUs: `2 of 8 GPUs idle for 25m`; of all its GPUs `idle for 25m`."""
    waste = job.waste
    if waste is None:
        return ""
    some = f"{waste.gpus:g} of {job.gpu_count:g} GPUs " if waste.gpus < job.gpu_count else ""
    return f"{some}{waste.kind.replace('_', ' ')} for {format_duration(max(0.0, now_s - waste.since_s))}"


def _where_or_why(job: JobView, now_s: float) -> Cell | str:
    if job.state is JobState.PENDING:
        return Cell(waiting_reason(job, now_s), "red" if job.reason == WaitReasonCode.NEVER else "yellow")
    if job.state is JobState.RUNNING:
        ready = "" if not job.service else " ready" if job.ready else f" {job.sleep or 'not ready'}"
        if job.waste is None:
            return ", ".join(job.nodes) + ready
        return Cell(f"{', '.join(job.nodes)}{ready}, {waste_text(job, now_s)}", "red")
    if job.state is JobState.SUCCEEDED:
        return ""
    why = ": ".join(part for part in (code_beside(job.exit_code, job.detail), job.detail) if part)
    return f"{job.id}: {why}" if job.elements and why else why


def _next(jobs: Sequence[JobView]) -> str:
    """Return the next command: for a running job first, then a waiting, a failed, a succeeded one. Jobs whose output the caller may read come first."""
    newest_first = sorted(jobs, key=lambda job: (bool(job.command), job.seq), reverse=True)
    for state, command in (
        (JobState.RUNNING, "logs -f"),
        (JobState.PENDING, "show"),
        (JobState.FAILED, "logs"),
        (JobState.SUCCEEDED, "show"),
    ):
        match = next((job for job in newest_first if job.state is state), None)
        if match is not None:
            whole = match.elements and state is not JobState.FAILED  # of failed elements the one that the row shows
            return f"phalanx {command if match.command else 'show'} {match.array_id if whole else match.id}"
    return "phalanx run --gpus 1 -- python train.py"
