"""The energy of each device by who held it: differences of its meter, divided by the share held and by time.

Between two readings of one meter, each account gets energy in proportion to the thousandths of the device that it held, times how long. What no job
held belongs to the account without a job. Shares are integers, and add up exactly to the difference. A meter that goes back or is replaced
starts again: the time between the two readings then has no energy, and shows as unknown. Pure; times are Unix milliseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.core.accounting.state_ledger import HOUR_MS, Account
from phalanx.core.ids import NodeId
from phalanx.core.work.usage.usage_hour import CountedMeter

POWER_MAX_W: Final = 10_000
"""A difference above so much power is no measurement. The highest board power in `planner/facts/tables/gpus.csv` is below 1,500 W."""
SLACK_MS: Final = (
    10_000  # that a reading's time may be wrong by, for that check: a request may be under way for seconds
)
SPANS_MAX: Final = (
    256  # changes of holders without a reading; past that the device's energy is unknown until the next reading
)
THROTTLE_MAX_MS: Final = (
    60_000  # between two readings, so that a reason at the later one holds for the time between them
)
Holders = tuple[tuple[int, Account], ...]
"""Thousandths and account of each part of a device."""


class EnergySource(enum.StrEnum):
    """COUNTER: the device counts its energy. INTEGRATED: samples of its power, added up."""

    COUNTER = "counter"
    INTEGRATED = "integrated"


class ThrottleCause(enum.StrEnum):
    """Why the clocks of a GPU are held down. HARDWARE: the driver says only that the hardware did it."""

    THERMAL = "thermal"
    POWER = "power"
    HARDWARE = "hardware"


_CAUSES: Final = {  # of the names in samples; the first that holds
    "hw_thermal_slowdown": ThrottleCause.THERMAL,
    "sw_thermal_slowdown": ThrottleCause.THERMAL,
    "hw_power_brake_slowdown": ThrottleCause.POWER,
    "sw_power_cap": ThrottleCause.POWER,
    "hw_slowdown": ThrottleCause.HARDWARE,
}


class MeterReading(NamedTuple):
    """A meter's count at a time.

    Attributes:
        sender: a supervisor, and a number that grows with each of its readings.
        throttled: why the clocks are held down as it is read; None if they are not, or if the device does not say.
    """

    meter: str
    source: EnergySource
    millijoules: int
    at_ms: int
    sender: tuple[str, int] = ("", 0)
    throttled: ThrottleCause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HourEnergy:
    """Energy of a device in one hour. `shares`: millijoules, and thousandths times milliseconds, of each account; they add up to `total`."""

    hour_ms: int
    total: int
    shares: dict[Account, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCount:
    """What a reading added.

    Attributes:
        restarted: why nothing could be subtracted, for messages; empty otherwise.
        throttled: why the clocks were held down in this time; None if they were not.
    """

    source: EnergySource
    hours: tuple[HourEnergy, ...] = ()
    restarted: str = ""
    throttled: ThrottleCause | None = None


@dataclass(slots=True)
class _Device:
    base: MeterReading | None = None
    spans: list[tuple[int, Holders]] = field(default_factory=list)  # since when; the first holds from the base on


class EnergyLedger:
    """See the module."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, dict[int, _Device]] = {}

    def hold(self, node_id: NodeId, index: int, holders: Holders, at_ms: int) -> None:
        """Set who holds a device from now on."""
        device = self._nodes.setdefault(node_id, {}).setdefault(index, _Device())
        spans = device.spans
        if device.base is None:
            spans.clear()
        elif spans:
            if spans[0][0] > device.base.at_ms:  # after a restart: who holds it first has held it since the reading
                spans[0] = (device.base.at_ms, spans[0][1])
            at_ms = max(at_ms, spans[-1][0])
            if at_ms == spans[-1][0]:
                spans.pop()
        if spans and spans[-1][1] == holders:
            return
        spans.append((at_ms, holders))
        if len(spans) > SPANS_MAX:
            device.base, device.spans = None, spans[-1:]

    def keep(self, node_id: NodeId, indices: Collection[int]) -> None:
        """Drop the devices of a node that it no longer has."""
        devices = self._nodes.get(node_id, {})
        for index in [index for index in devices if index not in indices]:
            del devices[index]
        if not indices:
            self._nodes.pop(node_id, None)

    def keep_nodes(self, node_ids: Collection[NodeId]) -> None:
        """Drop all other nodes."""
        for node_id in [node_id for node_id in self._nodes if node_id not in node_ids]:
            del self._nodes[node_id]

    def read(self, node_id: NodeId, index: int, reading: MeterReading) -> EnergyCount:
        """Count a reading. Readings of a device that does not count, and those older than the newest, change nothing."""
        device = self._nodes.get(node_id, {}).get(index)
        empty = EnergyCount(source=reading.source)
        if device is None or not device.spans:
            return empty
        base = device.base
        if base is not None and base.sender[0] == reading.sender[0] and reading.sender[1] <= base.sender[1]:
            return empty
        at_ms = reading.at_ms if base is None else max(reading.at_ms, base.at_ms)
        restarted = "" if base is None else _restart_reason(base, reading, at_ms)
        hours: tuple[HourEnergy, ...] = ()
        if base is not None and not restarted:
            hours = _divided(reading.millijoules - base.millijoules, device.spans, base.at_ms, at_ms)
        recent = base is not None and at_ms - base.at_ms <= THROTTLE_MAX_MS
        device.base = reading._replace(at_ms=at_ms)
        if len(device.spans) > 1:
            holds = [place for place, (begin_ms, _) in enumerate(device.spans) if begin_ms <= at_ms]
            del device.spans[: max(holds, default=0)]
        throttled = reading.throttled if recent else None
        return EnergyCount(source=reading.source, hours=hours, restarted=restarted, throttled=throttled)

    def meters(self, node_id: NodeId) -> tuple[CountedMeter, ...]:
        """The newest reading of each device, to be stored."""
        return tuple(
            CountedMeter(
                index=index,
                meter=device.base.meter,
                source=device.base.source.value,
                millijoules=device.base.millijoules,
                at_ms=device.base.at_ms,
                sender=device.base.sender,
                spans=_stored(device.spans) if len(device.spans) > 1 else (),
            )
            for index, device in self._nodes.get(node_id, {}).items()
            if device.base is not None
        )

    def resume(self, node_id: NodeId, meters: Iterable[CountedMeter]) -> None:
        """Continue from readings that were stored."""
        for one in meters:
            base = MeterReading(one.meter, EnergySource(one.source), one.millijoules, one.at_ms, one.sender)
            spans = [(at_ms, tuple((milli, Account(*words)) for milli, words in held)) for at_ms, held in one.spans]
            self._nodes.setdefault(node_id, {})[one.index] = _Device(base, spans)


def throttle_cause(reasons: Collection[str] | None) -> ThrottleCause | None:
    """The cause behind the reasons of a sample; the first of thermal, power and hardware if several hold."""
    return next((cause for name, cause in _CAUSES.items() if name in (reasons or ())), None)


def _restart_reason(base: MeterReading, reading: MeterReading, at_ms: int) -> str:
    difference = reading.millijoules - base.millijoules
    if base.meter != reading.meter:
        return "another meter"
    if difference < 0:
        return f"the meter went back by {-difference} mJ"
    if difference > POWER_MAX_W * (at_ms - base.at_ms + SLACK_MS):
        return f"{difference} mJ in {at_ms - base.at_ms} ms is no measurement"
    return ""


def _divided(millijoules: int, spans: list[tuple[int, Holders]], begin_ms: int, end_ms: int) -> tuple[HourEnergy, ...]:
    """The energy between two readings by hour and account."""
    hour_ms = begin_ms - begin_ms % HOUR_MS
    if len(spans) == len(spans[0][1]) == 1 and end_ms <= hour_ms + HOUR_MS:  # as nearly always: a third of the cost
        milli, account = spans[0][1][0]
        share = (millijoules, milli * (end_ms - begin_ms))
        return (HourEnergy(hour_ms=hour_ms, total=millijoules, shares={account: share}),)
    return tuple(_divide(millijoules, _pieces(spans, begin_ms, end_ms)))


def _pieces(spans: list[tuple[int, Holders]], begin_ms: int, end_ms: int) -> Iterator[tuple[int, int, int, Account]]:
    """Each piece as (hour, milliseconds, thousandths, account): of the time between two readings, or of its end if that is empty."""
    ends = [at_ms for at_ms, _ in spans[1:]]
    at_ms = begin_ms
    for (_, holders), stop_ms in zip(spans, [*ends, end_ms], strict=True):
        until_ms = min(stop_ms, end_ms)
        while at_ms < until_ms or begin_ms == end_ms:
            hour_ms = at_ms - at_ms % HOUR_MS
            next_ms = min(until_ms, hour_ms + HOUR_MS)
            yield from ((hour_ms, next_ms - at_ms, milli, account) for milli, account in holders)
            if begin_ms == end_ms:
                return
            at_ms = next_ms


def _divide(millijoules: int, found: Iterator[tuple[int, int, int, Account]]) -> Iterator[HourEnergy]:
    """Divide energy over pieces. Each cumulative sum is rounded down, so that the shares add up exactly."""
    pieces = list(found)
    weights = [milli * max(length_ms, 1) for _, length_ms, milli, _ in pieces]
    whole, passed, given = sum(weights), 0, 0
    hours: dict[int, dict[Account, tuple[int, int]]] = {}
    totals: dict[int, int] = {}
    for (hour_ms, length_ms, milli, account), weight in zip(pieces, weights, strict=True):
        passed += weight
        share = millijoules * passed // whole - given
        given += share
        shares = hours.setdefault(hour_ms, {})
        known = shares.get(account, (0, 0))
        shares[account] = (known[0] + share, known[1] + milli * length_ms)
        totals[hour_ms] = totals.get(hour_ms, 0) + share
    for hour_ms, shares in hours.items():
        yield HourEnergy(hour_ms=hour_ms, total=totals[hour_ms], shares=shares)


def _stored(spans: list[tuple[int, Holders]]) -> tuple[tuple[int, tuple[tuple[int, tuple[str, ...]], ...]], ...]:
    return tuple((at_ms, tuple((milli, tuple(account)) for milli, account in held)) for at_ms, held in spans)
