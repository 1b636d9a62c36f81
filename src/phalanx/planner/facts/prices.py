"""Read the table of prices per GPU and hour, by offer and region. Prices must have a date."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.planner.cost.machine import FactSource, Price
from phalanx.planner.facts.gpus import GpuEntry, read_gpus, resolve_gpu_column
from phalanx.planner.facts.table import (
    TableColumns,
    TableRow,
    is_date,
    merge_tables,
    read_rows,
)
from phalanx.planner.facts.table_files import read_text, shipped_text

COLUMNS: Final = TableColumns(required=("offer", "gpu", "kind", "usd_per_gpu_hour"), optional=("region", "note"))
ON_DEMAND: Final = "on-demand"
USD_PER_GPU_HOUR_MAX: Final = (
    50.0  # three times the most expensive known offer; a larger one is the price of a whole server
)

_PER_GPU_HINT: Final = "divide the price of the instance by its GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceEntry:
    """One row: a price and its GPU (a name in the table of GPUs). `user_supplied` marks rows of the user."""

    gpu: str
    price: Price
    note: str = ""
    user_supplied: bool = False


def read_prices(*paths: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[PriceEntry, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same offer, kind and region.

    `gpus` is the table for the column `gpu`, by default the shipped one.

    Raises:
        BadFile: a table is invalid, or a price has no date; file, line and column are named.
    """
    return merge_tables(
        _shipped(), (parse_price_table(read_text(path), path, own=True, gpus=gpus) for path in paths), _key
    )


@cache
def _shipped() -> tuple[PriceEntry, ...]:
    return parse_price_table(shipped_text("prices.csv"), "prices.csv")


def parse_price_table(
    text: str, where: str, *, own: bool = False, gpus: Sequence[GpuEntry] | None = None
) -> tuple[PriceEntry, ...]:
    """Return the prices in the text of a table.

    Raises:
        BadFile: as for `read_prices`.
    """
    known = read_gpus() if gpus is None else gpus
    return tuple(_entry(row, own, known) for row in read_rows(text, where, COLUMNS))


def _key(entry: PriceEntry) -> tuple[str, str, str, str]:
    price = entry.price
    return (price.offer.lower(), entry.gpu, price.kind, price.region)


def _entry(row: TableRow, own: bool, gpus: Sequence[GpuEntry]) -> PriceEntry:
    usd = row.number("usd_per_gpu_hour")
    if usd > USD_PER_GPU_HOUR_MAX:
        raise row.error("usd_per_gpu_hour", _out_of_range(usd), hint=_PER_GPU_HINT)
    price = Price(
        usd_per_gpu_hour=usd,
        kind=row.text("kind").lower(),
        offer=row.text("offer"),
        region=row.text("region"),
        fact=row.fact(),
    )
    return PriceEntry(gpu=resolve_gpu_column(row, gpus), price=price, note=row.text("note"), user_supplied=own)


def _out_of_range(usd: float) -> str:
    return f"{usd:g} US dollars per GPU and hour is outside 0 to {USD_PER_GPU_HOUR_MAX:g}"


def user_price(usd_per_gpu_hour: float, date: str | None, *, source: str = "given by the user") -> Price:
    """Return the price that a user states.

    Raises:
        BadRequest: the date is missing or invalid, or the price is out of range.
    """
    if not math.isfinite(usd_per_gpu_hour) or not 0 <= usd_per_gpu_hour <= USD_PER_GPU_HOUR_MAX:
        raise BadRequest(f"price: {_out_of_range(usd_per_gpu_hour)}", hint=_PER_GPU_HINT)
    if not date:
        raise BadRequest(
            f"price: {usd_per_gpu_hour:g} US dollars per GPU and hour has no date",
            hint=Hint(HintCode.GIVE_VALUE, key="price_date", value="2026-11"),
        )
    if not is_date(date):
        raise BadRequest(f"price: {date!r} is not a date", hint="write 2026, 2026-11 or 2026-11-21")
    fact = FactSource(source=source, date=date)
    return Price(usd_per_gpu_hour=usd_per_gpu_hour, kind="given", offer="own price", region="", fact=fact)


def find_price(
    gpu: str, prices: Sequence[PriceEntry], *, offers: Collection[str] = (), kind: str = ON_DEMAND
) -> Price | None:
    """Return the price to use for a GPU (a name in the table of GPUs) and kind: the newest, then the cheapest, then by offer and region.

    `offers`, if not empty, limits the search to these offers; case is ignored. None if no price is known.
    """
    allowed = {offer.lower() for offer in offers}
    found = [
        entry.price
        for entry in prices
        if entry.gpu == gpu and entry.price.kind == kind and (not allowed or entry.price.offer.lower() in allowed)
    ]
    if not found:
        return None
    newest = max(price.fact.date for price in found)
    return min(
        (price for price in found if price.fact.date == newest),
        key=lambda price: (price.usd_per_gpu_hour, price.offer, price.region),
    )
