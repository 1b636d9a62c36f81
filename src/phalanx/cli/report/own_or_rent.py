"""`phalanx report own-or-rent`: what the measured use of own GPUs would have cost rented, and at which utilisation owning pays.

    break-even utilisation = cost of an own GPU-hour, used or not / price of a rented GPU-hour

Rented GPUs are counted as paid only while a job holds them. Prices are the newest of each kind that the tables of facts have, and those of
the head's pools; each has its date.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

import click
import msgspec

from phalanx.cli.report.period import Period
from phalanx.cli.report.price_facts import first_day
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import hours_text
from phalanx.cli.tables import Cell, Column
from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.planner.facts.prices import PriceEntry
    from phalanx.wire.api.cost import InvoiceLineView
    from phalanx.wire.api.pools import PoolView

OLD_DAYS: Final = 90  # prices of clouds change a few times a year
_PRICE: Final = re.compile(r"\$?([0-9]{1,6}(?:\.[0-9]{1,6})?)")


class RentPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU-hour costs rented, and what the use of the own GPUs would have cost.

    Attributes:
        kind: on-demand, spot, capacity block, ...; or `pool` for a pool of the head.
        break_even: share of the time in which an own GPU must be used for owning to cost the same; None without the cost of an own one.
        cheaper: `own` or `rent`, for the measured use; empty without the cost of an own one.
    """

    kind: str
    offer: str
    usd_per_gpu_hour: float
    date: str
    age_days: int
    source: str
    use_rented_usd: float
    break_even: float | None = None
    cheaper: str = ""


class OwnedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Own GPUs of one model in the period. `own_usd_per_gpu_hour`: used or not; None if their price is unknown or in another currency."""

    gpu: str
    gpu_hours: float
    used_gpu_hours: float
    utilization: float
    own_usd: float | None
    own_usd_per_gpu_hour: float | None
    rented_gpu_hours: float
    rents: list[RentPrice]


class OwnOrRent(msgspec.Struct, frozen=True, kw_only=True):
    """The report."""

    since_s: float
    until_s: float
    models: list[OwnedModel]


@report_kind("own-or-rent")
@click.option(
    "--own-price",
    multiple=True,
    metavar="GPU=USD",
    help="Cost of an own GPU-hour, used or not, in US dollars; in place of `phalanx prices`.",
)
def own_or_rent(head: Client, period: Period, *, own_price: tuple[str, ...]) -> ReportTable:
    """What the use of own GPUs would have cost rented, and at which utilisation owning pays.

    Own GPUs cost what `phalanx prices` says, used or not. Prices of clouds are facts with a date (`phalanx prices offers`).

    \b
    phalanx report own-or-rent --month 2026-11
    phalanx report own-or-rent --own-price h100=2.10 --json
    """  # noqa: D301 - click reads the backspace character itself
    from phalanx.planner.facts.prices import read_prices

    own = dict(map(parse_own_price, own_price))
    found = head.invoice(since_s=period.since_s, until_s=period.until_s)
    today = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), tz=UTC).date()
    models = compare_models(found.lines, found.currency, own, read_prices(), head.pools(), today)
    return own_or_rent_table(OwnOrRent(since_s=found.since_s, until_s=found.until_s, models=models), found.currency)


def compare_models(
    lines: Sequence[InvoiceLineView],
    currency: str,
    own_prices: Mapping[str, float],
    facts: Sequence[PriceEntry],
    pools: Sequence[PoolView],
    today: date,
) -> list[OwnedModel]:
    """Compare each model of which there are GPUs outside of pools.

    Args:
        lines: of the invoice; those without a pool are own GPUs.
        currency: of its costs.
        own_prices: US dollars for an own GPU-hour, by a name of the GPU, in place of the costs.
        facts: prices of clouds.
        pools: of the head, whose price counts as of today.
        today: for the age of prices.
    """
    stated = {_gpu_name(gpu): usd for gpu, usd in own_prices.items()}
    found = []
    for gpu in sorted({line.gpu for line in lines if not line.pool}):
        own = [line for line in lines if line.gpu == gpu and not line.pool]
        hours = sum(line.gpu_hours for line in own)
        used = hours - sum(line.idle_gpu_hours for line in own)
        name = _gpu_name(gpu)
        usd_per_h = stated.get(name)
        if usd_per_h is None and currency == "USD" and hours and all(line.prices for line in own):
            usd_per_h = sum(line.cost_cents for line in own) / 100.0 / hours
        utilization = used / hours if hours else 0.0
        found.append(
            OwnedModel(
                gpu=gpu,
                gpu_hours=hours,
                used_gpu_hours=used,
                utilization=utilization,
                own_usd=None if usd_per_h is None else usd_per_h * hours,
                own_usd_per_gpu_hour=usd_per_h,
                rented_gpu_hours=sum(line.gpu_hours for line in lines if line.gpu == gpu and line.pool),
                rents=[
                    _rent(kind, offer, usd, day, source, today, used, usd_per_h, utilization)
                    for kind, offer, usd, day, source in [*_of_pools(gpu, lines, pools, today), *_of_facts(name, facts)]
                ],
            )
        )
    return found


def _of_facts(name: str, facts: Sequence[PriceEntry]) -> list[tuple[str, str, float, str, str]]:
    """The newest price of each kind."""
    from phalanx.planner.facts.prices import find_price

    found = []
    for kind in dict.fromkeys(entry.price.kind for entry in facts if entry.gpu == name):
        price = find_price(name, facts, kind=kind)
        if price is not None:
            found.append((kind, price.offer, price.usd_per_gpu_hour, price.fact.date, price.fact.source))
    return sorted(found, key=lambda each: each[2])


def _of_pools(
    gpu: str, lines: Sequence[InvoiceLineView], pools: Sequence[PoolView], today: date
) -> list[tuple[str, str, float, str, str]]:
    """The prices of pools that had nodes with this model, or whose template names it."""
    had = {line.pool for line in lines if line.gpu == gpu}
    return [
        ("pool", pool.id, pool.price_per_h / pool.devices, today.isoformat(), "price of the pool")
        for pool in pools
        if pool.price_per_h > 0.0 and pool.devices and (pool.id in had or pool.node.rpartition(":")[0] == gpu)
    ]


def _rent(
    kind: str,
    offer: str,
    usd: float,
    day: str,
    source: str,
    today: date,
    used_gpu_hours: float,
    own_usd: float | None,
    utilization: float,
) -> RentPrice:
    break_even = None if own_usd is None or not usd else own_usd / usd
    return RentPrice(
        kind=kind,
        offer=offer,
        usd_per_gpu_hour=usd,
        date=day,
        age_days=max(0, (today - first_day(day)).days),
        source=source,
        use_rented_usd=used_gpu_hours * usd,
        break_even=break_even,
        cheaper="" if break_even is None else "own" if utilization >= break_even else "rent",
    )


def own_or_rent_table(found: OwnOrRent, currency: str) -> ReportTable:
    """The report as a table: a row for each model and price."""
    columns = (
        Column(title="GPU", min_width=8),
        Column(title="GPU-HOURS", right=True),
        Column(title="USED", right=True),
        Column(title="OWN USD/H", right=True),
        Column(title="OWN USD", right=True),
        Column(title="RENTED AS", min_width=8),
        Column(title="USD/H", right=True),
        Column(title="DAYS OLD", right=True),
        Column(title="USE RENTED USD", right=True),
        Column(title="BREAK-EVEN", right=True),
        Column(title="CHEAPER"),
    )
    rows = [row for model in found.models for row in _rows(model)]
    csv_rows = [
        [
            "gpu",
            "gpu_hours",
            "used_gpu_hours",
            "own_usd_per_gpu_hour",
            "own_usd",
            "kind",
            "offer",
            "usd_per_gpu_hour",
            "date",
            "age_days",
            "use_rented_usd",
            "break_even",
            "cheaper",
        ]
    ]
    csv_rows += [_csv_row(model, rent) for model in found.models for rent in model.rents]
    return ReportTable(
        title="Own or rent",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=rows,
        csv_rows=csv_rows,
        notes=list(_notes(found, currency)),
        empty="no GPU-hours of own nodes in this period",
        next_command="phalanx prices offers h100",
    )


def _rows(model: OwnedModel) -> list[list[Cell | str]]:
    head: list[Cell | str] = [
        Cell(model.gpu, "bold"),
        hours_text(model.gpu_hours),
        f"{model.utilization:.0%}",
        "" if model.own_usd_per_gpu_hour is None else f"{model.own_usd_per_gpu_hour:.2f}",
        "" if model.own_usd is None else f"{model.own_usd:,.0f}",
    ]
    if not model.rents:
        return [[*head, "no price known", "", "", "", "", ""]]
    rows: list[list[Cell | str]] = []
    for rent in model.rents:
        rows.append(
            [
                *(head if not rows else ["", "", "", "", ""]),
                f"{rent.kind}: {rent.offer}",
                f"{rent.usd_per_gpu_hour:.2f}",
                str(rent.age_days),
                f"{rent.use_rented_usd:,.0f}",
                "" if rent.break_even is None else f"{rent.break_even:.0%}",
                rent.cheaper,
            ]
        )
    return rows


def _csv_row(model: OwnedModel, rent: RentPrice) -> list[str]:
    own = (model.own_usd_per_gpu_hour, model.own_usd)
    return [
        model.gpu,
        f"{model.gpu_hours:.9f}",
        f"{model.used_gpu_hours:.9f}",
        *("" if value is None else f"{value:.6f}" for value in own),
        rent.kind,
        rent.offer,
        f"{rent.usd_per_gpu_hour:.6f}",
        rent.date,
        str(rent.age_days),
        f"{rent.use_rented_usd:.6f}",
        "" if rent.break_even is None else f"{rent.break_even:.6f}",
        rent.cheaper,
    ]


def _notes(found: OwnOrRent, currency: str) -> list[str]:
    notes = [
        "owning pays if own GPUs are used for more than BREAK-EVEN of the time; rented ones are counted while used"
    ]
    unknown = [model.gpu for model in found.models if model.own_usd_per_gpu_hour is None]
    if unknown:
        why = f"prices are in {currency}" if currency not in ("", "USD") else "no price holds for all of its time"
        notes.append(f"cost of own {', '.join(unknown)} unknown ({why}): give --own-price GPU=USD")
    old = sorted({(rent.age_days, rent.offer) for model in found.models for rent in model.rents})
    if old and old[-1][0] > OLD_DAYS:
        notes.append(
            f"the oldest price, of {old[-1][1]}, is {old[-1][0]} days old: `phalanx prices offers` has the sources"
        )
    return notes


def parse_own_price(word: str) -> tuple[str, float]:
    """Return GPU and US dollars of `h100=2.10`.

    Raises:
        BadRequest: it has another form.
    """
    gpu, _, text = word.partition("=")
    match = _PRICE.fullmatch(text)
    if not gpu or match is None:
        raise BadRequest(f"--own-price {word!r} is not GPU=USD", hint="--own-price h100=2.10")
    return gpu, float(match[1])


def _gpu_name(text: str) -> str:
    """The name in the table of GPUs; as it is written if the table has none."""
    from phalanx.planner.facts.gpus import find_gpu

    try:
        return find_gpu(text).gpu.name
    except BadRequest:
        return text.lower()
