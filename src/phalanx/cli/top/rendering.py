"""Formats one Overview for `top` as rich text. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.text import Text

from phalanx.cli import cells
from phalanx.cli.jobs.ps import job_lines
from phalanx.cli.terminal import Terminal, strip_control, truncate
from phalanx.cli.top.fleet_grid import count_letters, held_gpus
from phalanx.cli.wait_text import wait_text
from phalanx.core.fleet.node import NodeState
from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.ids import NodeId
from phalanx.core.units import format_duration
from phalanx.core.work.exit_code import code_beside
from phalanx.core.work.states import JobState
from phalanx.wire.api.cell_states import CellState
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import DeviceView, NodeView, OrderedNodeView, node_state

# Textual can draw block characters on every terminal.
SCREEN = Terminal(width=10_000, height=24, interactive=True, colour=False, blocks=True)
_TITLES = ("JOB", "NAME", "STATE", "GPUS", "UTIL", "STEP", "LOSS", "TOKENS", "TIME", "WHERE OR WHY")
_WIDE = {"LOSS": 100, "TOKENS": 110, "UTIL": 70}  # minimum width of the terminal for a column
_ONCE_WIDTH = 1000
_DEVICE_COLUMNS = 14  # width of one device, with its gap
NAME_COLUMNS = 11  # beside the name: a space, the longest state of a node, and a space
ORDERED_NAME_COLUMNS = 15  # the same, with `provisioning`
_STYLE = {
    "pending": "yellow",
    "held": "yellow",
    "running": "green",
    "failed": "red",
    "timeout": "red",
    "cancelled": "dim",
    "succeeded": "blue",
}


def headline(seen: Overview, frame: FleetFrame, width: int) -> Text:
    """Return the summary line; drops less important parts on a narrow terminal."""
    counts = count_letters(frame)
    up = [state for state in frame.states if state != "down"]
    gpus = counts.total() - counts[CellState.DOWN.letter]
    devices = [device for node in seen.nodes for device in node.devices if node.state is NodeState.UP]
    used = [device.utilization for device in devices if device.job_id is not None and device.utilization is not None]
    mean = f", {cells.percent(sum(used) / len(used))} busy" if used and shows_all(seen, frame) else ""
    virtual = " virtual" if devices and all(device.virtual for device in devices) else ""
    running = seen.counts.get(JobState.RUNNING, len(seen.running))
    pending = seen.counts.get(JobState.PENDING, len(seen.pending))
    parts = [
        f"Phalanx {seen.version}",
        f"{len(up)}/{len(frame.nodes)} nodes" + (f", {len(seen.ordered)} ordered" if seen.ordered else ""),
        f"{held_gpus(counts)}/{gpus}{virtual} GPUs held{mean}",
        f"{running} running, {pending} waiting",
        time.strftime("%H:%M:%S", time.localtime(seen.now_s)),
    ]
    for least in (4, 0):  # the clock, then the version
        if len("   ".join(parts)) > width:
            del parts[least]
    return Text("   ".join(parts), style="bold", no_wrap=True)


def shows_all(seen: Overview, frame: FleetFrame) -> bool:
    """Whether the overview has all nodes: it leaves out some of a large fleet."""
    return len(seen.nodes) == len(frame.nodes)


def once_lines(seen: Overview, frame: FleetFrame, screen: Terminal) -> list[str]:
    """Return a snapshot as plain text: the numbers, each node with the letters of its GPUs, and the jobs."""
    counts = count_letters(frame)
    named = {state.letter: state.words for state in CellState}
    running = seen.counts.get(JobState.RUNNING, len(seen.running))
    pending = seen.counts.get(JobState.PENDING, len(seen.pending))
    lines = [
        headline(seen, frame, _ONCE_WIDTH).plain,
        *(
            f"{letter} {number:>6} {named[letter]}"
            for letter, number in sorted(counts.items(), key=lambda pair: -pair[1])
        ),
        "",
    ]
    wide = max(map(len, frame.nodes), default=0)
    for at, name in enumerate(frame.nodes):
        jobs = " ".join(sorted({job for job in frame.jobs[at] if job}))
        lines.append(f"{strip_control(name):<{wide}}  {frame.states[at]:<8}  {frame.cells[at]}  {jobs}".rstrip())
    lines += ["", *job_lines([*seen.running, *seen.pending], screen, seen.now_s)]
    missing = running + pending - len(seen.running) - len(seen.pending)
    if missing > 0:
        lines.append(f"and {missing} more; phalanx ps lists all")
    return lines


def fleet_text(
    nodes: Sequence[NodeView],
    width: int,
    ordered: Sequence[OrderedNodeView] = (),
    now_s: float = 0.0,
    letters: Mapping[NodeId, str] = MappingProxyType({}),
) -> Text:
    """Return every device of every node, as many on a line as fit, then the nodes that pools have ordered.

    `letters`: the states of the GPUs of each node, which are shown behind the index.
    """
    if not nodes and not ordered:
        return Text("no node has joined yet", style="dim")
    wide = NAME_COLUMNS if not ordered else ORDERED_NAME_COLUMNS
    names = [node.id for node in nodes] + [order.id for order in ordered]
    label = max(map(len, names)) + wide
    per_line = max(1, (width - label) // _DEVICE_COLUMNS)
    text = Text(no_wrap=True)
    for node in nodes:
        state = node_state(node)
        head = f"{truncate(strip_control(node.id), label - wide):<{label - wide + 1}}{state:<{wide - 2}}"
        text.append(head, style={"up": "bold", "down": "red"}.get(state, "yellow"))
        if node.state is NodeState.DOWN:
            text.append(strip_control(node.down_cause)[: max(0, width - label)], style="red")
        for place, device in enumerate(node.devices if node.state is NodeState.UP else []):
            if place and place % per_line == 0:
                text.append("\n" + " " * (label - 1))
            text.append_text(_device(device, letters.get(node.id, "")[place : place + 1]))
        text.append("\n")
    for order in ordered:
        state = order.state.value
        head = f"{truncate(strip_control(order.id), label - wide):<{label - wide + 1}}{state:<{wide - 2}}"
        text.append(head, style="red" if order.state is PoolNodeState.DOWN else "yellow")
        facts = f"{cells.count(order.gpus, 'GPU')}, pool {order.pool}, ${order.price_per_h:g}/h, {cells.age(order.requested_s, now_s)}: {order.why}"
        text.append(truncate(strip_control(facts), max(1, width - label)) + "\n", style="dim")
    text.rstrip()
    return text


def _device(device: DeviceView, letter: str) -> Text:
    """Format a device, `3A████▌  87% `: its index, the letter of its state, a bar, and its utilisation or state."""
    index = f"{device.index:>2}{letter or ' '}"
    if not device.healthy:
        return Text(f"{index}broken     ", style="red")
    if device.job_id is None:
        return Text(f"{index}·····      ", style="dim")
    share = device.utilization or 0.0
    colour = "red" if device.throttle else "green" if share >= 0.5 else "yellow" if share >= 0.1 else "dim"
    bar = Text(f"{index}{cells.bar(device.utilization, 5, SCREEN)}", style=colour)
    return bar.append(f"{cells.percent(device.utilization) or '?':>5} ", style="")


def job_titles(width: int) -> list[str]:
    """Return the columns of the job table that fit into `width`."""
    return [title for title in _TITLES if width >= _WIDE.get(title, 0)]


def is_found(job: JobView, wanted: str) -> bool:
    """Whether a job is what the reader searches: a part of its name, user, queue, state or nodes, or its number."""
    return wanted in " ".join((job.id, job.name, job.user, job.queue, job.state, job.detail, *job.nodes))


def job_line(job: JobView) -> str:
    """Describe a job in one line: why it waits, where it runs or how it ended, and its command."""
    match job.state:
        case JobState.PENDING:
            status = f"waits: {wait_text(job.reason, job.detail)}"
        case JobState.RUNNING:
            status = f"runs on {', '.join(job.nodes)}"
        case _:
            named = code_beside(job.exit_code, job.detail)
            code = f" with {named}" if named else ""
            status = f"{job.state}{code}{f': {job.detail}' if job.detail else ''}"
    return strip_control(f"job {job.id} {status}   {job.command}")


def job_row(job: JobView, now_s: float, titles: Sequence[str]) -> list[Text]:
    """Return the cells of one job for the columns in `titles`."""
    state = (
        job.pending_word
        if job.state is JobState.PENDING
        else str(job.attempt_state or job.state)
        if job.state is JobState.RUNNING
        else str(job.state)
    )
    progress = job.progress
    running = job.state is JobState.RUNNING
    step = ""
    if progress is not None:
        step = cells.step(progress.step, progress.steps_total)
        if progress.steps_total:
            step = f"{cells.bar(progress.step / progress.steps_total, 8, SCREEN)} {step}"
    used = ""
    if job.utilization is not None and running:
        used = f"{cells.bar(job.utilization, 5, SCREEN)} {cells.percent(job.utilization)}"
    begun = job.started_s if job.started_s is not None and job.state is not JobState.PENDING else job.submit_s
    waiting = wait_text(job.reason, job.detail) if job.state is JobState.PENDING else job.detail
    where = ", ".join(job.nodes) if running else waiting
    cells_of = [
        Text(job.id, justify="right"),
        Text(truncate(strip_control(job.name), 24)),
        Text(state, style=_STYLE.get(str(job.state), "")),
        Text((job.shape or job.gpus).replace(" ", "") if job.gpu_count else "cpu"),
        Text(used),
        Text(step),
        Text("" if progress is None or progress.loss is None else f"{progress.loss:.3f}"),
        Text("" if progress is None or not running else cells.rate(progress.tokens_per_s)),
        Text(format_duration(max(0.0, (job.ended_s or now_s) - begun))),
        Text(strip_control(where), style="yellow" if job.state is JobState.PENDING else ""),
    ]
    return [cell for cell, title in zip(cells_of, _TITLES, strict=True) if title in titles]
