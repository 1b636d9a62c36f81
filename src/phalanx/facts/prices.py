"""The table of prices: what one GPU costs per hour, where, since when. A price without a date is refused: it would be a rumour."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.performance.machine import Fact, Price
from phalanx.facts.files import shipped_text, text_at
from phalanx.facts.gpus import GpuEntry, gpu_in, read_gpus
from phalanx.facts.table import Columns, Row, is_date, laid_over, rows_of

COLUMNS: Final = Columns(needed=("offer", "gpu", "kind", "usd_per_gpu_hour"), free=("region", "note"))
ON_DEMAND: Final = "on-demand"
USD_PER_GPU_HOUR_MAX: Final = 50.0  # three times the dearest offer known; a larger one is the price of a whole server


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceEntry:
    """One row: the price, and the GPU (a name of the table of GPUs) that it is for. `own` rows are a user's, not shipped."""

    gpu: str
    price: Price
    note: str = ""
    own: bool = False


def read_prices(*paths: str, gpus: Sequence[GpuEntry] | None = None) -> tuple[PriceEntry, ...]:
    """The shipped table, then the tables at `paths`: a row there replaces those of its offer, kind and region. `gpus` is the table in which
    the column `gpu` is looked up, the shipped one by default.

    Raises:
        BadFile: a table is not what it should be, or a price has no date; file, line and column are named.
    """
    return laid_over(_shipped(), (prices_in(text_at(path), path, own=True, gpus=gpus) for path in paths), _key)


@cache
def _shipped() -> tuple[PriceEntry, ...]:
    return prices_in(shipped_text("prices.csv"), "prices.csv")


def prices_in(
    text: str, where: str, *, own: bool = False, gpus: Sequence[GpuEntry] | None = None
) -> tuple[PriceEntry, ...]:
    """The prices of one table's text.

    Raises:
        BadFile: as `read_prices`.
    """
    known = read_gpus() if gpus is None else gpus
    return tuple(_entry(row, own, known) for row in rows_of(text, where, COLUMNS))


def _key(entry: PriceEntry) -> tuple[str, str, str, str]:
    price = entry.price
    return (price.offer.lower(), entry.gpu, price.kind, price.region)


def _entry(row: Row, own: bool, gpus: Sequence[GpuEntry]) -> PriceEntry:
    usd = row.number("usd_per_gpu_hour")
    if usd > USD_PER_GPU_HOUR_MAX:
        raise row.wrong("usd_per_gpu_hour", f"{usd:g} US dollars for one GPU and hour cannot be",
                        hint="divide the price of the instance by its GPUs")  # fmt: skip
    price = Price(
        usd_per_gpu_hour=usd,
        kind=row.text("kind").lower(),
        offer=row.text("offer"),
        region=row.text("region"),
        fact=row.fact(),
    )
    return PriceEntry(gpu=gpu_in(row, gpus), price=price, note=row.text("note"), own=own)


def stated_price(usd_per_gpu_hour: float, date: str | None, *, source: str = "given by the user") -> Price:
    """The price a user states.

    Raises:
        BadRequest: it has no date, or is no price.
    """
    if not math.isfinite(usd_per_gpu_hour) or not 0 <= usd_per_gpu_hour <= USD_PER_GPU_HOUR_MAX:
        raise BadRequest(f"price: {usd_per_gpu_hour:g} US dollars for one GPU and hour cannot be",
                         hint="divide the price of the instance by its GPUs")  # fmt: skip
    if not date:
        raise BadRequest(f"price: {usd_per_gpu_hour:g} US dollars per GPU and hour, but as of when?",
                         hint="add --price-date 2026-11; prices without a date are refused")  # fmt: skip
    if not is_date(date):
        raise BadRequest(f"price: {date!r} is no date", hint="write 2026, 2026-11 or 2026-11-21")
    fact = Fact(source=source, date=date)
    return Price(usd_per_gpu_hour=usd_per_gpu_hour, kind="given", offer="own price", region="", fact=fact)


def price_of(
    gpu: str, prices: Sequence[PriceEntry], *, offers: Collection[str] = (), kind: str = ON_DEMAND
) -> Price | None:
    """The price to count with: of that kind and GPU (a name of the table of GPUs), the newest, then the cheapest, then by offer and
    region; None where none is known. Only those of `offers`, any case; of all where empty.
    """
    among = {offer.lower() for offer in offers}
    found = [
        entry.price
        for entry in prices
        if entry.gpu == gpu and entry.price.kind == kind and (not among or entry.price.offer.lower() in among)
    ]
    if not found:
        return None
    newest = max(price.fact.date for price in found)
    return min(
        (price for price in found if price.fact.date == newest),
        key=lambda price: (price.usd_per_gpu_hour, price.offer, price.region),
    )
