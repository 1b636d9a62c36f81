"""The stored form of the ledger of states: one record for each hour, and how far it has been counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId

USAGE_MARK: Final = "usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One account's amounts in one hour.

    Attributes:
        amounts: state, note, and thousandths of a device times milliseconds.
        throttled: cause, and the thousandths times milliseconds in which clocks were held down.
        energy: what counted it (`core.accounting.energy_ledger.EnergySource`), millijoules, and the thousandths times milliseconds that it covers.
    """

    model: str
    pool: str
    project: str
    user: str
    queue: str
    job: str
    amounts: tuple[tuple[str, str, int], ...]
    energy: tuple[tuple[str, int, int], ...] = ()
    throttled: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageHour:
    """What all devices did in one hour.

    Attributes:
        id: its beginning in Unix seconds, as text.
        fleet: the sum that the amounts of all rows must have.
        millijoules: what the meters of all devices counted; the sum that the energy of all rows must have.
    """

    id: str
    fleet: int
    rows: tuple[UsageRow, ...]
    millijoules: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMeter:
    """The newest reading of a device's energy. Later energy is counted from it.

    Attributes:
        sender: the supervisor that sent it, and the node's boot clock then, so that an older reading is recognized.
        spans: since when (Unix milliseconds) who held the device after it, as (thousandths, words of the account); empty if it was one holder.
    """

    index: int
    meter: str
    source: str
    millijoules: int
    at_ms: int
    sender: tuple[str, int] = ("", 0)
    spans: tuple[tuple[int, tuple[tuple[int, tuple[str, ...]], ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedNode:
    """A node that counts, with the indices of its devices."""

    id: NodeId
    devices: tuple[int, ...]
    model: str
    pool: str
    meters: tuple[CountedMeter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMark:
    """How far the ledger has been counted: up to `until_ms` (Unix milliseconds), with the nodes that counted then."""

    id: str
    until_ms: int
    nodes: tuple[CountedNode, ...]
