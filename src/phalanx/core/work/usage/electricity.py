"""Rates of electricity, each from a full hour on: the price of a kWh, the overhead of the building, and the CO2 of the grid. Amounts are integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

RATES_MAX: Final = 500  # ten years with a rate for each week; an answer lists all of them
PUE_MILLI: Final = 1000  # a building without overhead
PUE_MILLI_MAX: Final = 5000  # of a building that wastes four fifths


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectricityRate:
    """What holds from an hour on, until the next rate.

    Attributes:
        from_s: Unix seconds; a full hour.
        micro_per_kwh: millionths of the currency of the price list; None if unknown.
        pue_milli: thousandths of the power usage effectiveness: energy of the building for that of its machines.
        gco2_milli_per_kwh: thousandths of a gram of CO2 for a kWh from the grid; None if unknown.
        source: where they come from.
    """

    from_s: int
    micro_per_kwh: int | None = None
    pue_milli: int = PUE_MILLI
    gco2_milli_per_kwh: int | None = None
    source: str = ""


def check_rate(rate: ElectricityRate) -> ElectricityRate:
    """Check one rate, and return it.

    Raises:
        BadRequest: it says nothing, or has an impossible overhead.
    """
    if rate.micro_per_kwh is None and rate.gco2_milli_per_kwh is None:
        raise BadRequest("a rate of electricity needs per_kwh or gco2_per_kwh")
    if not PUE_MILLI <= rate.pue_milli <= PUE_MILLI_MAX:
        raise BadRequest(f"pue: {rate.pue_milli / PUE_MILLI:g} is not from 1 to {PUE_MILLI_MAX // PUE_MILLI}")
    return rate


def check_rates(rates: Iterable[ElectricityRate]) -> tuple[ElectricityRate, ...]:
    """The rates by time.

    Raises:
        BadRequest: too many, or two for the same hour.
    """
    found: dict[int, ElectricityRate] = {}
    for rate in rates:
        if rate.from_s in found:
            raise BadRequest("two rates of electricity begin at the same hour")
        found[rate.from_s] = rate
    if len(found) > RATES_MAX:
        raise BadRequest(f"{len(found)} rates of electricity; at most {RATES_MAX} are allowed")
    return tuple(found[from_s] for from_s in sorted(found))
