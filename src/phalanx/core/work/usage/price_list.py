"""The prices of GPUs that the head stores: per GPU-hour, by model and pool, each from a full hour on. Amounts are integers.

An amount of money has millionths of its currency, so no sum is ever rounded before it becomes an invoice line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.summary import model_fits
from phalanx.core.ids import UserId
from phalanx.core.work.job_file.begin_time import parse_begin_s
from phalanx.core.work.usage.electricity import PUE_MILLI, ElectricityRate, check_rate

PRICES: Final = "prices"
"""The id of the only document: operators replace it whole."""
PRICES_MAX: Final = 1000  # ten models in ten pools with ten prices each; an answer lists all of them
MICRO: Final = 1_000_000  # of one unit of the currency
NAME_CHARS_MAX: Final = 80
SOURCE_CHARS_MAX: Final = 200
HOUR_S: Final = 3600
_PRICE: Final = re.compile(r"(\d{1,9})(?:\.(\d{1,6}))?", re.ASCII)
_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice:
    """What one GPU costs for an hour, from an hour on.

    Attributes:
        gpu: the model, or words of it as in job files: "h100".
        pool: only nodes of this pool; "" for all nodes.
        from_s: Unix seconds; a full hour.
        micro: millionths of the currency for one GPU-hour.
        source: where the price comes from.
    """

    gpu: str
    from_s: int
    micro: int
    pool: str = ""
    source: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies it in a list."""
        return self.gpu, self.pool, self.from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """All prices and rates of electricity, in one currency (ISO 4217); who stored them, and when (Unix seconds)."""

    currency: str
    prices: tuple[GpuPrice, ...]
    by: UserId
    at_s: float
    id: str = PRICES
    electricity: tuple[ElectricityRate, ...] = ()


def parse_currency(text: str) -> str:
    """Check the code of a currency.

    Raises:
        BadRequest: it is not three capital letters.
    """
    if not _CURRENCY.fullmatch(text):
        raise BadRequest(f"currency: {text[:40]!r} is not a code of three capital letters", hint="currency: EUR")
    return text


def parse_price(gpu: str, since: str, amount: str, *, pool: str = "", source: str = "") -> GpuPrice:
    """Check one price.

    Args:
        gpu: the model or words of it.
        since: a date (UTC), or a date and time with its zone; "" for the beginning of 1970.
        amount: of the currency for one GPU-hour: digits and at most six decimals.
        pool: "" for nodes of all pools and of none.
        source: any text.

    Raises:
        BadRequest: a part is wrong; the message names it.
    """
    _check_texts(gpu=gpu, pool=pool, source=source)
    if not gpu.strip():
        raise BadRequest("gpu: a price needs the model of its GPU", hint="gpu: h100")
    return GpuPrice(gpu=gpu.strip(), pool=pool, from_s=_from_s(since), micro=parse_micro(amount), source=source)


def parse_rate(
    since: str, *, per_kwh: str = "", pue: str = "", gco2_per_kwh: str = "", source: str = ""
) -> ElectricityRate:
    """Check one rate of electricity.

    Args:
        since: as in `parse_price`.
        per_kwh: the price of a kWh; "" if unknown.
        pue: energy of the building for that of its machines, from 1 to 5; "" for 1.
        gco2_per_kwh: grams of CO2; "" if unknown.
        source: any text.

    Raises:
        BadRequest: a part is wrong; the message names it.
    """
    _check_texts(source=source)
    return check_rate(
        ElectricityRate(
            from_s=_from_s(since),
            micro_per_kwh=parse_micro(per_kwh, what="per_kwh") if per_kwh else None,
            pue_milli=parse_micro(pue, what="pue") // 1000 if pue else PUE_MILLI,
            gco2_milli_per_kwh=parse_micro(gco2_per_kwh, what="gco2_per_kwh") // 1000 if gco2_per_kwh else None,
            source=source,
        )
    )


def _check_texts(**texts: str) -> None:
    for name, text in texts.items():
        most = SOURCE_CHARS_MAX if name == "source" else NAME_CHARS_MAX
        if len(text) > most or not text.isprintable():
            raise BadRequest(f"{name}: expected at most {most} printable characters")


def _from_s(since: str) -> int:
    """Unix seconds of a full hour; 0 for the empty text."""
    if not since:
        return 0
    try:
        from_s = parse_begin_s(f"{since}T00:00Z" if _DATE.fullmatch(since) else since, now_s=None)
    except BadRequest:
        raise BadRequest(f"from: {since[:40]!r} is not a date", hint="write 2026-11-01 or 2026-11-01T06:00Z") from None
    if from_s % HOUR_S:
        raise BadRequest(
            f"from: {since} is not a full hour in UTC", hint="prices change on full hours, so that each hour has one"
        )
    return int(from_s)


def parse_micro(amount: str, *, what: str = "per_gpu_hour") -> int:
    """The millionths of an amount such as "2.49".

    Raises:
        BadRequest: not a number from 0 to 999999999 with at most six decimals.
    """
    found = _PRICE.fullmatch(amount.strip())
    if found is None:
        raise BadRequest(f"{what}: {amount[:40]!r} is not an amount", hint="write 2.49, with at most six decimals")
    return int(found[1]) * MICRO + int((found[2] or "").ljust(6, "0"))


def micro_text(micro: int) -> str:
    """Millionths as a decimal number, with two decimals or as many as it has."""
    whole, rest = divmod(micro, MICRO)
    return f"{whole}.{f'{rest:06d}'.rstrip('0').ljust(2, '0')}"


def check_prices(prices: Iterable[GpuPrice]) -> tuple[GpuPrice, ...]:
    """The prices by model, pool and time.

    Raises:
        BadRequest: too many, or two for the same model, pool and hour.
    """
    found: dict[tuple[str, str, int], GpuPrice] = {}
    for price in prices:
        if price.key in found:
            where = f" in pool {price.pool}" if price.pool else ""
            raise BadRequest(f"two prices of {price.gpu}{where} begin at the same hour")
        found[price.key] = price
    if len(found) > PRICES_MAX:
        raise BadRequest(f"{len(found)} prices; at most {PRICES_MAX} are allowed")
    return tuple(found[key] for key in sorted(found))


@dataclass(slots=True)
class PriceBook:
    """Finds the price of a GPU in an hour. A price for the pool wins over one for all; then the price with more words of the model."""

    prices: tuple[GpuPrice, ...]
    _known: dict[tuple[str, str], list[GpuPrice]] = field(default_factory=dict)

    def price(self, model: str, pool: str, hour_s: int) -> GpuPrice | None:
        """The price of a GPU of this model in a node of this pool, in the hour that begins then; None without a price."""
        fitting = self._known.get((model, pool))
        if fitting is None:
            fitting = self._known[model, pool] = self._fitting(model, pool)
        return next((price for price in fitting if price.from_s <= hour_s), None)

    def _fitting(self, model: str, pool: str) -> list[GpuPrice]:
        """Prices of this GPU at any time, the best first; of the same rank, the latest first."""
        fitting = [one for one in self.prices if one.pool in ("", pool) and model_fits(model, 0, one.gpu, 0)]
        return sorted(
            fitting,
            key=lambda one: (
                one.pool == "",
                -len(one.gpu.split()),
                -len(one.gpu),
                one.gpu.lower(),
                -one.from_s,
                one.gpu,
            ),
        )
