"""Adds up hours of the ledger of states by project, user, queue, GPU model or job. Sums are integers in GPU-microseconds, so they are exact."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow


class UsageKey(enum.StrEnum):
    """By what a report groups its rows. GPU: the model of the devices."""

    PROJECT = "project"
    USER = "user"
    QUEUE = "queue"
    GPU = "gpu"
    JOB = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """One row. Amounts are GPU-microseconds: a thousandth of a device for a millisecond.

    Attributes:
        key: "" for time that belongs to none, such as that of free devices.
        by_state: without states that did not occur.
        by_note: of each state with notes, the amount of each note.
        merged: rows that are added up in this one because there were too many; 0 for a row of its own.
    """

    key: str
    total: int
    by_state: dict[str, int]
    by_note: dict[str, dict[str, int]]
    merged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Rows, the largest first, and their sum. `fleet`: what the ledger counted of all nodes; equal to the total of the sum."""

    rows: tuple[UsageSum, ...]
    total: UsageSum
    fleet: int


def sum_usage(
    hours: Iterable[UsageHour], by: UsageKey, *, rows_max: int, first: Container[str] | None = None
) -> UsageTotals:
    """The totals of these hours. Rows past `rows_max` are added up in one last row.

    `first`: rows with most of these states come first; None for the largest.
    """
    sums: dict[str, Counter[tuple[str, str]]] = {}
    fleet = 0
    for hour in hours:
        fleet += hour.fleet
        for row in hour.rows:
            amounts = sums.setdefault(row_key(row, by), Counter())
            for state, note, amount in row.amounts:
                amounts[state, note] += amount

    def rank(item: tuple[str, Counter[tuple[str, str]]]) -> tuple[int, int, str]:
        key, amounts = item
        of_states = sum(amount for (state, _), amount in amounts.items() if first is not None and state in first)
        return -of_states, -amounts.total(), key

    ordered = sorted(sums.items(), key=rank)
    shown, rest = ordered[:rows_max], ordered[rows_max:]
    rows = [_sum(key, amounts) for key, amounts in shown]
    if rest:
        rows.append(_sum("", sum((amounts for _, amounts in rest), Counter()), merged=len(rest)))
    return UsageTotals(rows=tuple(rows), total=_sum("", sum(sums.values(), Counter())), fleet=fleet)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePeriod:
    """What all devices did in one period, as in `UsageSum`. `since_s`: its beginning in Unix seconds."""

    since_s: int
    fleet: int
    by_state: dict[str, int]


def sum_by_period(hours: Iterable[UsageHour], period_s: int) -> list[UsagePeriod]:
    """The sums of equal periods that begin at multiples of `period_s` since the Unix epoch, in order; periods without hours are left out."""
    fleets: Counter[int] = Counter()
    states: dict[int, Counter[str]] = {}
    for hour in hours:
        since_s = int(hour.id) // period_s * period_s
        fleets[since_s] += hour.fleet
        amounts = states.setdefault(since_s, Counter())
        for row in hour.rows:
            for state, _, amount in row.amounts:
                amounts[state] += amount
    return [
        UsagePeriod(since_s=since_s, fleet=fleets[since_s], by_state=dict(states[since_s]))
        for since_s in sorted(states)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHours:
    """One job. `millijoules`: the energy of its devices, of the part `metered` of the total; both 0 if none was counted."""

    amounts: UsageSum
    millijoules: int = 0
    metered: int = 0


def sum_job_hours(hours: Iterable[UsageHour], job: str) -> JobHours:
    """The amounts and the energy of one job."""
    amounts: Counter[tuple[str, str]] = Counter()
    millijoules = metered = 0
    for row in (row for hour in hours for row in hour.rows if row.job == job):
        for state, note, amount in row.amounts:
            amounts[state, note] += amount
        for _, energy, covered in row.energy:
            millijoules += energy
            metered += covered
    return JobHours(amounts=_sum(job, amounts), millijoules=millijoules, metered=metered)


def row_key(row: UsageRow, by: UsageKey) -> str:
    """The key of a row of the ledger in a report."""
    match by:
        case UsageKey.PROJECT:
            return row.project
        case UsageKey.USER:
            return row.user
        case UsageKey.QUEUE:
            return row.queue
        case UsageKey.GPU:
            return row.model
        case UsageKey.JOB:
            return row.job


def _sum(key: str, amounts: Counter[tuple[str, str]], *, merged: int = 0) -> UsageSum:
    by_state: dict[str, int] = {}
    by_note: dict[str, dict[str, int]] = {}
    for (state, note), amount in sorted(amounts.items()):
        by_state[state] = by_state.get(state, 0) + amount
        if note:
            by_note.setdefault(state, {})[note] = amount
    return UsageSum(key=key, total=amounts.total(), by_state=by_state, by_note=by_note, merged=merged)
