"""Amounts of everything that a job can hold, as one value: thousandths of devices, CPUs, memory, and extras by name.

Requests, needs, grants, usage, quotas and bills are compared and summed as this vector. Amounts are integers, so that sums are exact.
How a device is shared is not an amount: see `core.work.share`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.units import GIB, MIB, format_bytes

MILLI_PER_DEVICE: Final = 1000  # thousandths
Extras = tuple[tuple[str, int], ...]  # (name, amount), sorted by name, without amounts of 0


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """A vector of amounts; each may be negative, as a difference. The order is total: devices first, then CPUs, memory and extras.

    Attributes:
        milli: thousandths of devices.
        cpus: logical CPUs.
        memory_bytes: memory of the host, not of devices.
        extras: named amounts, as licences, scratch space or network ports; sorted by name, without amounts of 0. See `extras_of`.
    """

    milli: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    extras: Extras = ()

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.milli + other.milli,
            self.cpus + other.cpus,
            self.memory_bytes + other.memory_bytes,
            add_extras(self.extras, other.extras) if other.extras else self.extras,
        )

    def __neg__(self) -> Resources:
        return Resources(
            -self.milli, -self.cpus, -self.memory_bytes, tuple((name, -amount) for name, amount in self.extras)
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.milli - other.milli,
            self.cpus - other.cpus,
            self.memory_bytes - other.memory_bytes,
            add_extras(self.extras, other.extras, -1) if other.extras else self.extras,
        )

    def __mul__(self, times: int) -> Resources:
        return Resources(
            self.milli * times,
            self.cpus * times,
            self.memory_bytes * times,
            extras_of((name, amount * times) for name, amount in self.extras),
        )

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        return bool(self.milli or self.cpus or self.memory_bytes or self.extras)

    def amount_of(self, name: str) -> int:
        """The amount of one resource: thousandths of "gpus", "cpus", bytes of "memory", or an extra."""
        match name:
            case "gpus":
                return self.milli
            case "cpus":
                return self.cpus
            case "memory":
                return self.memory_bytes
            case _:
                return next((amount for extra, amount in self.extras if extra == name), 0)

    def besides_gpus(self) -> Extras:
        """CPUs, memory and extras as pairs of name and amount, sorted; without amounts of 0."""
        if not (self.cpus or self.memory_bytes):
            return self.extras
        return extras_of([*self.extras, (CPUS, self.cpus), (MEMORY, self.memory_bytes)])

    def fits(self, room: Resources) -> bool:
        """Whether no amount exceeds that of `room`."""
        return (
            self.milli <= room.milli
            and self.cpus <= room.cpus
            and self.memory_bytes <= room.memory_bytes
            and extras_fit(self.extras, room.extras)
        )

    def lacking(self, room: Resources) -> str:
        """The first amount that exceeds that of `room`, as a noun for messages; empty if it fits."""
        if self.milli > room.milli:
            return "GPUs"
        if self.cpus > room.cpus:
            return "CPUs"
        if self.memory_bytes > room.memory_bytes:
            return "memory"
        return next((name for name, amount in (self - room).extras if amount > 0), "")

    def __str__(self) -> str:
        words = [f"{self.milli / MILLI_PER_DEVICE:.10g} GPU{'' if self.milli == MILLI_PER_DEVICE else 's'}"] * bool(
            self.milli
        )
        words += [f"{self.cpus} CPU{'' if self.cpus == 1 else 's'}"] * bool(self.cpus)
        words += [f"{format_bytes(self.memory_bytes)} memory"] * bool(self.memory_bytes)
        return ", ".join([*words, *(f"{amount_text(amount)} {name}" for name, amount in self.extras)]) or "nothing"


NO_RESOURCES: Final = Resources()
GPUS: Final = "gpus"
CPUS: Final = "cpus"
MEMORY: Final = "memory"
_UNITS: Final = {GPUS: "GPU", CPUS: "CPU"}


def quantity(name: str, amount: int) -> float:
    """The amount of a resource as people count it: GPUs instead of thousandths."""
    if name != GPUS:
        return amount
    whole, rest = divmod(amount, MILLI_PER_DEVICE)
    return amount / MILLI_PER_DEVICE if rest else whole


def quantity_text(name: str, value: float, *, unit: bool = True) -> str:
    """What `quantity` returned, for messages: "8 GPUs", "512 GiB memory", "2 matlab"; without the unit "8", "512 GiB", "2"."""
    if name in _UNITS:
        return f"{value:.10g} {_UNITS[name]}{'' if value == 1 else 's'}" if unit else f"{value:.10g}"
    text = format_bytes(value) if name == MEMORY else amount_text(int(value))
    return f"{text} {name}" if unit else text


def amount_time_text(name: str, amount_s: float) -> str:
    """Amount-seconds of a resource for messages: "12.0 CPU-hours", "3.5 GiB-hours of memory", "8.0 seconds of matlab"."""
    size = name == MEMORY or (name not in _UNITS and amount_s >= GIB)
    value, kind = (amount_s / GIB, "GiB-") if size else (amount_s, "")
    time_text = f"{value / 3600.0:.1f} {{}}hours" if value >= 3600.0 else f"{value:.1f} {{}}seconds"
    if name in _UNITS:
        return time_text.format(f"{_UNITS[name]}-")
    return f"{time_text.format(kind)} of {name}"


def extras_of(amounts: Iterable[tuple[str, int]]) -> Extras:
    """The extras of these names and amounts: equal names summed, sorted, without amounts of 0."""
    sums: dict[str, int] = {}
    for name, amount in amounts:
        sums[name] = sums.get(name, 0) + amount
    return tuple(sorted((name, amount) for name, amount in sums.items() if amount))


def add_extras(extras: Extras, others: Extras, times: int = 1) -> Extras:
    """The sum of the extras and `times` the others."""
    return extras_of([*extras, *((name, amount * times) for name, amount in others)])


def extras_fit(extras: Extras, room: Extras) -> bool:
    """Whether no amount exceeds that of `room`."""
    if not (extras or room):
        return True
    have = dict(room)
    asked = dict(extras)
    return all(asked.get(name, 0) <= have.get(name, 0) for name in asked.keys() | have.keys())


def amount_text(amount: int) -> str:
    """The amount of an extra: a number, or bytes. Parsed counts are below 1 MiB, and parsed sizes are whole MiB (`core.work.extras`)."""
    return format_bytes(amount) if abs(amount) >= MIB and not amount % MIB else str(amount)
