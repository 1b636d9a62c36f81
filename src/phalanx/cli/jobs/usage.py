"""`phalanx usage`: what one job held, what it did with it, and advice for its next run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.units import format_bytes, format_duration
from phalanx.web.command_hints import option_text
from phalanx.wire.api.usage import JobUsageView, MeasuredUseView

if TYPE_CHECKING:
    from phalanx.core.accounting.advice.evidence import Advice

SHORT_ADVICE: Final = 2  # lines, where advice is not what was asked for
_LABEL_WIDTH: Final = 12


@click.command(name="usage")
@JOB_ARGUMENT
@list_options
def usage(job: str, as_json: bool, watch: bool) -> None:
    """Show what a job held and used, and what to ask for next time.

    GPU-hours by state, GPUs, CPUs and memory used against requested, time against its limit, goodput and checkpoints.

    phalanx usage 17
    """
    head = connect()
    job_id = resolve_job(head, job)

    def fetch() -> ListView:
        found = head.job_usage(job_id)
        return ListView(value=found, lines=lambda screen: usage_page(found, screen))

    show_list(fetch, as_json=as_json, watch=watch)


def usage_page(found: JobUsageView, screen: Terminal) -> list[str]:
    """Return the lines of the page."""
    summary = found.summary
    title = f"{screen.paint(f'job {summary.job_id}', 'bold')} {strip_control(summary.name)}: {summary.state}"
    rows = [
        ("held", _held(found)),
        ("states", _hours(found.by_state)),
        ("progress", _progress(found)),
        *(_measured(found, found.measured) if found.measured is not None else ()),
        ("energy", _energy(found)),
        ("time", _time(found)),
        ("checkpoints", _checkpoints(found)),
    ]
    lines = [title, *(f"  {name:<{_LABEL_WIDTH}}{text}" for name, text in rows if text)]
    lines += ["", screen.paint("advice", "bold"), *(f"  {line}" for line in _advice(found, screen))]
    return lines


def advice_lines(advice: Sequence[Advice], *, most: int | None = None) -> list[str]:
    """Return one line for each piece of advice. The option comes first: a narrow screen cuts the end."""
    return [strip_control(f"{option_text(one)}: {one.change}. {one.measured}.") for one in advice[:most]]


def _advice(found: JobUsageView, screen: Terminal) -> list[str]:
    if not found.advice:
        return [found.no_advice or "nothing to change"]
    lines = []
    for one in found.advice:
        saved = f" (saves {_number(one.gpu_hours)} GPU-hours)" if one.gpu_hours >= 0.01 else ""
        lines += [
            strip_control(f"{one.measured}."),
            f"    {one.change}{saved}: {screen.paint(option_text(one), 'bold')}",
        ]
    return lines


def _held(found: JobUsageView) -> str:
    attempts = found.summary.attempts
    if not attempts:
        return "nothing yet"
    nodes = len({share.node for share in attempts[-1].nodes})
    tries = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    where = f"on {cells.count(nodes, 'node')}"
    if not attempts[-1].gpus:
        return f"CPUs {where}{tries}"
    virtual = " of virtual devices" if found.summary.virtual else ""
    return f"{_number(found.gpu_hours)} GPU-hours{virtual} {where}, requested {found.gpus}{tries}"


def _hours(by_state: dict[str, float]) -> str:
    ordered = sorted(by_state.items(), key=lambda item: -item[1])
    return ", ".join(f"{state.replace('_', ' ')} {_number(hours)}" for state, hours in ordered)


def _progress(found: JobUsageView) -> str:
    summary = found.summary
    if not summary.attempts:
        return ""
    if summary.goodput is None:
        return "unknown: it reports no steps"
    lost = f", {summary.steps_lost} lost" if summary.steps_lost else ""
    return f"goodput {cells.percent(summary.goodput)}: {cells.count(summary.steps_kept, 'step')} kept{lost}"


def _measured(found: JobUsageView, use: MeasuredUseView) -> list[tuple[str, str]]:
    """The rows of what the longest attempt used."""
    rows = []
    devices = [device for device in use.devices if device.mean is not None]
    if use.mean is not None and devices:
        least, most = min(device.mean or 0.0 for device in devices), max(device.peak for device in devices)
        spread = f", the least used {cells.percent(least)}" if len(devices) > 1 else ""
        mean = f"{cells.percent(use.mean)} used on average{spread}, {cells.percent(most)} at most"
        rows.append(("GPUs", f"{use.device_count}, {mean} ({use.counter})"))
    memory = [device for device in use.devices if device.memory_peak_bytes is not None]
    if memory:
        peak = max(memory, key=lambda device: device.memory_peak_bytes or 0)
        rows.append(
            ("GPU memory", f"{format_bytes(peak.memory_peak_bytes or 0)} of {format_bytes(peak.memory_bytes)} at most")
        )
    busy = [node.busy_cpus for node in use.nodes if node.busy_cpus is not None]
    if busy:
        asked = f" of {found.cpus} requested" if found.cpus else ", none requested"
        rows.append(("CPUs", f"{sum(busy) / len(busy):.2f} busy on average{asked}{_each(use)}"))
    if use.nodes:
        asked = f" of {format_bytes(found.memory_bytes)} requested" if found.memory_bytes else ", none requested"
        used = format_bytes(max(node.memory_peak_bytes for node in use.nodes))
        rows.append(("memory", f"{used} at most{asked}{_each(use)}"))
    return rows


def _each(use: MeasuredUseView) -> str:
    return ", on each node" if len(use.nodes) > 1 else ""


def _energy(found: JobUsageView) -> str:
    if found.energy_kwh is None:
        return ""
    part = "" if found.energy_share > 0.99 else f", counted in {cells.percent(found.energy_share)} of the time"
    return f"{_number(found.energy_kwh)} kWh{part}"


def _time(found: JobUsageView) -> str:
    attempts = found.summary.attempts
    if not attempts:
        return ""
    ran = "" if found.measured is None else f"ran {format_duration(found.measured.run_s)}"
    if found.time_limit_s is None:
        limit = ", no limit" if ran else "no limit"
    else:
        limit = f"{' of ' if ran else ''}a limit of {format_duration(found.time_limit_s)}"
    return f"{ran}{limit}, {format_duration(found.summary.queued_s)} waiting"


def _checkpoints(found: JobUsageView) -> str:
    saved = found.summary.checkpoints
    if not saved:
        return ""
    stalled, largest = sum(one.stall_s for one in saved), max(one.bytes for one in saved)
    seconds = found.summary.gpu_seconds
    share = f" ({cells.percent(seconds.saving / seconds.total)} of its GPU time)" if seconds.total else ""
    return f"{len(saved)} of {format_bytes(largest)} at most, training stalled {format_duration(stalled)}{share}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
