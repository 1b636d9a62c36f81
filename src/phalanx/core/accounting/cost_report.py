"""What GPU time costs: the hours of the ledger of states times the prices. Exact: integers up to the line of an invoice, which is rounded once.

A line of the invoice is all time of one GPU model in one pool in one month (UTC). Its exact cost is rounded to the hundredth of the currency,
halves up. Rows of a report divide the rounded line by largest remainder, so they add up to the invoice to the hundredth, and none is negative.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

from phalanx.core.months import month_of
from phalanx.core.work.usage.price_list import MICRO, GpuPrice, PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow

K = TypeVar("K")
HOUR_US: Final = 3_600_000_000
CENT: Final = MICRO // 100 * HOUR_US
"""A hundredth of the currency in the unit of exact costs: a millionth of it, for a GPU-microsecond at a price for an hour."""


class CostKey(enum.StrEnum):
    """By what a report of cost groups its rows. GPU: the model of the devices."""

    PROJECT = "project"
    USER = "user"
    QUEUE = "queue"
    GPU = "gpu"
    POOL = "pool"
    JOB = "job"


class IdleRule(enum.StrEnum):
    """Who bears the cost of GPUs that no job holds.

    NONE: a row of its own. BY_USE: in each line of the invoice, jobs in proportion to their GPU time. BY_QUOTA: queues in proportion to their
    quotas, and in each queue its jobs in proportion to their GPU time; a queue without jobs bears its share itself.
    """

    NONE = "none"
    BY_USE = "by-use"
    BY_QUOTA = "by-quota"


class LineKey(NamedTuple):
    """One line of an invoice. `month`: as 2026-11; `pool`: "" for nodes of no pool."""

    month: str
    pool: str
    model: str


class Holder(NamedTuple):
    """Who held a GPU; all empty for none."""

    project: str = ""
    user: str = ""
    queue: str = ""
    job: str = ""


@dataclass(slots=True)
class Amount:
    """GPU time in GPU-microseconds, its exact cost in units of `CENT`, and the part of the time that has no price."""

    gpu_us: int = 0
    exact: int = 0
    unpriced_us: int = 0

    def add(self, other: Amount) -> None:
        """Add another one."""
        self.gpu_us += other.gpu_us
        self.exact += other.exact
        self.unpriced_us += other.unpriced_us

    def minus(self, other: Amount) -> Amount:
        """What remains without the other one."""
        return Amount(self.gpu_us - other.gpu_us, self.exact - other.exact, self.unpriced_us - other.unpriced_us)

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.gpu_us + other.gpu_us, self.exact + other.exact, self.unpriced_us + other.unpriced_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """One line: `cents` is its exact cost, rounded. `prices`: those that held in the period, in time's order. `idle_us`: of its time, without a job."""

    key: LineKey
    amount: Amount
    idle_us: int
    cents: int
    prices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One row. `used` is what its jobs held, `idle` its part of GPUs that no job held.

    Attributes:
        key: "" for what belongs to none.
        merged: rows that are added up in this one because there were too many; 0 for a row of its own.
    """

    key: str
    used: Amount
    idle: Amount
    used_cents: int
    idle_cents: int
    merged: int = 0

    @property
    def cents(self) -> int:
        """What the row costs."""
        return self.used_cents + self.idle_cents

    def plus(self, other: CostRow) -> CostRow:
        """Both together, under the key of this one."""
        return CostRow(
            key=self.key,
            used=self.used.plus(other.used),
            idle=self.idle.plus(other.idle),
            used_cents=self.used_cents + other.used_cents,
            idle_cents=self.idle_cents + other.idle_cents,
            merged=self.merged,
        )


@dataclass(slots=True)
class MeteredLine:
    """The time of one invoice line, by who held the GPUs. `prices`: of an hour, in millionths of the currency, by their order."""

    held: dict[Holder, Amount] = field(default_factory=dict)
    idle: Amount = field(default_factory=Amount)
    prices: dict[int, None] = field(default_factory=dict)

    def total(self) -> Amount:
        """All of it."""
        found = Amount()
        for amount in (*self.held.values(), self.idle):
            found.add(amount)
        return found


Metered = dict[LineKey, MeteredLine]


def meter(hours: Iterable[UsageHour], book: PriceBook) -> Metered:
    """The time and exact cost of these hours, by invoice line and by who held the GPUs. Hours must be in the order of time."""
    lines: Metered = {}
    for hour in hours:
        hour_s = int(hour.id)
        month = month_of(hour_s)
        for row in hour.rows:
            line = lines.setdefault(LineKey(month, row.pool, row.model), MeteredLine())
            price = book.price(row.model, row.pool, hour_s)
            amount = priced(row, price)
            if price is not None:
                line.prices[price.micro] = None
            if row.job:
                line.held.setdefault(Holder(row.project, row.user, row.queue, row.job), Amount()).add(amount)
            else:
                line.idle.add(amount)
    return lines


def meter_by_period(hours: Iterable[UsageHour], book: PriceBook, period_s: int) -> list[tuple[int, Metered]]:
    """As `meter`, for equal periods that begin at multiples of `period_s` since the Unix epoch, each with its begin."""
    periods = groupby(hours, key=lambda hour: int(hour.id) // period_s * period_s)
    return [(since_s, meter(group, book)) for since_s, group in periods]


def priced(row: UsageRow, price: GpuPrice | None) -> Amount:
    """The time of a row of one hour at its price."""
    gpu_us = sum(amount for _, _, amount in row.amounts)
    if price is None:
        return Amount(gpu_us, 0, gpu_us)
    return Amount(gpu_us, gpu_us * price.micro)


def invoice(lines: Metered) -> list[InvoiceLine]:
    """The lines of the invoice, by month, pool and model."""
    found = []
    for key in sorted(lines):
        total = lines[key].total()
        found.append(
            InvoiceLine(
                key=key,
                amount=total,
                idle_us=lines[key].idle.gpu_us,
                cents=to_cents(total.exact),
                prices=tuple(lines[key].prices),
            )
        )
    return found


def to_cents(exact: int) -> int:
    """An exact cost, rounded to hundredths of the currency; halves up."""
    return (exact + CENT // 2) // CENT


def cost_rows(
    lines: Metered, by: CostKey, rule: IdleRule, *, quotas: Mapping[str, int], rows_max: int
) -> list[CostRow]:
    """The rows, the most expensive first. Their cents add up to those of the invoice, and their time to that of the fleet.

    Args:
        lines: what was metered.
        by: of the rows.
        rule: who bears idle GPUs.
        quotas: of each queue what it has beyond those below it, for `BY_QUOTA`.
        rows_max: rows past it are added up in one last row.
    """
    rows: dict[str, CostRow] = {}
    for line_key in sorted(lines):
        line = lines[line_key]
        parts: dict[tuple[str, bool], Amount] = {}
        for holder, amount in line.held.items():
            parts.setdefault((_key_of(holder, line_key, by), False), Amount()).add(amount)
        for holder, amount in share_idle(line, rule, quotas):
            parts.setdefault((_key_of(holder, line_key, by), True), Amount()).add(amount)
        names = sorted(parts)
        cents = apportion(to_cents(sum(parts[one].exact for one in names)), [parts[one].exact for one in names])
        for (key, idle), share in zip(names, cents, strict=True):
            none, part = Amount(), parts[key, idle]
            row = (
                CostRow(key=key, used=none, idle=part, used_cents=0, idle_cents=share)
                if idle
                else CostRow(key=key, used=part, idle=none, used_cents=share, idle_cents=0)
            )
            rows[key] = rows[key].plus(row) if key in rows else row
    ordered = sorted(rows.values(), key=lambda row: (-row.cents, -row.used.gpu_us - row.idle.gpu_us, row.key))
    return _limited(ordered, rows_max)


def share_idle(line: MeteredLine, rule: IdleRule, quotas: Mapping[str, int]) -> list[tuple[Holder, Amount]]:
    """Who bears the idle time of a line, and how much of it. What the rule cannot give to any stays with no holder."""
    if not line.idle.gpu_us:
        return []
    # A row of the ledger may have energy that was read late, and no time.
    use = {holder: amount.gpu_us for holder, amount in line.held.items() if amount.gpu_us}
    if rule is IdleRule.BY_USE and use:
        return _split(line.idle, use)
    rights = {queue: right for queue, right in quotas.items() if right > 0}
    if rule is not IdleRule.BY_QUOTA or not rights:
        return [(Holder(), line.idle)]
    found, by_queue = [], dict[str, dict[Holder, int]]()
    for holder, gpu_us in use.items():
        by_queue.setdefault(holder.queue, {})[holder] = gpu_us
    for queue, share in _split(line.idle, rights):
        users = by_queue.get(queue)
        found += _split(share, users) if users else [(Holder(queue=queue), share)]
    return found


def apportion(cents: int, exact: Sequence[int]) -> list[int]:
    """Divide a rounded sum among its exact parts by largest remainder: each gets its cost rounded down, or a hundredth more.

    Of equal remainders, the earlier part gets it.
    """
    floors = [part // CENT for part in exact]
    left = cents - sum(floors)
    by_remainder = sorted(range(len(exact)), key=lambda index: (-(exact[index] % CENT), index))
    for index in by_remainder[:left]:
        floors[index] += 1
    return floors


def _split(amount: Amount, weights: Mapping[K, int]) -> list[tuple[K, Amount]]:
    """Divide an amount in proportion to weights, of which one is positive; integers that add up exactly."""
    total = sum(weights.values())
    found: list[tuple[K, Amount]] = []
    done, before = 0, Amount()
    for name, weight in weights.items():
        done += weight
        upto = Amount(amount.gpu_us * done // total, amount.exact * done // total, amount.unpriced_us * done // total)
        found.append((name, upto.minus(before)))
        before = upto
    return found


def _key_of(holder: Holder, line: LineKey, by: CostKey) -> str:
    match by:
        case CostKey.PROJECT:
            return holder.project
        case CostKey.USER:
            return holder.user
        case CostKey.QUEUE:
            return holder.queue
        case CostKey.GPU:
            return line.model
        case CostKey.POOL:
            return line.pool
        case CostKey.JOB:
            return holder.job


def _limited(rows: list[CostRow], rows_max: int) -> list[CostRow]:
    shown, rest = rows[:rows_max], rows[rows_max:]
    if rest:
        merged = CostRow(key="", used=Amount(), idle=Amount(), used_cents=0, idle_cents=0, merged=len(rest))
        for row in rest:
            merged = merged.plus(row)
        shown.append(merged)
    return shown
