"""The ledger of states: how long each thousandth of each device was in which state, for whom, by hour.

Amounts are integers, thousandths of a device times milliseconds. A node counts from `open_node` to `close_node`; at any time the amounts of all
states add up exactly to devices x 1,000 x milliseconds of the nodes, which the ledger counts separately. The cost of a change is that of the
devices it names; `settle` costs one addition for each part. Pure: times are given, in Unix milliseconds that never go back (earlier ones count
as the latest known).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.core.accounting.usage_states import PartState
from phalanx.core.ids import NodeId
from phalanx.core.work.share import MILLI_PER_DEVICE

HOUR_MS: Final = 3_600_000


class Account(NamedTuple):
    """For whom and on what: words of the report; empty where they do not apply, such as the job of a free device."""

    model: str = ""
    pool: str = ""
    project: str = ""
    user: str = ""
    queue: str = ""
    job: str = ""


class Part(NamedTuple):
    """A part of a device now. `since_ms`: when its state began, if that became known only later; None for now."""

    account: Account
    milli: int
    state: PartState
    since_ms: int | None = None


@dataclass(slots=True)
class HourAmounts:
    """One hour.

    Attributes:
        fleet: thousandths times milliseconds of all nodes.
        energy: by account and by what counted it, millijoules and the thousandths times milliseconds that they cover.
        millijoules: what all meters counted.
    """

    amounts: dict[tuple[Account, PartState], int] = field(default_factory=dict)
    fleet: int = 0
    energy: dict[tuple[Account, str], tuple[int, int]] = field(default_factory=dict)
    millijoules: int = 0


class _OpenPart:
    __slots__ = ("account", "begin_ms", "milli", "settled_ms", "state")

    def __init__(self, part: Part, at_ms: int) -> None:
        self.account, self.milli, self.state = part.account, part.milli, part.state
        self.begin_ms = self.settled_ms = at_ms


@dataclass(slots=True)
class _OpenNode:
    settled_ms: int
    devices: dict[int, dict[str, _OpenPart]]


class StateLedger:
    """See the module."""

    def __init__(self) -> None:
        self.hours: dict[int, HourAmounts] = {}
        self._nodes: dict[NodeId, _OpenNode] = {}

    @property
    def nodes(self) -> dict[NodeId, int]:
        """The number of devices of each node that counts now."""
        return {node_id: len(node.devices) for node_id, node in self._nodes.items()}

    def device_indices(self, node_id: NodeId) -> list[int]:
        """The devices of a node that counts now; empty if it does not."""
        node = self._nodes.get(node_id)
        return [] if node is None else list(node.devices)

    def state(self, node_id: NodeId, index: int, key: str) -> PartState | None:
        """The state of a part now; None if there is no such part."""
        part = self._nodes[node_id].devices[index].get(key)
        return None if part is None else part.state

    def parts(self, node_id: NodeId) -> Iterator[tuple[int, str, Part]]:
        """The parts of a node now: device, key of the part, part with the beginning of its state."""
        node = self._nodes.get(node_id)
        for index, parts in (node.devices if node is not None else {}).items():
            for key, part in parts.items():
                yield index, key, Part(part.account, part.milli, part.state, part.begin_ms)

    def open_node(self, node_id: NodeId, devices: Mapping[int, Part], at_ms: int) -> None:
        """Count a node from now on, each device as one part.

        Raises:
            ValueError: it counts already, or a part is not a whole device.
        """
        if node_id in self._nodes:
            raise ValueError(f"node {node_id} counts already")
        for part in devices.values():
            _check_whole({"": part})
        self._nodes[node_id] = _OpenNode(at_ms, {index: {"": _OpenPart(one, at_ms)} for index, one in devices.items()})

    def close_node(self, node_id: NodeId, at_ms: int) -> None:
        """Count a node up to now."""
        self._settle_node(self._nodes[node_id], at_ms)
        del self._nodes[node_id]

    def set_device(self, node_id: NodeId, index: int, parts: Mapping[str, Part], at_ms: int) -> bool:
        """Set what the parts of a device are from now on, or from `since_ms` of a part whose state alone changes; return whether any changed.

        Args:
            node_id: of the device.
            index: of the device.
            parts: by the job that holds it, "" for what is free; together a whole device.
            at_ms: now.

        Raises:
            ValueError: the parts are not a whole device.
        """
        node = self._nodes[node_id]
        known = node.devices[index]
        if known.keys() == parts.keys() and all(
            known[key].account == part.account and known[key].milli == part.milli for key, part in parts.items()
        ):
            changed = [(key, part) for key, part in parts.items() if known[key].state != part.state]
            for key, part in changed:
                self._change_state(known[key], part, at_ms)
            return bool(changed)
        _check_whole(parts)
        at_ms = max(at_ms, *(open_part.settled_ms for open_part in known.values()))
        for open_part in known.values():
            self._settle_part(open_part, at_ms)
        node.devices[index] = {key: _OpenPart(part, at_ms) for key, part in parts.items()}
        return True

    def settle(self, at_ms: int) -> None:
        """Count everything up to now."""
        for node in self._nodes.values():
            self._settle_node(node, at_ms)

    def add_energy(self, hour_ms: int, source: str, shares: Mapping[Account, tuple[int, int]], total: int) -> None:
        """Count the energy of a device in one hour: millijoules and time of each account, and their total.

        Energy of an hour that is no longer in memory, since its reading came so late, counts in the oldest one that is.
        """
        hour = self._hour(max(hour_ms, min(self.hours, default=hour_ms)))
        hour.millijoules += total
        for account, (millijoules, covered) in shares.items():
            known = hour.energy.get((account, source), (0, 0))
            hour.energy[account, source] = (known[0] + millijoules, known[1] + covered)

    def drop_hours(self, before_ms: int) -> None:
        """Drop hours that began earlier; states can no longer be changed back there."""
        for hour in [hour for hour in self.hours if hour < before_ms]:
            del self.hours[hour]

    def _settle_node(self, node: _OpenNode, at_ms: int) -> None:
        # Devices may be settled later than their node: a change of parts settles one device alone.
        at_ms = max(
            [at_ms, node.settled_ms, *(part.settled_ms for parts in node.devices.values() for part in parts.values())]
        )
        milli = len(node.devices) * MILLI_PER_DEVICE
        for hour, length_ms in _by_hour(node.settled_ms, at_ms):
            self._hour(hour).fleet += milli * length_ms
        node.settled_ms = at_ms
        for parts in node.devices.values():
            for part in parts.values():
                self._settle_part(part, at_ms)

    def _settle_part(self, part: _OpenPart, at_ms: int) -> None:
        key = (part.account, part.state)
        for hour, length_ms in _by_hour(part.settled_ms, at_ms):
            amounts = self._hour(hour).amounts
            amounts[key] = amounts.get(key, 0) + part.milli * length_ms
        part.settled_ms = max(part.settled_ms, at_ms)

    def _change_state(self, part: _OpenPart, new: Part, at_ms: int) -> None:
        """Change the state from `since_ms` on: time since then that was already counted moves to the new state."""
        at_ms = max(at_ms, part.settled_ms)
        since_ms = at_ms if new.since_ms is None else min(at_ms, max(new.since_ms, part.begin_ms, self._oldest_ms()))
        if since_ms >= part.settled_ms:
            self._settle_part(part, since_ms)
        else:
            old_key, new_key = (part.account, part.state), (part.account, new.state)
            for hour, length_ms in _by_hour(since_ms, part.settled_ms):
                amounts = self._hour(hour).amounts
                amounts[old_key] -= part.milli * length_ms
                amounts[new_key] = amounts.get(new_key, 0) + part.milli * length_ms
                if not amounts[old_key]:
                    del amounts[old_key]
        part.state, part.begin_ms = new.state, since_ms

    def _oldest_ms(self) -> int:
        return min(self.hours, default=0)

    def _hour(self, hour: int) -> HourAmounts:
        found = self.hours.get(hour)
        if found is None:
            found = self.hours[hour] = HourAmounts()
        return found


def _check_whole(parts: Mapping[str, Part]) -> None:
    total = sum(part.milli for part in parts.values())
    if total != MILLI_PER_DEVICE or any(part.milli <= 0 for part in parts.values()):
        raise ValueError(f"parts of {total} thousandths are not a whole device")


def _by_hour(begin_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
    """Each hour that the span touches, with the milliseconds in it; nothing for an empty span."""
    while begin_ms < end_ms:
        hour = begin_ms - begin_ms % HOUR_MS
        stop_ms = min(end_ms, hour + HOUR_MS)
        yield hour, stop_ms - begin_ms
        begin_ms = stop_ms
