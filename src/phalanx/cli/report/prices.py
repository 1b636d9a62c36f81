"""`phalanx prices`: what a GPU costs for an hour, by model, pool and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list, to_json
from phalanx.cli.report.electricity_text import rate_text
from phalanx.cli.report.period import utc_text
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import NotFound
from phalanx.core.fleet.summary import model_fits
from phalanx.core.work.nearest_match import suggestion

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.prices import PricesChanged, PricesReply, PriceView

ALL_POOLS: Final = "(all)"
_SHOWN: Final = 20  # changes that are listed


@list_group("List the prices of GPUs; set them from a file, or refresh them by a plug-in.")
def prices(head: Client, now_s: float) -> ListView:
    """List the prices of GPUs, by model, pool and time."""
    found = head.prices()
    return _view(found, found.prices, now_s)


@prices.command()
@click.argument("gpu")
@list_options
def show(gpu: str, as_json: bool, watch: bool) -> None:
    """Show the prices that fit a GPU model, past and future."""
    head = connect()

    def fetch() -> ListView:
        import time

        found = head.prices()
        fitting = [one for one in found.prices if one.gpu == gpu or model_fits(gpu, 0, one.gpu, 0)]
        if not fitting:
            names = sorted({one.gpu for one in found.prices})
            raise NotFound(f"no price of {gpu}", hint=suggestion(gpu, names, "phalanx prices"))
        return _view(found, fitting, time.time())

    show_list(fetch, as_json=as_json, watch=watch)


@prices.command()
@click.argument("word", default="")
@list_options
def offers(word: str, as_json: bool, watch: bool) -> None:
    """List what clouds ask for, of all offers or those with WORD: shipped facts with their source and age. No head is asked."""
    from phalanx.cli.report.price_facts import offers_view

    show_list(lambda: offers_view(word), as_json=as_json, watch=watch)


@prices.command()
@click.argument("file", type=str)
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def apply(file: str, dry_run: bool, as_json: bool) -> None:
    """Replace all prices by those of a file, and print what changes (docs/money.md has the keys)."""
    from phalanx.cli.report.price_file import read_price_file

    currency, found, rates = read_price_file(file)
    _print_change(connect().put_prices(currency, found, rates, dry_run=dry_run), dry_run=dry_run, as_json=as_json)


@prices.command()
@click.argument("plugin")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def refresh(plugin: str, dry_run: bool, as_json: bool) -> None:
    """Replace all prices by those that an installed plug-in gives. Phalanx itself fetches no prices."""
    from phalanx.cli.report.price_plugins import refreshed_prices

    head = connect()
    known = head.prices()
    plain = [
        {
            "gpu": one.gpu,
            "pool": one.pool,
            "from_s": one.from_s,
            "per_gpu_hour": one.per_gpu_hour,
            "source": one.source,
        }
        for one in known.prices
    ]
    currency, found, rates = refreshed_prices(plugin, {"currency": known.currency, "prices": plain})
    _print_change(head.put_prices(currency, found, rates, dry_run=dry_run), dry_run=dry_run, as_json=as_json)


def _view(found: PricesReply, listed: Sequence[PriceView], now_s: float) -> ListView:
    return ListView(
        value=found if listed is found.prices else list(listed),
        lines=lambda screen: [
            *_lines(found.currency, listed, now_s, screen),
            *(rate_text(one, found.currency) for one in (found.electricity if listed is found.prices else ())),
        ],
        next_command="phalanx report cost" if listed else "phalanx prices apply FILE",
    )


def _lines(currency: str, listed: Sequence[PriceView], now_s: float, screen: Terminal) -> list[str]:
    if not listed:
        return ["no prices"]
    columns = (
        Column(title="GPU", min_width=8),
        Column(title="POOL", min_width=6),
        Column(title="FROM"),
        Column(title=f"{currency} PER GPU-HOUR", right=True),
        Column(title="", hide_empty=True),
        Column(title="SOURCE", min_width=12, max_width=60, hide_empty=True, drop_order=1),
    )
    newest = {(one.gpu, one.pool): one.from_s for one in listed if one.from_s <= now_s}
    return table(columns, [_row(one, newest, now_s) for one in listed], screen)


def _row(one: PriceView, newest: dict[tuple[str, str], int], now_s: float) -> list[Cell | str]:
    applies = "future" if one.from_s > now_s else "now" if newest[one.gpu, one.pool] == one.from_s else ""
    return [Cell(one.gpu, "bold"), one.pool or ALL_POOLS, _since(one.from_s), one.per_gpu_hour, applies, one.source]


def _since(from_s: int) -> str:
    return utc_text(from_s) if from_s else "always"


def _print_change(found: PricesChanged, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print(to_json(found, indent=2))
        return
    lines = [
        f"{word} {one.gpu} in {f'pool {one.pool}' if one.pool else 'all pools'} from {_since(one.from_s)}:"
        f" {one.per_gpu_hour} {found.currency}"
        for word, listed in (("added", found.added), ("changed", found.changed), ("removed", found.removed))
        for one in listed
    ]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"... {len(lines) - _SHOWN} more"]
    counts = f"{len(found.added)} added, {len(found.changed)} changed, {len(found.removed)} removed, {found.unchanged} unchanged"
    lines.append(f"{'nothing is stored: ' if dry_run else ''}{counts}")
    if found.electricity_rates or found.electricity_changed:
        changed = "changed" if found.electricity_changed else "unchanged"
        count = found.electricity_rates
        lines.append(f"{count} {'rate' if count == 1 else 'rates'} of electricity, {changed}")
    if found.past_from_s is not None:
        lines.append(
            f"reports and invoices {'would ' if dry_run else ''}change for hours since {_since(found.past_from_s)}"
        )
    print("\n".join(map(strip_control, lines)))
