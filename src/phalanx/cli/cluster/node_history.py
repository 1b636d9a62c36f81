"""`phalanx nodes history`: how a node or the fleet was, as a chart in the terminal, JSON or CSV."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, show_list
from phalanx.cli.option_types import DURATION
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest
from phalanx.core.units import format_bytes, format_duration, parse_duration_s

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.history import HistoryColumn, NodeHistory

# --metric: names of columns in the answer, and what a value means.
_DEVICE_METRICS: Final = {
    "util": ("utilization",),
    "memory": ("memory_used_bytes",),
    "power": ("power_w",),
    "temperature": ("temperature_c",),
    "throttle": ("throttled",),
}
_NODE_METRICS: Final = {
    "cpu": ("cpu_utilization",),
    "host-memory": ("memory_used_bytes",),
    "network": ("network_received_bytes_per_s", "network_sent_bytes_per_s"),
}
_METRICS: Final = (*_DEVICE_METRICS, *_NODE_METRICS)
_TITLES: Final = {
    "utilization": "utilization",
    "memory_used_bytes": "memory in use",
    "power_w": "power",
    "temperature_c": "temperature",
    "throttled": "time with lowered clocks",
    "cpu_utilization": "CPU utilization",
    "network_received_bytes_per_s": "network, received",
    "network_sent_bytes_per_s": "network, sent",
}
_COLOURS: Final = ("green", "cyan", "yellow", "magenta")
_CHART_ROWS: Final = 14
_CHART_COLUMNS_MAX: Final = 120
_DEVICES_SHOWN: Final = 72


@click.command(name="history")
@click.argument("node", default="", metavar="[NODE]", shell_complete=complete_nodes)
@click.option("--metric", type=click.Choice(_METRICS), default=None, help="What to draw.  [default: util]")
@click.option(
    "--since", type=DURATION, metavar="TIME", default="24h", show_default=True, help="How long ago it begins."
)
@click.option("--until", type=DURATION, metavar="TIME", default=None, help="How long ago it ends.  [default: now]")
@click.option("--device", type=click.IntRange(0, 65_535), default=None, help="Only this device.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row for each metric, device and point in time.")
def history(
    node: str, metric: str | None, since: str, until: str | None, device: int | None, as_json: bool, as_csv: bool
) -> None:
    """Show how a node was, also while it was down or after it left. Without NODE: the mean of the fleet.

    The head keeps values of 10 s for a day, of 5 min for 60 days and of 1 h for 3 years. The table below the chart has each device.

    \b
    phalanx nodes history gpu017 --since 16h --until 8h
    phalanx nodes history gpu017 --metric throttle --since 7d
    phalanx nodes history --metric power --since 30d --csv
    """  # noqa: D301 - click reads the backspace character itself
    if as_json and as_csv:
        raise BadRequest("--json and --csv are two formats", hint="give one of them")
    if device is not None and not node:
        raise BadRequest("--device needs a node", hint="phalanx nodes history NODE --device 0")
    head, now_s = connect(), time.time()
    begin_s = now_s - parse_duration_s(since)
    end_s = now_s if until is None else now_s - parse_duration_s(until)
    if end_s <= begin_s:
        raise BadRequest(f"--until {until} is not later than --since {since}", hint="--since 16h --until 8h")
    chosen = metric or "util"
    found = _fetch(head, node, chosen, begin_s, end_s, device)
    names = (*_DEVICE_METRICS.get(chosen, ()), *_NODE_METRICS.get(chosen, ()))
    if as_csv:
        _print_csv(found, names if metric else ())
        return
    value = found if metric is None else _only(found, names)
    show_list(
        lambda: ListView(
            value=value,
            lines=lambda screen: _lines(_only(found, names), screen, chosen),
            next_command=f"phalanx nodes show {node}" if node else "phalanx nodes",
        ),
        as_json=as_json,
        watch=False,
    )


def _fetch(head: Client, node: str, metric: str, since_s: float, until_s: float, device: int | None) -> NodeHistory:
    if metric in _NODE_METRICS:
        if device is not None:
            raise BadRequest(f"--metric {metric} is of a node, not of a device", hint="leave --device out")
        return head.node_history(node, since_s=since_s, until_s=until_s)
    return head.device_history(node, since_s=since_s, until_s=until_s, device=device)


def _only(found: NodeHistory, names: Sequence[str]) -> NodeHistory:
    import msgspec

    return msgspec.structs.replace(found, columns=[one for one in found.columns if one.metric in names])


def _lines(found: NodeHistory, screen: Terminal, metric: str) -> list[str]:
    whose = f"node {found.node}" if found.node else "the fleet"
    span = f"the last {format_duration(time.time() - found.begin_s)}"
    if not found.columns:
        return [f"no {metric} of {whose} is known for {span}: its devices do not report it, or nothing was recorded"]
    title = _TITLES[found.columns[0].metric] if len({one.metric for one in found.columns}) == 1 else metric
    several = len({one.device for one in found.columns}) > 1
    each = f"{format_duration(found.step_s)} a point"
    head = f"{screen.paint(whose, 'bold')}: {title}{', mean of its devices' if several else ''}, {span}, {each}"
    return [head, *_chart(found, screen), *_table(found, screen)]


def _chart(found: NodeHistory, screen: Terminal) -> list[str]:
    from rich.console import Console

    from phalanx.cli.terminal_chart import AxisLimits, ChartSeries, line_chart

    lines = _series(found)
    known = [value for points in lines.values() for _, value in points]
    if not known:
        return []
    metric = found.columns[0].metric
    top = 1.0 if metric in ("utilization", "cpu_utilization", "throttled") else max(known) * 1.05 or 1.0
    end_s = found.begin_s + found.points * found.step_s
    limits = AxisLimits(x_low=found.begin_s, x_high=end_s, y_low=0.0, y_high=top)
    series = [
        ChartSeries(points=points, colour=_COLOURS[number % len(_COLOURS)])
        for number, points in enumerate(lines.values())
    ]
    width = min(screen.width, _CHART_COLUMNS_MAX)
    drawn = line_chart(
        series,
        limits,
        width=width,
        height=_CHART_ROWS,
        blocks=screen.blocks,
        x_text=lambda at_s: _moment(at_s, end_s - found.begin_s),
        y_text=lambda value: _value(metric, value),
    )
    console = Console(no_color=not screen.colour, force_terminal=screen.colour, width=width, highlight=False)
    with console.capture() as captured:
        for line in drawn:
            console.print(line, no_wrap=True, overflow="crop")
    legend = [f"{_COLOURS[number]}: {name}" for number, name in enumerate(lines)] if len(lines) > 1 else []
    return [*captured.get().rstrip("\n").split("\n"), *legend]


def _series(found: NodeHistory) -> dict[str, list[tuple[float, float]]]:
    """The mean over the devices of each metric, as points with a known value."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for metric in dict.fromkeys(one.metric for one in found.columns):
        columns = [one.mean for one in found.columns if one.metric == metric]
        points = []
        for number, values in enumerate(zip(*columns, strict=True)):
            known = [value for value in values if value is not None]
            if known:
                points.append((found.begin_s + (number + 0.5) * found.step_s, sum(known) / len(known)))
        lines[_TITLES[metric]] = points
    return lines


def _table(found: NodeHistory, screen: Terminal) -> list[str]:
    columns = (
        Column(title="DEVICE", hide_empty=True),
        Column(title="WHAT", min_width=8),
        Column(title="MEAN", right=True),
        Column(title="MIN", right=True, hide_empty=True),
        Column(title="MAX", right=True, hide_empty=True),
        Column(title="KNOWN", right=True, drop_order=1),
        Column(title="REASONS", hide_empty=True, min_width=8),
    )
    rows = [_row(one, found.points) for one in found.columns[:_DEVICES_SHOWN]]
    more = len(found.columns) - len(rows)
    return [*table(columns, rows, screen), *([f"and {more} more: use --device, --json or --csv"] if more else [])]


def _row(one: HistoryColumn, points: int) -> list[str]:
    known = [value for value in one.mean if value is not None]
    least = [value for value in one.min if value is not None]
    most = [value for value in one.max if value is not None]
    return [
        "" if one.device is None else str(one.device),
        _TITLES[one.metric],
        _value(one.metric, sum(known) / len(known)) if known else "",
        _value(one.metric, min(least)) if least else "",
        _value(one.metric, max(most)) if most else "",
        f"{100 * len(known) / max(1, points):.0f}%",
        ", ".join(f"{reason} ({len(times)})" for reason, times in sorted(one.reasons.items())),
    ]


def _value(metric: str, value: float) -> str:
    if metric in ("utilization", "cpu_utilization", "throttled"):
        return f"{100 * value:.1f}%" if 0 < value < 0.1 else f"{100 * value:.0f}%"
    if metric == "power_w":
        return f"{value:.0f} W"
    if metric == "temperature_c":
        return f"{value:.0f} C"
    return format_bytes(value) + ("/s" if metric.endswith("_per_s") else "")


def _moment(at_s: float, span_s: float) -> str:
    return time.strftime("%H:%M" if span_s <= 2 * 86_400 else "%b %d", time.localtime(at_s))


def _print_csv(found: NodeHistory, names: Sequence[str]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["time", "node", "device", "metric", "mean", "min", "max", "reasons"])
    for one in found.columns:
        if names and one.metric not in names:
            continue
        device = "" if one.device is None else one.device
        for point in range(found.points):
            if one.mean[point] is None:
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.begin_s + point * found.step_s))
            least, most = (one.min[point], one.max[point]) if one.min else ("", "")
            reasons = " ".join(reason for reason, times in sorted(one.reasons.items()) if point in times)
            writer.writerow([at, found.node, device, one.metric, one.mean[point], least, most, reasons])
