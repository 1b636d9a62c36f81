"""`phalanx nodes reserve|unreserve|reservations`: nodes reserved for users, queues or maintenance."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final

import click

from phalanx.cli import cells
from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import connect
from phalanx.cli.jobs.request.begin_time import format_time, with_zone
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.option_types import DURATION, HOSTS
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist, fold_hostlist
from phalanx.core.ids import JobId, NodeId
from phalanx.core.units import format_duration
from phalanx.core.work.job_file.begin_time import parse_begin_s
from phalanx.wire.api.nodes import ReservationView, ReservedView

# "maintenance-1201-2200", then with -2 ... -100; no more reservations start in the same minute
NAMES_MAX: Final = 100


@click.command()
@click.argument("nodes", metavar="NODES", type=HOSTS, shell_complete=complete_nodes)
@click.option(
    "--start",
    default="now",
    metavar="MOMENT",
    help="now, 2h (from now), 22:00, 2026-12-01T22:00, with +01:00 for another zone. [now]",
)
@click.option("--for", "lasting", required=True, type=DURATION, metavar="TIME", help="How long: 4h.")
@click.option("--user", "users", multiple=True, metavar="USER", help="User of the reserved nodes; repeatable.")
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="Queue that may use the nodes; repeatable.")
@click.option("--maintenance", is_flag=True, help="No job may use the nodes.")
@click.option("--why", required=True, metavar="TEXT", help="Reason, shown in the lists.")
@click.option(
    "--name", default="", metavar="NAME", help="Name of the reservation; default: made from user and start time."
)
def reserve(
    nodes: str,
    start: str,
    lasting: str,
    users: Sequence[str],
    queues: Sequence[str],
    maintenance: bool,
    why: str,
    name: str,
) -> None:
    """Reserve nodes for users, queues or maintenance. At the start, other jobs on the nodes are saved and moved."""
    if maintenance == bool(users or queues):
        raise BadRequest("give either --maintenance, or --user and --queue")
    now_s = time.time()
    start_s = _start_s(start, now_s)
    head = connect()
    begins_now = start.strip().lower() == "now"
    made = head.reserve(
        name or _name((users or queues or ("maintenance",))[0], start_s, {one.id for one in head.reservations()}),
        expand_hostlist(nodes),
        lasting,
        start_s=None if begins_now else start_s,
        users=users,
        queues=queues,
        maintenance=maintenance,
        why=why,
    )
    print(strip_control(f"reservation {made.id}: {_summary(made)}"))
    print(
        f"next: phalanx nodes unreserve {made.id}"
        if maintenance
        else f"next: phalanx submit --reservation {made.id} ..."
    )


def plan_maintenance(nodes: Sequence[str], *, at: str, lasting: str, why: str) -> None:
    """Plan a maintenance window, and print it with the jobs that it will stop. Empty `lasting`: until the nodes are returned."""
    now_s, head = time.time(), connect()
    start_s = _start_s(at, now_s, option="--at")
    name = _name("maintenance", start_s, {one.id for one in head.reservations()})
    begins_now = at.strip().lower() == "now"
    made = head.reserve(
        name, nodes, lasting, start_s=None if begins_now else start_s, maintenance=True, why=why or "maintenance"
    )
    print(strip_control(f"maintenance {made.id}: {_summary(made)}"))
    stops: dict[JobId, list[NodeId]] = {}
    for node in head.nodes():
        for one in node.reserved:
            for job_id in one.stops if one.id == made.id else ():
                stops.setdefault(job_id, []).append(node.id)
    for job_id, on in stops.items():
        print(strip_control(f"  it will stop job {job_id} on {fold_hostlist(sorted(on))}; its owner is notified"))
    print(f"next: phalanx nodes unreserve {made.id} cancels it")


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def unreserve(names: Sequence[str]) -> None:
    """End reservations, also before they begin."""
    head = connect()
    for name in names:
        head.unreserve(name)
        print(strip_control(f"reservation {name} ended"))


@click.command()
@list_options
def reservations(as_json: bool, watch: bool) -> None:
    """List reservations by start time."""
    head = connect()

    def fetch() -> ListView:
        found = head.reservations()
        now_s = time.time()
        hint = f"phalanx nodes unreserve {found[0].id}" if found else "phalanx nodes reserve --help"
        return ListView(value=found, lines=lambda screen: _lines(found, screen, now_s), next_command=hint)

    show_list(fetch, as_json=as_json, watch=watch)


def reservation_summary(reserved: Sequence[ReservedView], now_s: float) -> str:
    """Describe the first reservation, `reserved from 22:00 for 4h00m for ada (exam)`, and count the others. Empty for none."""
    if not reserved:
        return ""
    first = reserved[0]
    begins = (
        f"until {format_time(first.end_s, now_s)}"
        if first.begun
        else f"from {format_time(first.start_s, now_s)}"
        + ("" if first.open_ended else f" for {format_duration(first.end_s - first.start_s)}")
    )
    why = f": {first.why}" if first.why else ""
    more = f"; and {len(reserved) - 1} more" if len(reserved) > 1 else ""
    return f"reserved {begins} for {first.holders} ({first.id}){why}{more}"


def _start_s(text: str, now_s: float, option: str = "--start") -> float:
    try:
        return parse_begin_s(with_zone(text, now_s), now_s=now_s)
    except BadRequest as error:
        raise BadRequest(error.message.replace("begin:", f"{option}:", 1), hint=error.hint) from None


def _lines(found: Sequence[ReservationView], screen: Terminal, now_s: float) -> list[str]:
    if not found:
        return ["no reservations"]
    columns = (
        Column(title="NAME"),
        Column(title="STATE"),
        Column(title="NODES", min_width=12),
        Column(title="FOR", min_width=12),
        Column(title="FROM"),
        Column(title="TIME", right=True),
        Column(title="LEFT", right=True, hide_empty=True),
        Column(title="WHY", min_width=12, drop_order=2),
        Column(title="BY", drop_order=1),
    )
    return table(columns, [_row(one, now_s) for one in found], screen)


def _row(one: ReservationView, now_s: float) -> list[Cell | str]:
    return [
        Cell(one.id, "bold"),
        Cell("open", "green") if one.begun else Cell("planned", "yellow"),
        fold_hostlist(sorted(one.nodes)),
        _holders(one),
        format_time(one.start_s, now_s),
        "open" if one.open_ended else format_duration(one.end_s - one.start_s),
        format_duration(max(0.0, one.end_s - now_s)) if one.begun else "",
        one.why,
        one.by,
    ]


def _summary(one: ReservationView) -> str:
    nodes = f"{fold_hostlist(sorted(one.nodes))} ({cells.count(len(one.nodes), 'node')})"
    until = "until they are returned" if one.open_ended else f"to {_moment(one.end_s)}"
    lasting = f"from {_moment(one.start_s)} {until}"
    return f"{nodes} reserved for {_holders(one)} {lasting}"


def _moment(at_s: float) -> str:
    """Format a time with date and zone: `Tue 2026-12-01 22:00 CET`."""
    return time.strftime("%a %Y-%m-%d %H:%M %Z", time.localtime(at_s))


def _holders(one: ReservationView) -> str:
    return " and ".join([*one.users, *(f"queue {queue}" for queue in one.queues)]) or "maintenance"


def _name(holder: str, start_s: float, taken: Collection[str]) -> str:
    base = f"{holder[:40]}-{time.strftime('%m%d-%H%M', time.localtime(start_s))}"
    names = [base, *(f"{base}-{number}" for number in range(2, NAMES_MAX + 1))]
    free = next((name for name in names if name not in taken), None)
    if free is None:
        raise BadRequest(
            f"{len(names)} reservations already have the name {base}", hint="choose another one with --name"
        )
    return free
