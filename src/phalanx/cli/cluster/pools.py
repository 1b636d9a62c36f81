"""`phalanx pools`: nodes that a provider starts when jobs need them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import check_new, list_group
from phalanx.cli.connection import connect
from phalanx.cli.impossible_jobs import print_change
from phalanx.cli.list_output import ListView, list_options, show_list, to_json
from phalanx.cli.option_types import DURATION
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import PaidBy, PoolNodeState
from phalanx.core.units import format_duration
from phalanx.wire.api.pools import PoolOfferView, PoolView

if TYPE_CHECKING:
    from phalanx.client import Client

_DOLLARS: Final = re.compile(r"\$?([0-9]+(?:\.[0-9]+)?)(?:/month)?")
_PER_GB: Final = re.compile(r"\$?([0-9]+(?:\.[0-9]+)?)(?:/GB)?")
_NO_CAP: Final = "none"
_PRICE: Final = re.compile(r"\$?([0-9]+(?:\.[0-9]+)?)(?:/h)?")


@list_group(
    "List node pools; add, show, change or remove one. A provider starts and stops their nodes as jobs need them."
)
def pools(head: Client, now_s: float) -> ListView:
    """List node pools."""
    del now_s
    found = head.pools()
    return ListView(
        value=found,
        lines=lambda screen: _lines(found, screen),
        next_command=f"phalanx pools show {found[0].id}" if found else "phalanx pools add --help",
    )


@pools.command()
@click.argument("name")
@click.option("--provider", required=True, metavar="NAME", help="Starts the nodes: virtual, command, aws.")
@click.option("--node", default="", metavar="1x[MODEL:]N", help="What each node has: 1xh100:8.")
@click.option("--type", "kinds", default="", metavar="TYPE,...", help="Or its type at the provider: p5.48xlarge.")
@click.option("--min", "min_nodes", default=0, metavar="N", help="Nodes that always run. [0]")
@click.option("--max", "max_nodes", required=True, type=int, metavar="N", help="Nodes at most.")
@click.option(
    "--price", default="", metavar="USD/h", help="Price of one node: 2/h. The cheapest per GPU is used first."
)
@click.option("--cap", default="", metavar="USD/h", help="All nodes together cost at most: 400/h.")
@click.option(
    "--month-cap",
    default="",
    metavar="USD",
    help="Order no node with which a month could cost more: 20000; 0 for none.",
)
@click.option("--egress", default="", metavar="USD/GB", help="Price of what jobs copy there and back: 0.09/GB.")
@click.option(
    "--billed",
    type=click.Choice(["second", "hour"]),
    default="second",
    help="How nodes are billed; a paid hour is used up. [second]",
)
@click.option("--zones", default="", metavar="A,B", help="Where the provider looks for nodes, in this order.")
@click.option("--spot", is_flag=True, help="Spot capacity, which the provider may take back.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the provider (docs/pools.md)."
)
@click.option("--zone", default="", metavar="ZONE", help="Where the nodes are; their label `zone`.")
@click.option("--idle", default="5m", type=DURATION, metavar="TIME", help="Release a node without a job after. [5m]")
@click.option(
    "--start-limit", default="10m", type=DURATION, metavar="TIME", help="Give up a node that is not up after. [10m]"
)
def add(
    name: str,
    provider: str,
    node: str,
    kinds: str,
    min_nodes: int,
    max_nodes: int,
    price: str,
    cap: str,
    month_cap: str,
    egress: str,
    billed: str,
    zones: str,
    spot: bool,
    settings: tuple[str, ...],
    zone: str,
    idle: str,
    start_limit: str,
) -> None:
    """Add a node pool."""
    if bool(node) == bool(kinds):
        raise BadRequest("say what each node has, either by --node or by --type", hint="--node 1xh100:8")
    head = connect()
    check_new(
        "pool",
        name,
        (pool.id for pool in head.pools()),
        hint=f"change it with phalanx pools set {name}, or remove it first",
    )
    pool = head.put_pool(
        name,
        provider=provider,
        node=node or kinds,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        price_per_h=_amount_per_h("--price", price),
        cap_per_h=_amount_per_h("--cap", cap),
        cap_per_month=_amount("--month-cap", month_cap, _DOLLARS, "20000"),
        egress_per_gb=_amount("--egress", egress, _PER_GB, "0.09/GB") or 0.0,
        billed=billed,
        zones=[word for word in zones.split(",") if word],
        settings=provider_settings(settings, spot=spot),
        idle=idle,
        start_limit=start_limit,
        zone=zone,
    )
    _print_pool(pool)


@pools.command(name="set")
@click.argument("name")
@click.option("--min", "min_nodes", type=int, metavar="N", help="Nodes that always run.")
@click.option("--max", "max_nodes", type=int, metavar="N", help="Nodes at most.")
@click.option("--price", default="", metavar="USD/h", help="Price of one node: 2/h.")
@click.option("--cap", default="", metavar="USD/h", help="All nodes together cost at most: 400/h; none for no cap.")
@click.option("--month-cap", default="", metavar="USD", help="What a month may cost: 20000; none for no cap.")
@click.option("--egress", default="", metavar="USD/GB", help="Price of what jobs copy there and back: 0.09/GB.")
@click.option("--billed", type=click.Choice(["second", "hour"]), help="How nodes are billed.")
@click.option("--idle", type=DURATION, metavar="TIME", help="Release a node without a job after.")
@click.option("--start-limit", type=DURATION, metavar="TIME", help="Give up a node that is not up after.")
def set_(
    name: str,
    min_nodes: int | None,
    max_nodes: int | None,
    price: str,
    cap: str,
    month_cap: str,
    egress: str,
    billed: str | None,
    idle: str | None,
    start_limit: str | None,
) -> None:
    """Change the limits, price and times of a node pool. Its nodes stay what they are."""
    if all(
        one in (None, "") for one in (min_nodes, max_nodes, price, cap, month_cap, egress, billed, idle, start_limit)
    ):
        raise BadRequest("nothing to change", hint=f"phalanx pools set {name} --max 8")
    head = connect()
    known = head.pool(name)
    changed = head.put_pool(
        name,
        min_nodes=known.min_nodes if min_nodes is None else min_nodes,
        max_nodes=known.max_nodes if max_nodes is None else max_nodes,
        price_per_h=_amount_per_h("--price", price),
        cap_per_h=known.cap_per_h if not cap else None if cap == _NO_CAP else _amount_per_h("--cap", cap),
        cap_per_month=known.cap_per_month
        if not month_cap
        else None
        if month_cap == _NO_CAP
        else _amount("--month-cap", month_cap, _DOLLARS, "20000"),
        egress_per_gb=known.egress_per_gb if not egress else _amount("--egress", egress, _PER_GB, "0.09/GB") or 0.0,
        billed=billed or known.billed,
        idle=idle or f"{round(known.idle_s)}s",
        start_limit=start_limit or f"{round(known.start_limit_s)}s",
    )
    _print_pool(changed)


def _print_pool(pool: PoolView) -> None:
    sizes = f"{pool.min_nodes} to {cells.count(pool.max_nodes, 'node')}"
    print(
        strip_control(f"pool {pool.id}: {sizes} of {pool.node} by {pool.provider}, ${pool.price_per_h:g} an hour each")
    )
    print(strip_control(f"next: phalanx pools show {pool.id}"))


@pools.command()
@click.argument("name")
@list_options
def show(name: str, as_json: bool, watch: bool) -> None:
    """Show a node pool and the state of each node."""
    head = connect()

    def fetch() -> ListView:
        pool = head.pool(name)
        return ListView(value=pool, lines=lambda screen: _page(pool, screen, time.time()))

    show_list(fetch, as_json=as_json, watch=watch)


@pools.command()
@click.argument("node")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def console(node: str, as_json: bool) -> None:
    """Print what the machine of a node printed while it booted, if it never joined and was given up."""
    found = connect().node_console(node)
    if as_json:
        print(to_json(found, indent=2))
        return
    for line in found.text.splitlines():
        print(strip_control(line))


@pools.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def remove(name: str, as_json: bool) -> None:
    """Release all nodes of a pool after their jobs were saved and moved, and remove the pool."""
    print_change(connect().remove_pool(name), f"pool {name} releases its nodes and is then removed", as_json=as_json)


def _amount_per_h(option: str, text: str) -> float | None:
    return _amount(option, text, _PRICE, "2/h", "in US dollars an hour")


def _amount(option: str, text: str, form: re.Pattern[str], example: str, what: str = "in US dollars") -> float | None:
    if not text:
        return None
    match = form.fullmatch(text.strip())
    if match is None:
        raise BadRequest(f"{option} {text!r} is not an amount {what}", hint=f"use {option} {example}")
    return float(match[1])


def provider_settings(words: tuple[str, ...], *, spot: bool) -> dict[str, str]:
    """Return the settings of a provider from words such as region=us-east-1.

    Raises:
        BadRequest: a word has another form, or names the market beside `spot`.
    """
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise BadRequest(f"--set {word!r} is not NAME=VALUE")
        found[name] = value
    if spot:
        if "market" in found:
            raise BadRequest("--spot means --set market=spot: give one of the two")
        found["market"] = "spot"
    return found


def _lines(found: list[PoolView], screen: Terminal) -> list[str]:
    if not found:
        return ["no node pool"]
    columns = (
        Column(title="POOL"),
        Column(title="PROVIDER"),
        Column(title="NODE", min_width=8),
        Column(title="UP", right=True),
        Column(title="COMING", right=True),
        Column(title="MIN-MAX", right=True),
        Column(title="USD/H", right=True),
        Column(title="NOW USD/H", right=True),
        Column(title="WHY", min_width=12, hide_empty=True),
    )
    rows: list[list[Cell | str]] = []
    for pool in found:
        states = [node.state for node in pool.nodes]
        coming = states.count(PoolNodeState.REQUESTED) + states.count(PoolNodeState.PROVISIONING)
        rows.append(
            [
                Cell(pool.id, "bold"),
                pool.provider,
                pool.node,
                str(states.count(PoolNodeState.UP)),
                str(coming),
                f"{pool.min_nodes}-{pool.max_nodes}",
                f"{pool.price_per_h:g}",
                f"{pool.cost_per_h:g}",
                "is being removed" if pool.removing else pool.failure,
            ]
        )
    return table(columns, rows, screen)


def _page(pool: PoolView, screen: Terminal, now_s: float) -> list[str]:
    sizes = f"{pool.min_nodes} to {cells.count(pool.max_nodes, 'node')} of {pool.node}"
    zone = f" in {pool.zone}" if pool.zone else ""
    lines = [
        f"{screen.paint(f'pool {pool.id}', 'bold')}: {sizes} by {pool.provider}{zone}",
        f"${pool.price_per_h:g} an hour for each node, ${pool.cost_per_h:g} an hour now"
        + ("" if pool.cap_per_h is None else f", at most ${pool.cap_per_h:g}"),
        f"release: after {format_duration(pool.idle_s)} without a job; give up: not up after {format_duration(pool.start_limit_s)}",
    ]
    lines += _month_lines(pool)
    if pool.removing:
        lines.append("is being removed: its nodes are released")
    if pool.failures:
        wait_s = pool.retry_at_s - now_s
        again = f"the next order in {format_duration(wait_s)}" if wait_s > 0.0 else "the next order when a job needs it"
        lines.append(f"{cells.count(pool.failures, 'node')} given up in a row: {pool.failure}; {again}")
    if pool.list_problem:
        lines.append(f"its machines cannot be listed, so strays are not seen: {pool.list_problem}")
    if pool.offers:
        lines += table(_OFFER_COLUMNS, [_offer_row(offer, now_s) for offer in pool.offers], screen)
    lines += [
        f"console output of {one.node}, machine {one.machine}, {cells.age(one.at_s, now_s)} ago: phalanx pools console {one.node}"
        for one in pool.consoles
    ]
    if not pool.nodes:
        return [*lines, "no nodes now"]
    columns = (
        Column(title="NODE"),
        Column(title="STATE"),
        Column(title="SINCE", right=True),
        Column(title="MACHINE", hide_empty=True),
        Column(title="OFFER", hide_empty=True),
        Column(title="WHY", min_width=12, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(node.id, "bold"),
            node.state.value,
            cells.age(node.changed_s, now_s),
            node.machine,
            node.offer,
            "; ".join(filter(None, (node.why, "" if node.why.endswith(node.problem) else node.problem))),
        ]
        for node in pool.nodes
    ]
    return [*lines, *table(columns, rows, screen)]


def _month_lines(pool: PoolView) -> list[str]:
    """Return what the pool cost this month, and what else its nodes cost."""
    lines = []
    if pool.cap_per_month == 0.0:
        lines.append("$0 a month at most: no node is ordered")
    elif pool.price_per_h:
        cap = "" if pool.cap_per_month is None else f" of at most ${pool.cap_per_month:,.2f}"
        lines.append(f"this month: ${pool.spent_this_month:,.2f}{cap}")
    parts = [f"billed by the {pool.billed}"] if pool.billed is not PaidBy.SECOND else []
    parts += [f"egress ${pool.egress_per_gb:g}/GB"] if pool.egress_per_gb else []
    parts += [f"up {format_duration(pool.boot_s)} after the request"] if pool.boot_s else []
    return [*lines, ", ".join(parts)] if parts else lines


_OFFER_COLUMNS: Final = (
    Column(title="OFFER"),
    Column(title="USD/H", right=True),
    Column(title="NEXT TRY", right=True, hide_empty=True),
    Column(title="REFUSED BECAUSE", min_width=12, hide_empty=True),
)


def _offer_row(offer: PoolOfferView, now_s: float) -> list[Cell | str]:
    wait_s = offer.refused_until_s - now_s
    return [offer.offer, f"{offer.price_per_h:g}", format_duration(wait_s) if wait_s > 0.0 else "", offer.why]
