"""Adds up the energy of hours of the ledger by project, user, queue, GPU model or job, with its cost and CO2. Sums are integers, so they are exact."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.accounting.energy_ledger import EnergySource
from phalanx.core.accounting.usage_report import UsageKey, row_key
from phalanx.core.work.usage.electricity import ElectricityRate
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow

KWH_MJ: Final = 3_600_000_000  # millijoules
_PUE: Final = 1000  # `ElectricityRate` counts thousandths


@dataclass(slots=True)
class EnergySum:
    """One row. Times are GPU-microseconds: a thousandth of a device for a millisecond.

    Attributes:
        counter_mj, integrated_mj: millijoules that devices counted themselves, and of power that was added up.
        covered: time of which the energy is known.
        gpu_us: all time.
        throttled: by cause, time in which clocks were held down.
        cost: millijoules times thousandths (PUE) times millionths of the currency; without what has no price.
        co2: the same, with thousandths of a gram in place of money.
        unpriced_mj, unrated_mj: millijoules without a price, and without a figure of CO2.
    """

    key: str = ""
    counter_mj: int = 0
    integrated_mj: int = 0
    covered: int = 0
    gpu_us: int = 0
    cost: int = 0
    co2: int = 0
    unpriced_mj: int = 0
    unrated_mj: int = 0
    merged: int = 0
    throttled: dict[str, int] = field(default_factory=dict)

    @property
    def millijoules(self) -> int:
        """The energy."""
        return self.counter_mj + self.integrated_mj

    @property
    def mean_w(self) -> float | None:
        """The mean power of a GPU while its energy is known."""
        return self.millijoules * 1000 / self.covered if self.covered else None

    @property
    def unknown(self) -> int:
        """Time of which nothing counted the energy."""
        return max(0, self.gpu_us - self.covered)

    @property
    def cost_micro(self) -> int | None:
        """The cost in millionths of the currency, rounded; None if nothing has a price."""
        return None if self.unpriced_mj == self.millijoules else _rounded(self.cost, KWH_MJ * _PUE)

    @property
    def gco2(self) -> float | None:
        """Grams of CO2; None if nothing has a figure."""
        return None if self.unrated_mj == self.millijoules else self.co2 / (KWH_MJ * _PUE * 1000)

    def add(self, other: EnergySum) -> None:
        """Add another one."""
        self.counter_mj += other.counter_mj
        self.integrated_mj += other.integrated_mj
        self.covered += other.covered
        self.gpu_us += other.gpu_us
        self.cost += other.cost
        self.co2 += other.co2
        self.unpriced_mj += other.unpriced_mj
        self.unrated_mj += other.unrated_mj
        for cause, amount in other.throttled.items():
            self.throttled[cause] = self.throttled.get(cause, 0) + amount


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyTotals:
    """Rows, the largest first, and their sum.

    Attributes:
        metered_mj: what the meters of all devices counted; equal to the energy of the sum.
        rates: those that held in these hours, by time.
    """

    rows: tuple[EnergySum, ...]
    total: EnergySum
    metered_mj: int
    rates: tuple[ElectricityRate, ...] = field(default=())


def sum_energy(
    hours: Iterable[UsageHour], by: UsageKey, rates: Sequence[ElectricityRate], *, rows_max: int
) -> EnergyTotals:
    """The energy of these hours. `rates`: by time. Rows past `rows_max` are added up in one last row."""
    sums: dict[str, EnergySum] = {}
    starts, used, metered_mj = [rate.from_s for rate in rates], dict[int, ElectricityRate](), 0
    for hour in hours:
        metered_mj += hour.millijoules
        place = bisect_right(starts, int(hour.id))
        rate = rates[place - 1] if place else None
        if rate is not None:
            used[rate.from_s] = rate
        for row in hour.rows:
            key = row_key(row, by)
            sums.setdefault(key, EnergySum(key=key)).add(_of(row, rate))
    ordered = sorted(sums.values(), key=lambda one: (-one.millijoules, -one.gpu_us, one.key))
    total = EnergySum()
    for one in ordered:
        total.add(one)
    shown, rest = ordered[:rows_max], ordered[rows_max:]
    if rest:
        merged = EnergySum(merged=len(rest))
        for one in rest:
            merged.add(one)
        shown.append(merged)
    return EnergyTotals(rows=tuple(shown), total=total, metered_mj=metered_mj, rates=tuple(used.values()))


def _of(row: UsageRow, rate: ElectricityRate | None) -> EnergySum:
    found = EnergySum(gpu_us=sum(amount for _, _, amount in row.amounts), throttled=dict(row.throttled))
    for source, millijoules, covered in row.energy:
        if source == EnergySource.COUNTER:
            found.counter_mj += millijoules
        else:
            found.integrated_mj += millijoules
        found.covered += covered
    if rate is None or rate.micro_per_kwh is None:
        found.unpriced_mj = found.millijoules
    else:
        found.cost = found.millijoules * rate.pue_milli * rate.micro_per_kwh
    if rate is None or rate.gco2_milli_per_kwh is None:
        found.unrated_mj = found.millijoules
    else:
        found.co2 = found.millijoules * rate.pue_milli * rate.gco2_milli_per_kwh
    return found


def _rounded(amount: int, unit: int) -> int:
    return (amount + unit // 2) // unit
