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
    """

    model: str
    pool: str
    project: str
    user: str
    queue: str
    job: str
    amounts: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageHour:
    """What all devices did in one hour. `id`: its beginning in Unix seconds, as text; `fleet`: the sum that all rows must have."""

    id: str
    fleet: int
    rows: tuple[UsageRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedNode:
    """A node that counts, with the indices of its devices."""

    id: NodeId
    devices: tuple[int, ...]
    model: str
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMark:
    """How far the ledger has been counted: up to `until_ms` (Unix milliseconds), with the nodes that counted then."""

    id: str
    until_ms: int
    nodes: tuple[CountedNode, ...]
