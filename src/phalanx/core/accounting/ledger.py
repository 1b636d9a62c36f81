"""Usage of an attempt's time: each microsecond that its devices were held belongs to exactly one category.

The ledger sums exactly to the attempt's span times its thousandths of devices (invariant 18), so it counts integers; float seconds would
not add up. Called by the usage summary.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.accounting.reports import Reports, StepRecord
from phalanx.core.ids import Epoch
from phalanx.core.work.attempt import Attempt, EndCause


class TimeCategory(enum.StrEnum):
    """Use of held devices.

    PRODUCTIVE: steps that are part of the result. LOST: steps that were repeated later, or not kept. SAVING: training stalled for a
    checkpoint. RESTARTING: from the placement, or the last step before an in-place restart, to the first step; includes loading.
    IDLE: everything else, for example waiting for a dead node's lease to expire or for the last process to stop.
    """

    PRODUCTIVE = "productive"
    LOST = "lost"
    SAVING = "saving"
    RESTARTING = "restarting"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Microseconds by category; of an attempt, times the thousandths of devices that it held."""

    productive: int = 0
    lost: int = 0
    saving: int = 0
    restarting: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        """All categories."""
        return self.productive + self.lost + self.saving + self.restarting + self.idle

    def times(self, milli: int) -> Ledger:
        """The ledger of the same span on so many thousandths of devices."""
        return Ledger(**{name.value: getattr(self, name.value) * milli for name in TimeCategory})

    def plus(self, other: Ledger) -> Ledger:
        """The sum of both ledgers."""
        return Ledger(**{name.value: getattr(self, name.value) + getattr(other, name.value) for name in TimeCategory})


def device_ledger(attempt: Attempt, span: Ledger, *, now_s: float) -> Ledger:
    """The ledger of all devices of an attempt, given that of its whole span: without the time in which it slept.

    That time is taken from PRODUCTIVE first: a replica falls asleep while it serves.
    """
    _, end_us = span_us(attempt, now_s=now_s)
    left_us = round(attempt.sleep_s(end_us / 1e6) * 1e6)
    parts: dict[str, int] = {}
    for name in TimeCategory:
        own = getattr(span, name.value)
        taken = min(own, left_us)
        parts[name.value], left_us = own - taken, left_us - taken
    return Ledger(**parts).times(attempt.full_allocation.milli)


def sum_ledgers(ledgers: Iterable[Ledger]) -> Ledger:
    """The sum of all ledgers."""
    total = Ledger()
    for ledger in ledgers:
        total = total.plus(ledger)
    return total


def span_us(attempt: Attempt, *, now_s: float) -> tuple[int, int]:
    """From the placement to the end, or to now; never negative, whatever the clocks show."""
    begin_us = round(attempt.placed_s * 1e6)
    end_us = round((now_s if attempt.ended_s is None else attempt.ended_s) * 1e6)
    return begin_us, begin_us if attempt.queued_why else max(begin_us, end_us)


def step_ledger(attempt: Attempt, reports: Reports, kept: Iterable[StepRecord], *, now_s: float) -> Ledger:
    """One device's ledger of an attempt whose job reports steps. Steps outside the span (a node's clock is off) are clipped to it."""
    begin_us, end_us = span_us(attempt, now_s=now_s)
    marks = set(kept)
    sums = dict.fromkeys(TimeCategory, 0)
    gaps: dict[int, list[int]] = {}
    at_us, generation = begin_us, None
    for record in reports.steps:
        start_us = min(max(record.begin_us, at_us), end_us)
        stop_us = min(max(record.end_us, start_us), end_us)
        if record.generation == generation:
            gaps.setdefault(record.generation, []).append(start_us - at_us)
        else:
            sums[TimeCategory.RESTARTING] += start_us - at_us
        sums[TimeCategory.PRODUCTIVE if record in marks else TimeCategory.LOST] += stop_us - start_us
        at_us, generation = stop_us, record.generation
    if generation is None or generation < attempt.generation:
        sums[TimeCategory.RESTARTING] += end_us - at_us
    else:
        gaps.setdefault(generation, []).append(end_us - at_us)
    for each, lengths in gaps.items():
        saving_us = min(sum(lengths), reports.stalls_us.get(each, 0))
        sums[TimeCategory.SAVING] += saving_us
        sums[TimeCategory.IDLE] += sum(lengths) - saving_us
    return Ledger(**{name.value: value for name, value in sums.items()})


def ledger_without_steps(attempt: Attempt, *, kept: bool, now_s: float) -> Ledger:
    """One device's ledger of an attempt whose job reports no steps: the running time of its last generation is kept or lost as a whole.

    The running time of earlier generations counts as lost, since their progress is unknown.
    """
    begin_us, end_us = span_us(attempt, now_s=now_s)

    def within(at_s: float | None, earliest_us: int) -> int:
        return end_us if at_s is None else min(max(round(at_s * 1e6), earliest_us), end_us)

    again = attempt.generation > 0 and attempt.first_running_s is not None
    first_us = within(attempt.first_running_s if again else attempt.running_s, begin_us)
    asked_us = within(attempt.generation_s, first_us) if again else first_us
    running_us = within(attempt.running_s, asked_us)
    ends_s = [each.ended_s for each in attempt.exits]
    quiet_us = within(max(ends_s), running_us) if ends_s and not attempt.holds_allocation else end_us
    return Ledger(
        productive=quiet_us - running_us if kept else 0,
        lost=asked_us - first_us + (0 if kept else quiet_us - running_us),
        restarting=first_us - begin_us + running_us - asked_us,
        idle=end_us - quiet_us,
    )


def attempt_ledgers(
    attempts: Sequence[Attempt],
    reports: Mapping[Epoch, Reports],
    kept: Iterable[StepRecord],
    *,
    succeeded: bool,
    now_s: float,
) -> dict[Epoch, Ledger]:
    """One device's ledger of each attempt, by epoch.

    If no attempt reported a step, the attempt that succeeded or still runs counts as kept.
    """
    marks = frozenset(kept)
    if any(each.steps for each in reports.values()):
        empty = {attempt.epoch: Reports(epoch=attempt.epoch, stalls_us={}) for attempt in attempts}
        return {
            attempt.epoch: step_ledger(attempt, reports.get(attempt.epoch, empty[attempt.epoch]), marks, now_s=now_s)
            for attempt in attempts
        }
    newest = max((attempt.epoch for attempt in attempts), default=None)
    return {
        attempt.epoch: ledger_without_steps(
            attempt,
            kept=attempt.epoch == newest
            and (attempt.holds_allocation or (succeeded and attempt.stop_cause in (None, EndCause.SUCCEEDED))),
            now_s=now_s,
        )
        for attempt in attempts
    }
