"""`submit --dry-run`, `run --dry-run`: prints what would happen to a job now. Nothing is written, no files are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.jobs.why import blocker_lines, format_time_range, suggestion_lines, with_commands
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.core.units import format_duration
from phalanx.wire.why import DryRunReply

if TYPE_CHECKING:
    from phalanx.cli.jobs.request.job_request import JobRequest
    from phalanx.client import Client


def show_dry_run(head: Client, wanted: JobRequest, *, as_json: bool) -> None:
    """Request and print the forecast.

    Raises:
        PhalanxError: the head would reject the job.
    """
    found = with_commands(head.dry_run(wanted.mapping))
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json(found, indent=2))
        return
    print("\n".join(dry_run_page(found, wanted.spec.name, terminal())))


def dry_run_page(found: DryRunReply, name: str, screen: Terminal) -> list[str]:
    """Return the lines of the forecast."""
    many = f"{found.jobs} jobs, each: " if found.jobs > 1 else ""
    lines = [
        f"{screen.paint('dry run', 'bold')} {strip_control(name)}: nothing was submitted",
        f"  {many}{'; '.join(map(strip_control, found.notes))}",
        *(f"  warning: {strip_control(line)}" for line in found.warnings),
    ]
    if found.starts:
        lines.append(
            f"  would start {'' if found.start is None else format_time_range(found.start, found.now_s)} on {', '.join(found.nodes)}"
        )
    else:
        lines.append(strip_control(f"  would wait ({found.reason.replace('_', ' ')}): {found.detail}"))
        if found.start is not None:
            why = f": {found.start.unknown}" if found.start.unknown else ""
            lines.append(strip_control(f"  expected to start {format_time_range(found.start, found.now_s)}{why}"))
    lines.append(f"  {_usage(found)}")
    lines += blocker_lines(found.blockers, found.blockers_more, found.now_s, screen)
    return lines + suggestion_lines(found.changes, screen)


def _usage(found: DryRunReply) -> str:
    run = found.run
    if run is None or (run.high_s is None and not run.ends):
        return "GPU-hours unknown: no time limit, and no similar job has finished yet"
    if not run.ends and run.high_s is not None and found.gpu_hours_high is not None:
        return f"runs at most {format_duration(run.high_s)}, {_hours(found.gpu_hours_high)} GPU-hours (its time limit)"
    basis = f"estimated from {run.ends} finished jobs {strip_control(run.likes)}"
    if run.high_s is None or found.gpu_hours_high is None:
        return f"GPU-hours unknown: no time limit, and only {run.ends} finished jobs {strip_control(run.likes)}"
    hours = f"{_hours(found.gpu_hours_low or 0.0)} to {_hours(found.gpu_hours_high)} GPU-hours"
    return f"runs {format_duration(run.low_s)} to {format_duration(run.high_s)}, {hours}, {basis}"


def _hours(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"
