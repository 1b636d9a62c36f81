"""The live view: render a scene as lines of the terminal's width. Pure, so that golden files can check it.

From 110 columns on it has two columns: training on the left; nodes, recovery time and events on the right.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from phalanx.cli.cells import block_bar
from phalanx.cli.demo.recovery_time import OTHER_SYSTEMS, latest_job_kill
from phalanx.cli.demo.state import DemoState
from phalanx.cli.terminal_chart import AxisLimits, ChartBar, ChartMarker, ChartSeries, bar_chart, line_chart
from phalanx.core.fleet.node import NodeState
from phalanx.core.work.states import JobState
from phalanx.wire.api.nodes import DeviceView, NodeView

_TWO_COLUMNS_FROM: Final = 110
_GAP: Final = 3
_TIME_COLUMNS: Final = 9
_CHART_ROWS_MIN: Final = 6
_DEVICE_COLUMNS_MIN: Final = 12
_BAR_AND_FIGURE_COLUMNS: Final = 7
_STATE_STYLES: Final = {
    JobState.PENDING: "bold yellow",
    JobState.RUNNING: "bold green",
    JobState.SUCCEEDED: "bold blue",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "bold red",
    JobState.TIMEOUT: "bold red",
}
FIRST_COLOUR, LOST_COLOUR, AGAIN_COLOUR, KILL_COLOUR = "cyan", "red", "bright_yellow", "red"
_EVENT_STYLES: Final = {
    "node_lost": "bold red",
    "task_failed": "red",
    "refused": "red",
    "overdue": "red",
    "froze": "red",
    "failed": "bold red",
    "checkpoint": "green",
    "restart": "yellow",
    "running": "bold",
    "succeeded": "bold blue",
}


def render(scene: DemoState, *, width: int, height: int) -> list[Text]:
    """Return exactly `height` lines of at most `width` columns."""
    room = height - 3  # header, a blank line, footer
    body = _two_columns(scene, width, room) if width >= _TWO_COLUMNS_FROM else _one_column(scene, width, room)
    body = body[:room] + [Text("")] * (room - len(body))
    return [truncate(line, width) for line in (_header(scene, width), Text(""), *body, _footer(scene, width))]


def _two_columns(scene: DemoState, width: int, room: int) -> list[Text]:
    left_width = (width - _GAP) * 55 // 100
    right_width = width - _GAP - left_width
    left = _job(scene, left_width)
    left += _section(
        "loss", loss_chart_lines(scene, left_width, max(_CHART_ROWS_MIN, room - len(left) - 1)), left_width
    )
    right = _fleet_and_recovery(scene, right_width)
    right += _section("events", _events(scene, right_width, max(1, room - len(right) - 1)), right_width)
    return _side_by_side(left, right, left_width)


def _one_column(scene: DemoState, width: int, room: int) -> list[Text]:
    """Give the chart the rows that the events leave; omit it on a terminal that is too low."""
    job, fixed = _job(scene, width), _fleet_and_recovery(scene, width)
    free = room - len(job) - len(fixed)
    history_rows = max(2, min(6, free - 2 - _CHART_ROWS_MIN))
    chart_rows = free - history_rows - 2
    chart = _section("loss", loss_chart_lines(scene, width, chart_rows), width) if chart_rows >= _CHART_ROWS_MIN else []
    return [*job, *chart, *fixed, *_section("events", _events(scene, width, history_rows), width)]


def _fleet_and_recovery(scene: DemoState, width: int) -> list[Text]:
    watch = _section("time from node failure to the next step", recovery_bars(scene, width), width)
    return [*_section("nodes", _fleet(scene, width), width), *watch]


def _section(title: str, lines: list[Text], width: int) -> list[Text]:
    return [
        Text().append("── ", "dim").append(title, "bold").append(" " + "─" * max(0, width - 4 - len(title)), "dim"),
        *lines,
    ]


def _side_by_side(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    rows = []
    for i in range(max(len(left), len(right))):
        row = truncate(left[i], left_width) if i < len(left) else Text("")
        row = row + Text(" " * (left_width - row.cell_len + _GAP))
        rows.append(row + right[i] if i < len(right) else row)
    return rows


def truncate(line: Text, width: int) -> Text:
    """Return a copy of the line cut to `width` columns."""
    copy = line.copy()
    copy.truncate(width, overflow="ellipsis")
    return copy


# ---- parts ------------------------------------------------------------------------------------------------------------


def _header(scene: DemoState, width: int) -> Text:
    clock = f"{int(scene.elapsed_s) // 60:02d}:{int(scene.elapsed_s) % 60:02d}"
    text = (
        Text()
        .append(" PHALANX ", "bold reverse")
        .append("  " + scene.fleet, "bold")
        .append("  " + scene.activity, "dim")
    )
    text = truncate(text, width - len(clock) - 2)
    return text.append(" " * max(1, width - text.cell_len - len(clock) - 1)).append(clock, "bold")


def _footer(scene: DemoState, width: int) -> Text:
    if scene.prompt:
        return Text(" " + scene.prompt, "bold yellow")
    if not scene.has_keyboard:
        return Text(" Ctrl-C stops the demo", "dim")
    text = Text(" ").append("k", "bold").append(" kill a node   ", "dim").append("q", "bold").append(" quit", "dim")
    return truncate(text, width)


def _job(scene: DemoState, width: int) -> list[Text]:
    job = scene.job
    if job is None:
        return [Text(" " + (scene.activity or "starting the cluster"), "dim"), Text("")]
    first = Text().append(f" {job.name}  ", "bold").append(job.state.value.upper(), _STATE_STYLES[job.state])
    if job.epoch:
        first.append(f"  attempt {job.epoch}", "bold" if job.epoch > 1 else "")
    first.append(f"  {job.shape} on {' and '.join(job.nodes)}" if job.nodes else "")
    if job.resume_step and job.epoch > 1:
        first.append(f"  from step {job.resume_step}", "yellow")
    if job.state is JobState.PENDING and job.detail:
        first.append(f"  {job.detail}", "yellow")
    return [truncate(first, width), _progress(scene, width)]


def _progress(scene: DemoState, width: int) -> Text:
    progress = scene.progress
    words = [f"loss {progress.loss:.3f}"] if progress is not None and progress.loss is not None else []
    words += [f"{rate(progress.tokens_per_s)} tokens/s"] if progress is not None and progress.tokens_per_s else []
    if scene.published_step is not None:
        words.append(
            f"checkpoint {scene.published_step}" + (" (saving)" if progress is not None and progress.saving else "")
        )
    tail = "  " + "   ".join(words) if words else ""
    head = f" step {scene.step:>{len(str(scene.steps_total))}}/{scene.steps_total} "
    columns = max(8, width - len(head) - len(tail) - 1)
    done = min(columns, round(columns * scene.step / max(1, scene.steps_total)))
    return Text(head).append("━" * done, "green").append("─" * (columns - done), "dim").append(tail, "bold")


def loss_chart_lines(scene: DemoState, width: int, rows: int, *, blocks: bool = True) -> list[Text]:
    """Chart the loss so far, with repeated steps on top of their first losses."""
    kept, lost = scene.curve.kept_and_lost()
    redone = scene.curve.repeated_steps()
    if not kept and not lost:
        return [Text(" no step yet", "dim"), *[Text("")] * (rows - 1)]
    losses = [point.loss for point in (*kept, *lost) if math.isfinite(point.loss)] or [0.0]
    limits = AxisLimits(
        x_low=1, x_high=max(2, scene.steps_total), y_low=min(losses), y_high=max(*losses, min(losses) + 0.01)
    )
    series = [
        ChartSeries(points=kept, colour=FIRST_COLOUR),
        ChartSeries(points=[(each.step, each.first) for each in redone] or lost, colour=LOST_COLOUR),
        ChartSeries(points=[(each.step, each.second) for each in redone], colour=AGAIN_COLOUR),
    ]
    marks = [
        ChartMarker(x=kill.step, colour=KILL_COLOUR, label=f"{kill.node} killed")
        for kill in scene.kills
        if kill.held and kill.step
    ]
    return line_chart(series, limits, width=width, height=rows, marks=marks, blocks=blocks)


def _fleet(scene: DemoState, width: int) -> list[Text]:
    lines: list[Text] = []
    for node in scene.nodes:
        lines += _node(scene, node, width)
    return lines or [Text(" no node has registered yet", "dim")]


def _node(scene: DemoState, node: NodeView, width: int) -> list[Text]:
    name = Text().append(f" {node.id:<4} ", "bold")
    if node.state is not NodeState.UP:
        killed = any(kill.node == node.id for kill in scene.kills)
        return [name.append("DOWN", "bold red").append(f"  {'killed' if killed else node.down_cause}", "red")]
    name.append("up   ", "green")
    indent = name.cell_len
    per_line = max(1, min(4, (width - indent) // _DEVICE_COLUMNS_MIN))
    cell_width = (width - indent) // per_line
    lines = []
    for start in range(0, max(1, len(node.devices)), per_line):
        line = name if start == 0 else Text(" " * indent)
        for device in node.devices[start : start + per_line]:
            line.append_text(_device(device, cell_width))
        lines.append(line)
    return lines


def _device(device: DeviceView, width: int) -> Text:
    """Show one device: index, ranks, and a utilisation bar."""
    if device.job_id is None:
        return _pad(Text().append(f"{device.index} ", "dim").append("free", "dim"), width)
    ranks = "r" + "+".join(map(str, device.ranks)) if device.ranks else f"#{device.job_id}"
    text = Text().append(f"{device.index} ", "dim").append(f"{ranks:<3} ", "cyan")
    columns = width - text.cell_len - 1
    if device.utilization is None:
        return _pad(text.append("…", "dim"), width)
    if columns < _BAR_AND_FIGURE_COLUMNS:
        return _pad(text.append(block_bar(device.utilization, columns), "green"), width)
    text.append(block_bar(device.utilization, columns - 4), "green")
    return _pad(text.append(f"{100 * device.utilization:4.0f}"), width)


def _pad(text: Text, width: int) -> Text:
    text.truncate(width - 1)
    return text.append(" " * (width - text.cell_len))


def recovery_bars(scene: DemoState, width: int, *, blocks: bool = True) -> list[Text]:
    """Draw the time from the last kill to the next step beside the defaults of other systems."""
    kill = latest_job_kill(scene.kills)
    if kill is None:
        own = ChartBar(name="Phalanx", value=0.0, colour="white", text="no node was killed yet")
    else:
        seconds = kill.recovery_s(scene.now_s)
        running = "" if kill.to_running_s is None else f", all ranks up after {kill.to_running_s:.1f} s"
        colour = "bright_yellow" if kill.recovering else "bright_green"
        own = ChartBar(name="Phalanx", value=seconds, colour=colour, text=f"{seconds:.1f} s{running}")
    others = [
        ChartBar(name=peer.name, value=peer.seconds, colour="magenta", text=f"{peer.seconds:.0f} s")
        for peer in OTHER_SYSTEMS
    ]
    return bar_chart([own, *others], width=width, blocks=blocks)


def _events(scene: DemoState, width: int, rows: int) -> list[Text]:
    """Return the newest events that fit, wrapped beside their time."""
    lines: list[Text] = []
    for line in scene.history[-rows:]:
        style = _EVENT_STYLES.get(line.kind, "")
        pieces = textwrap.wrap(plain_text(line.text), max(20, width - _TIME_COLUMNS)) or [""]
        when = f" {line.at_s - scene.started_s:5.1f} s ".ljust(_TIME_COLUMNS)
        lines.append(Text().append(when, "dim").append(pieces[0], style))
        lines += [Text(" " * _TIME_COLUMNS).append(piece, style) for piece in pieces[1:]]
    return lines[-rows:] + [Text("")] * (rows - len(lines))


def plain_text(text: str) -> str:
    """Replace control characters by spaces."""
    return "".join(char if char.isprintable() else " " for char in text)


def rate(per_s: float | None) -> str:
    """Format a rate as `950`, `12.1k` or `3.4M`."""
    if per_s is None:
        return "?"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if per_s >= size:
            return f"{per_s / size:.1f}{unit}"
    return f"{per_s:.0f}"
