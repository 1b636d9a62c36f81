"""`phalanx nodes power`: shows the power limits of GPUs, caps them, and restores those of before. Also the line on them of a node's page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import connect
from phalanx.cli.jobs.request.begin_time import format_time
from phalanx.cli.list_output import ListView, show_list
from phalanx.cli.option_types import DURATION, HOSTS, GrammarType
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest, Conflict, NotFound, WaitTimedOut
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.fleet.power_limits import parse_power_mw
from phalanx.wire.api.nodes import NodeView, PowerLimitsView

if TYPE_CHECKING:
    from phalanx.client import Client

POWER: Final = GrammarType("WATTS", parse_power_mw)
WAIT_S: Final = 30.0  # for supervisors to set their limits: one more command of each, and the driver's calls
POLL_S: Final = 0.3


@click.command(name="power")
@click.argument("names", metavar="NODES", type=HOSTS, shell_complete=complete_nodes)
@click.option("--limit", type=POWER, help="Cap each GPU at so many watts: 300W.")
@click.option(
    "--for", "lasting", type=DURATION, metavar="TIME", help="With --limit: restore the limits of before after 8h."
)
@click.option("--restore", is_flag=True, help="Restore the limits of before the cap.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def power_command(names: str, limit: str | None, lasting: str | None, restore: bool, as_json: bool) -> None:
    """Show the power limits of the GPUs of nodes, cap them, or restore those of before. Running jobs go on.

    \b
    phalanx nodes power gpu[001-004] --limit 300W --for 8h
    phalanx nodes power gpu[001-004] --restore
    """  # noqa: D301 - click reads the backspace character itself
    if restore and limit is not None:
        raise BadRequest("--limit and --restore exclude each other", hint="give one of them")
    if lasting is not None and limit is None:
        raise BadRequest("--for needs --limit", hint=f"phalanx nodes power {names} --limit 300W --for {lasting}")
    head, wanted = connect(), expand_hostlist(names)
    _check_known(head, wanted)
    if limit is not None:
        for name in wanted:
            head.cap_power(name, limit, lasting or "")
        _wait(head, wanted, lambda node: node.power_cap is not None and node.power_cap.applied)
    elif restore:
        for name in wanted:
            head.restore_power(name)
        _wait(head, wanted, lambda node: not _changed(node))
    found = _nodes(head, wanted)
    now_s = time.time()
    capped = fold_hostlist([node.id for node in found if _changed(node)])
    show_list(
        lambda: ListView(
            value=[_listing(node) for node in found],
            lines=lambda screen: _lines(found, screen, now_s),
            next_command=f"phalanx nodes power {capped} --restore" if capped else "",
        ),
        as_json=as_json,
        watch=False,
    )


def _nodes(head: Client, wanted: Sequence[str]) -> list[NodeView]:
    found = {node.id: node for node in head.nodes()}
    return [found[name] for name in wanted if name in found]  # type: ignore[index]  # names as typed are ids


def _check_known(head: Client, wanted: Sequence[str]) -> None:
    known = {str(node.id) for node in head.nodes()}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise NotFound(f"no node {missing[0]!r}", hint=f"known nodes: {', '.join(sorted(known)) or 'none'}")


def _changed(node: NodeView) -> bool:
    return any(one.power_limits is not None and one.power_limits.original_w is not None for one in node.devices)


def _wait(head: Client, wanted: Sequence[str], done: Callable[[NodeView], bool]) -> None:
    """Wait until the supervisors have done it.

    Raises:
        Conflict: one of them could not.
        WaitTimedOut: one of them has not answered in time; it does so later.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        found = _nodes(head, wanted)
        failed = next((node for node in found if node.power_error), None)
        if failed is not None:
            raise Conflict(
                f"node {failed.id}: {failed.power_error}",
                hint="run the supervisor of the node as root" if "root" in failed.power_error else "",
            )
        left = [str(node.id) for node in found if not done(node)]
        if not left:
            return
        if time.monotonic() > until_s:
            raise WaitTimedOut(
                f"no answer from {fold_hostlist(left)} yet; the limits change when the supervisor answers",
                hint=f"phalanx nodes power {fold_hostlist(left)}",
            )
        time.sleep(POLL_S)


def _listing(node: NodeView) -> dict[str, object]:
    return {
        "id": node.id,
        "power_cap": node.power_cap,
        "power_error": node.power_error,
        "devices": [{"index": one.index, "model": one.model, "power_limits": one.power_limits} for one in node.devices],
    }


def _lines(found: Sequence[NodeView], screen: Terminal, now_s: float) -> list[str]:
    columns = (
        Column(title="NODE"),
        Column(title="GPUS"),
        Column(title="MODEL", min_width=8, drop_order=2),
        Column(title="LIMIT", right=True),
        Column(title="BEFORE", right=True, hide_empty=True),
        Column(title="DEFAULT", right=True, drop_order=1),
        Column(title="RANGE", right=True),
        Column(title="CAP", hide_empty=True),
    )
    rows: list[list[Cell | str]] = []
    for node in found:
        cap = _cap_text(node, now_s)
        for (model, limits), indices in _alike(node).items():
            shown = ["none", "", "", ""] if limits is None else _limit_cells(limits)
            rows.append([Cell(node.id, "bold"), indices, model, *shown, cap])
        if not node.devices:
            rows.append([Cell(node.id, "bold"), "", "cpu", "none", "", "", "", cap])
    return table(columns, rows, screen)


def _alike(node: NodeView) -> dict[tuple[str, PowerLimitsView | None], str]:
    """The devices of a node by model and limits, each with their indices."""
    found: dict[tuple[str, PowerLimitsView | None], list[int]] = {}
    for one in node.devices:
        found.setdefault((one.model, one.power_limits), []).append(one.index)
    return {key: ",".join(map(str, indices)) for key, indices in found.items()}


def _limit_cells(limits: PowerLimitsView) -> list[str]:
    before = "" if limits.original_w is None else f"{limits.original_w:g} W"
    return [f"{limits.limit_w:g} W", before, f"{limits.default_w:g} W", f"{limits.min_w:g} to {limits.max_w:g} W"]


def _cap_text(node: NodeView, now_s: float) -> str:
    cap = node.power_cap
    if node.power_error:
        return node.power_error
    if cap is None:
        return ""
    end = "" if cap.until_s is None else f" until {format_time(cap.until_s, now_s)}"
    return f"{cap.limit_w:g} W by {cap.by}{end}{'' if cap.applied else ', not set yet'}"


def power_lines(node: NodeView, now_s: float) -> list[str]:
    """Return the line on power limits of a node's page; none if they are those of the drivers."""
    limits = [one.power_limits for one in node.devices if one.power_limits is not None]
    if not node.power_error and node.power_cap is None and all(one.limit_w == one.default_w for one in limits):
        return []
    now = sorted({one.limit_w for one in limits})
    spread = f"{now[0]:g} W" if len(now) == 1 else f"{now[0]:g} to {now[-1]:g} W" if now else "unknown"
    cap = _cap_text(node, now_s)
    return [f"power limit of {cells.count(len(limits), 'GPU')}: {spread}{f'; cap: {cap}' if cap else ''}"]
