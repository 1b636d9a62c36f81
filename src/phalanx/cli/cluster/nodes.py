"""`phalanx nodes`: lists, drains, labels, reserves and removes nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.cluster import mig, node_history, node_tests, power, reservations, spares
from phalanx.cli.command_groups import list_group
from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error
from phalanx.cli.impossible_jobs import impossible_lines
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.option_types import DURATION, HOSTS
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.cli.topology import topology
from phalanx.core.errors import BadRequest, NotFound, PhalanxError, Unreachable
from phalanx.core.fleet.fitness import FULL_DISK, HEALTH_CHECK
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.fleet.node import HOME_SITE, SITE_LABEL, NodeState
from phalanx.core.fleet.node_pool import COMING_STATES
from phalanx.core.resources import amount_text
from phalanx.core.units import format_bytes
from phalanx.wire.api.nodes import DeviceView, NicView, NodeView, OrderedNodeView, node_state

if TYPE_CHECKING:
    from phalanx.client import Client

_NODES = click.argument("names", metavar="NODES", type=HOSTS, shell_complete=complete_nodes)


@list_group(
    "List nodes with the use of every device; show, drain, undrain, label, reserve or remove them. NODES is a host list: n0, gpu[001-004,007]."
)
def nodes(head: Client, now_s: float) -> ListView:
    """List nodes."""
    found = head.nodes_and_orders()
    return ListView(
        value=[*found.nodes, *found.ordered],
        lines=lambda screen: node_lines(found.nodes, screen, now_s, found.ordered),
        next_command=_next(found.nodes),
    )


@nodes.command(name="show")
@_NODES
@list_options
def show_(names: str, as_json: bool, watch: bool) -> None:
    """Show every device of the nodes, and the job that uses it."""
    head = connect()
    wanted = expand_hostlist(names)

    def fetch() -> ListView:
        listed = head.nodes_and_orders()
        found = {node.id: node for node in listed.nodes}
        for ordered in listed.ordered:
            if ordered.id in wanted:
                raise NotFound(
                    f"node {ordered.id} is {ordered.state}, not up: {ordered.why}",
                    hint=f"phalanx pools show {ordered.pool}",
                )
        missing = [name for name in wanted if name not in found]
        if missing:
            raise NotFound(f"no node {missing[0]!r}", hint=f"known nodes: {', '.join(found) or 'none'}")
        chosen = [found[name] for name in wanted]  # type: ignore[index]  # names as typed are ids or absent
        now_s = time.time()
        tested = {node.id: node_tests.last_test_line(head.node_tests(node.id), now_s) for node in chosen}
        lines = lambda screen: [line for node in chosen for line in node_page(node, screen, now_s, tested[node.id])]  # noqa: E731
        return ListView(value=chosen, lines=lines, next_command=_next(chosen))

    show_list(fetch, as_json=as_json, watch=watch)


@nodes.command()
@_NODES
@click.option("--why", default="", metavar="TEXT", help="Reason, shown in the list of nodes.")
@click.option("--cordon", is_flag=True, help="Only block new work; running jobs stay.")
@click.option("--at", metavar="MOMENT", default=None, help="Plan it: 22:00, 2h (from now), 2026-12-01T22:00.")
@click.option("--for", "lasting", metavar="TIME", type=DURATION, default=None, help="The nodes return after this: 4h.")
def drain(names: str, why: str, cordon: bool, at: str | None, lasting: str | None) -> int:
    """Block new work on nodes, and move their jobs after a checkpoint; with --at or --for in a maintenance window.

    Until the window, jobs run on the nodes that end before it. Owners of jobs that it will stop are notified at once.
    """
    if at is not None or lasting is not None:
        if cordon:
            raise BadRequest("--cordon has no window", hint="leave out --at and --for, or --cordon")
        reservations.plan_maintenance(expand_hostlist(names), at=at or "now", lasting=lasting or "", why=why)
        return 0
    verb = "is cordoned" if cordon else "is draining"
    return _each(names, lambda head, name: _summary(head.drain(name, why, cordon_only=cordon), verb))


@nodes.command()
@_NODES
@click.option("--planned", is_flag=True, help="Also cancel maintenance windows that have not begun.")
def undrain(names: str, planned: bool) -> int:
    """Make nodes available for work again, also before the end of their maintenance."""
    return _each(names, lambda head, name: _summary(head.undrain(name, planned=planned), "is available for work again"))


@nodes.command()
@_NODES
def forget(names: str) -> int:
    """Remove nodes that are down and hold no allocation."""
    return _each(names, _forget)


nodes.add_command(node_tests.test_command)
nodes.add_command(topology.label)
nodes.add_command(spares.spares_command)
nodes.add_command(mig.mig_command)
nodes.add_command(power.power_command)
nodes.add_command(node_history.history)
nodes.add_command(reservations.reserve)
nodes.add_command(reservations.unreserve)
nodes.add_command(reservations.reservations)


def _forget(head: Client, name: str) -> str:
    removed = head.forget_node(name)
    return "\n".join(
        [f"node {name} removed", *impossible_lines(removed.impossible, removed.impossible_more, dry_run=False)]
    )


def _each(names: str, act: Callable[[Client, str], str]) -> int:
    """Apply the action to every node, also after an error; return the exit code of the first error."""
    head, code = connect(), 0
    for name in expand_hostlist(names):
        try:
            print(strip_control(act(head, name)))
        except Unreachable:
            raise
        except PhalanxError as error:
            sys.stdout.flush()
            failed = print_error(error.message, error.hint, error.exit_code)
            code = code or failed
    return code


def _summary(node: NodeView, verb: str) -> str:
    jobs = f"; {cells.count(len(node.jobs), 'job')} on it: {', '.join(node.jobs)}" if node.jobs else ""
    return f"node {node.id} {verb}{jobs}"


def node_lines(
    found: Sequence[NodeView], screen: Terminal, now_s: float, ordered: Sequence[OrderedNodeView] = ()
) -> list[str]:
    """Return the table of nodes, with one character for the use of each device; `·` is free. Ordered nodes follow."""
    if not found and not ordered:
        return ["no node has joined yet"]
    columns = (
        Column(title="NODE"),
        Column(title="STATE"),
        Column(title="POOL", hide_empty=True),
        Column(title="SITE", hide_empty=True, drop_order=8),
        Column(title="USD/H", right=True, hide_empty=True, drop_order=1),
        Column(title="USED", right=True),
        Column(title="MODEL", min_width=8),
        Column(title="DEVICES", min_width=8),
        Column(title="UTIL", right=True, hide_empty=True),
        Column(title="MEMORY", right=True, hide_empty=True, drop_order=2),
        Column(title="POWER", right=True, hide_empty=True, drop_order=3),
        Column(title="TEMP", right=True, hide_empty=True, drop_order=4),
        Column(title="LOAD", right=True, hide_empty=True, drop_order=5),
        Column(title="JOBS", min_width=4, hide_empty=True),
        Column(title="PHALANX", hide_empty=True, drop_order=7),
        Column(title="SINCE", right=True, drop_order=6),
        Column(title="WHY", min_width=12, hide_empty=True),
    )
    several = len({node.version for node in found} - {""}) > 1
    home = HOME_SITE if any(SITE_LABEL in node.labels for node in found) else ""
    rows = [
        _row(node, screen, now_s, site=node.labels.get(SITE_LABEL, home), version=node.version if several else "")
        for node in found
    ] + [_ordered_row(node, now_s) for node in ordered]
    lines = table(columns, rows, screen)
    devices = [device for node in found for device in node.devices if node.state is NodeState.UP]
    held = sum(device.job_id is not None for device in devices)
    down = sum(node.state is NodeState.DOWN for node in found)
    virtual = ", virtual" if devices and all(device.virtual for device in devices) else ""
    total = f"{held} of {cells.count(len(devices), 'device')} in use{virtual}"
    total += f"; {cells.count(down, 'node')} down" if down else ""
    coming = sum(node.state in COMING_STATES for node in ordered) + sum(bool(node.provisioning) for node in found)
    return [*lines, total + (f"; {cells.count(coming, 'node')} on the way" if coming else "")]


def _ordered_row(node: OrderedNodeView, now_s: float) -> list[Cell | str]:
    """The row of a node that a pool has ordered; it has no supervisor and so no samples."""
    return [
        Cell(node.id, "bold"),
        cells.state_cell(node.state.value),
        node.pool,
        "",
        f"{node.price_per_h:g}",
        f"0/{node.gpus}",
        node.model,
        *[""] * 8,
        cells.age(node.requested_s, now_s),
        node.why,
    ]


def _row(node: NodeView, screen: Terminal, now_s: float, *, site: str, version: str) -> list[Cell | str]:
    used = [device.utilization for device in node.devices if device.utilization is not None]
    memory = [device.memory_used_bytes for device in node.devices if device.memory_used_bytes is not None]
    power = [device.power_w for device in node.devices if device.power_w is not None]
    heat = [device.temperature_c for device in node.devices if device.temperature_c is not None]
    up = node.state is NodeState.UP
    return [
        Cell(node.id, "bold"),
        cells.state_cell(node_state(node)),
        node.pool,
        site,
        "" if node.price_per_h is None else f"{node.price_per_h:g}",
        f"{sum(device.job_id is not None for device in node.devices)}/{len(node.devices)}",
        node.devices[0].model if node.devices else "cpu",
        "".join(device_mark(device, screen) for device in node.devices) if up else "",
        cells.percent(sum(used) / len(used)) if used and up else "",
        format_bytes(sum(memory)) if memory and up else "",
        f"{sum(power):.0f} W" if power and up else "",
        f"{max(heat):.0f} C" if heat and up else "",
        f"{node.load_1m:.1f}" if node.load_1m is not None and up else "",
        ", ".join(node.jobs),
        version,
        cells.age(node.changed_s or node.joined_s, now_s),
        _why(node, now_s),
    ]


def _why(node: NodeView, now_s: float) -> str:
    if node.state is NodeState.DOWN:
        return node.down_cause
    cordon = "" if node.cordon is None else f"{node.cordon.why or 'no reason given'} ({node.cordon.by})"
    slow = f"slow: {node.slow}" if node.slow else ""
    bad = f"used last: {node.bad_node}" if node.bad_node and node.cordon is None else ""
    outside = f"other processes: {', '.join(node.outside)}" if node.outside else ""
    awaited = node.provisioning
    return "; ".join(
        filter(None, [cordon, awaited, slow, bad, outside, reservations.reservation_summary(node.reserved, now_s)])
    )


def device_mark(device: DeviceView, screen: Terminal) -> str:
    """Return one character for a device: `!` broken, `x` used by other processes, `·` free, else its utilisation."""
    if not device.healthy:
        return "!"
    if device.outside:
        return "x"
    if device.job_id is None:
        return "·" if screen.blocks else "."
    return cells.utilisation_mark(device.utilization, screen)


def node_page(node: NodeView, screen: Terminal, now_s: float, tested: str = "") -> list[str]:
    """Return the page of one node. `tested`: a line about its last test."""
    state = cells.state_cell(node_state(node))
    head = f"{screen.paint(f'node {node.id}', 'bold')}: {screen.paint(state.text, state.style)}"
    facts = [
        f"{node.cpus} CPUs, {format_bytes(node.memory_bytes)} memory, engine {node.engine}, at {node.address or 'no address'}",
        f"joined {cells.age(node.joined_s, now_s)} ago, failed {cells.count(node.failures, 'time')}"
        + (f", Phalanx {node.version}" if node.version else "")
        + (f", fault score {node.marks:.1f}" if node.marks else ""),
        *([f"limits on CPUs and memory: {node.limits.value}"] if node.limits is not None else []),
        *([f"cannot mount object stores: {node.mounts_error}"] if node.mounts_error else []),
        *([f"offers: {offers}"] if (offers := _offers(node)) else []),
        *([f"why: {why}"] if (why := _why(node, now_s)) else []),
        *([tested] if tested else []),
        *([f"ports: {', '.join(_nic(nic) for nic in node.nics)}"] if node.nics else []),
        *nvlink_lines(node.devices),
        *mig.mig_lines(node.devices),
        *power.power_lines(node, now_s),
    ]
    columns = (
        Column(title="DEVICE", right=True),
        Column(title="MODEL", min_width=21),
        Column(title="STATE"),
        Column(title="JOB", hide_empty=True),
        Column(title="RANKS", hide_empty=True),
        Column(title="USED", hide_empty=True),
        Column(title="MEMORY", right=True, hide_empty=True, drop_order=1),
        Column(title="POWER", right=True, hide_empty=True, drop_order=2),
        Column(title="TEMP", right=True, hide_empty=True, drop_order=3),
        Column(title="THROTTLE", hide_empty=True, min_width=8),
        Column(title="COUNTER", hide_empty=True, min_width=8, drop_order=4),
        Column(title="PCIE", hide_empty=True, drop_order=6),
        Column(title="NUMA", right=True, hide_empty=True, drop_order=5),
    )
    rows = [_device_row(device, screen) for device in node.devices]
    return [head, *(f"  {strip_control(fact)}" for fact in facts), *table(columns, rows, screen), ""]


def _offers(node: NodeView) -> str:
    """What the node offers by name, and how much of it jobs hold."""
    used = node.extras_used
    return ", ".join(
        f"{name} {amount_text(amount)}" + (f" ({amount_text(used[name])} in use)" if used.get(name) else "")
        for name, amount in node.extras.items()
    )


def _device_row(device: DeviceView, screen: Terminal) -> list[Cell | str]:
    state = (
        "broken"
        if not device.healthy
        else "shared"
        if device.shares
        else "held"
        if device.job_id is not None
        else "outside"
        if device.outside
        else "free"
    )
    memory = (
        ""
        if device.memory_used_bytes is None
        else f"{format_bytes(device.memory_used_bytes)} of {format_bytes(device.memory_bytes)}"
    )
    return [
        str(device.index),
        device.model + (" (virtual)" if device.virtual and "virtual" not in device.model else ""),
        Cell(state, {"broken": "red", "held": "green", "shared": "green", "outside": "yellow", "free": "dim"}[state]),
        ", ".join(f"{one.job_id} ({one.gpus:g})" for one in device.shares) or device.job_id or "",
        ", ".join(map(str, device.ranks)),
        ""
        if device.utilization is None
        else f"{cells.bar(device.utilization, 10, screen)} {cells.percent(device.utilization)}",
        memory,
        "" if device.power_w is None else f"{device.power_w:.0f} W",
        "" if device.temperature_c is None else f"{device.temperature_c:.0f} C",
        ", ".join(device.throttle),
        device.counter,
        device.pcie,
        "" if device.numa is None else str(device.numa),
    ]


def _nic(nic: NicView) -> str:
    """Format a network port: `mlx5_0/1 400 Gbit/s NUMA 1`, or `mlx5_0/1 down`."""
    rate = "" if nic.bits_per_s is None else f" {nic.bits_per_s / 1e9:g} Gbit/s"
    return f"{nic.name}{rate if nic.up else ' down'}{'' if nic.numa is None else f' NUMA {nic.numa}'}"


def nvlink_lines(devices: Sequence[DeviceView]) -> list[str]:
    """Return the NVLink matrix; one line if all pairs have the same number of links, none without NVLinks."""
    rows = {device.index: device.nvlinks for device in devices if any(device.nvlinks)}
    if not rows:
        return []
    counts = {count for index, links in rows.items() for peer, count in enumerate(links) if peer != index}
    if len(counts) == 1 and len(rows) == len(devices):
        return [f"NVLink: {next(iter(counts))} links from every GPU to every other"]
    return [
        f"NVLinks of GPU {device.index}: "
        + (", ".join(f"{count} to {peer}" for peer, count in enumerate(device.nvlinks) if count) or "none")
        for device in devices
    ]


def _next(found: Sequence[NodeView]) -> str:
    if not found:
        return "phalanx doctor"
    down = next((node for node in found if node.state is NodeState.DOWN), None)
    if down is not None:
        return f"phalanx nodes show {down.id}"
    cordoned = next((node for node in found if node.cordon is not None), None)
    if cordoned is None or cordoned.cordon is None:
        return "phalanx ps"
    # Others return a node with a full disk, one that fails its health check, or one that its engine has out of service.
    by_others = cordoned.cordon.by in (FULL_DISK, HEALTH_CHECK, cordoned.engine)
    return f"phalanx nodes {'show' if by_others else 'undrain'} {cordoned.id}"
