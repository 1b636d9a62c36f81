"""The ledger of states: how long each thousandth of each device was in which state, for whom, by hour.

Amounts are integers, thousandths of a device times milliseconds. A node counts from `open_node` to `close_node`; at any time the amounts of all
states add up exactly to devices x 1,000 x milliseconds of the nodes, which the ledger counts separately. The cost of a change is that of the
devices it names; `settle` costs one addition for each part. Pure: times are given, in Unix milliseconds that never go back (earlier ones count
as the latest known).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.core.accounting.usage_states import PartState, UsageState
from phalanx.core.ids import NodeId
from phalanx.core.work.share import MILLI_PER_DEVICE

HOUR_MS: Final = 3_600_000
SPANS_MAX: Final = 64
"""Spans kept of a device, the newest: a job makes about five. At most 15 KB for each device, usually under 1 KB."""


class Account(NamedTuple):
    """For whom and on what: words of the report; empty where they do not apply, such as the job of a free device."""

    model: str = ""
    pool: str = ""
    project: str = ""
    user: str = ""
    queue: str = ""
    job: str = ""


class Part(NamedTuple):
    """A part of a device now.

    Attributes:
        account: for whom.
        milli: thousandths of the device.
        state: now.
        since_ms: when the state began, if that became known only later; None for now.
        replaces: states of earlier spans that it replaces too, back to `since_ms`; the first other one ends it.
    """

    account: Account
    milli: int
    state: PartState
    since_ms: int | None = None
    replaces: frozenset[UsageState] = frozenset()


class UsageSpan(NamedTuple):
    """A time during which a part of a device had one state. `key`: the job that held it, "" for what was free."""

    account: Account
    key: str
    milli: int
    state: PartState
    begin_ms: int
    end_ms: int


@dataclass(slots=True)
class HourAmounts:
    """One hour.

    Attributes:
        fleet: thousandths times milliseconds of all nodes.
        energy: by account and by what counted it, millijoules and the thousandths times milliseconds that they cover.
        millijoules: what all meters counted.
        throttled: by account and cause, the thousandths times milliseconds in which clocks were held down.
    """

    amounts: dict[tuple[Account, PartState], int] = field(default_factory=dict)
    fleet: int = 0
    energy: dict[tuple[Account, str], tuple[int, int]] = field(default_factory=dict)
    millijoules: int = 0
    throttled: dict[tuple[Account, str], int] = field(default_factory=dict)


class _OpenPart:
    __slots__ = ("account", "begin_ms", "milli", "settled_ms", "state")

    def __init__(self, part: Part, at_ms: int) -> None:
        self.account, self.milli, self.state = part.account, part.milli, part.state
        self.begin_ms = self.settled_ms = at_ms

    def span(self, key: str, end_ms: int) -> UsageSpan:
        """The span of its state up to `end_ms`."""
        return UsageSpan(self.account, key, self.milli, self.state, self.begin_ms, max(self.begin_ms, end_ms))


@dataclass(slots=True)
class _OpenNode:
    settled_ms: int
    devices: dict[int, dict[str, _OpenPart]]
    spans: dict[int, deque[UsageSpan]] = field(default_factory=dict)  # those that have ended


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

    def part_states(self, node_id: NodeId) -> Iterator[tuple[int, str, PartState]]:
        """The states of a node's parts now: device, key of the part, state."""
        node = self._nodes.get(node_id)
        for index, parts in (node.devices if node is not None else {}).items():
            for key, part in parts.items():
                yield index, key, part.state

    def state_totals(self) -> dict[UsageState, int]:
        """The thousandths of devices in each state now."""
        found: dict[UsageState, int] = {}
        for node in self._nodes.values():
            for parts in node.devices.values():
                for part in parts.values():
                    found[part.state.state] = found.get(part.state.state, 0) + part.milli
        return found

    def parts(self, node_id: NodeId) -> Iterator[tuple[int, str, Part]]:
        """The parts of a node now: device, key of the part, part with the beginning of its state."""
        node = self._nodes.get(node_id)
        for index, parts in (node.devices if node is not None else {}).items():
            for key, part in parts.items():
                yield index, key, Part(part.account, part.milli, part.state, part.begin_ms)

    def spans(self, node_id: NodeId, at_ms: int) -> Iterator[tuple[int, UsageSpan]]:
        """The newest spans of each device of a node, in the order of their ends; the state of now ends at `at_ms`."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        for index, parts in node.devices.items():
            yield from ((index, span) for span in node.spans.get(index, ()))
            yield from ((index, part.span(key, at_ms)) for key, part in parts.items())

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
        kept = {key for key, part in parts.items() if key in known and _same(known[key], part)}
        changed = [key for key in kept if known[key].state != parts[key].state]
        if kept != parts.keys() or len(kept) != len(known):
            _check_whole(parts)
            at_ms = max(at_ms, *(open_part.settled_ms for open_part in known.values()))
            for key in known.keys() - kept:
                self._settle_part(known[key], at_ms)
                _keep(node, index, known[key].span(key, at_ms))
            node.devices[index] = {
                key: known[key] if key in kept else _OpenPart(part, at_ms) for key, part in parts.items()
            }
        elif not changed:
            return False
        for key in changed:
            self._change_state(node, index, key, parts[key], at_ms)
        return True

    def restate(
        self,
        node_id: NodeId,
        index: int,
        key: str,
        state: PartState,
        span: tuple[int, frozenset[UsageState]],
        at_ms: int,
    ) -> None:
        """Change the state of a part if there is one. `span`: since when, and which states it replaces (`Part`)."""
        node = self._nodes.get(node_id)
        part = None if node is None else node.devices.get(index, {}).get(key)
        if node is not None and part is not None:
            self._change_state(node, index, key, Part(part.account, part.milli, state, *span), at_ms)

    def settle(self, at_ms: int) -> None:
        """Count everything up to now."""
        for node in self._nodes.values():
            self._settle_node(node, at_ms)

    def add_energy(
        self, hour_ms: int, source: str, shares: Mapping[Account, tuple[int, int]], total: int, throttled: str = ""
    ) -> None:
        """Count the energy of a device in one hour: millijoules and time of each account, and their total.

        `throttled`: why its clocks were held down in this time; empty if they were not.

        Energy of an hour that is no longer in memory, since its reading came so late, counts in the oldest one that is.
        """
        hour = self._hour(max(hour_ms, min(self.hours, default=hour_ms)))
        hour.millijoules += total
        for account, (millijoules, covered) in shares.items():
            known = hour.energy.get((account, source), (0, 0))
            hour.energy[account, source] = (known[0] + millijoules, known[1] + covered)
            if throttled:
                hour.throttled[account, throttled] = hour.throttled.get((account, throttled), 0) + covered

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

    def _change_state(self, node: _OpenNode, index: int, key: str, new: Part, at_ms: int) -> None:
        """Change the state from `since_ms` on: time since then that was already counted moves to the new state."""
        part = node.devices[index][key]
        at_ms = max(at_ms, part.settled_ms)
        since_ms = at_ms if new.since_ms is None else min(at_ms, max(new.since_ms, self._oldest_ms()))
        if part.state == new.state and since_ms >= part.begin_ms:
            return
        if since_ms >= part.settled_ms:
            self._settle_part(part, since_ms)
        else:
            self._move(part.account, part.milli, part.state, new.state, max(since_ms, part.begin_ms), part.settled_ms)
        if since_ms > part.begin_ms:
            _keep(node, index, part.span(key, since_ms))
        else:
            since_ms = self._replace_earlier(node, index, part.span(key, at_ms), new, since_ms)
        part.state, part.begin_ms = new.state, since_ms

    def _replace_earlier(self, node: _OpenNode, index: int, span: UsageSpan, new: Part, since_ms: int) -> int:
        """Give the spans that end where `span` begins the new state, as far as it replaces theirs; return where it begins then."""
        spans = list(node.spans.get(index, ()))
        begin_ms = span.begin_ms
        for place in reversed(range(len(spans))):
            one = spans[place]
            if one.key != span.key:
                continue
            if (one.end_ms, one.account, one.milli) != (begin_ms, span.account, span.milli):
                break
            if one.state == new.state:
                begin_ms = one.begin_ms
            elif since_ms < one.end_ms and one.state.state in new.replaces:
                begin_ms = max(since_ms, one.begin_ms)
                self._move(one.account, one.milli, one.state, new.state, begin_ms, one.end_ms)
            else:
                break
            spans[place : place + 1] = [one._replace(end_ms=begin_ms)] if begin_ms > one.begin_ms else []
        if begin_ms < span.begin_ms:
            node.spans[index] = deque(spans, SPANS_MAX)
        return begin_ms

    def _move(self, account: Account, milli: int, old: PartState, new: PartState, begin_ms: int, end_ms: int) -> None:
        """Move counted time from one state to another."""
        if old == new:
            return
        for hour, length_ms in _by_hour(begin_ms, end_ms):
            amounts = self._hour(hour).amounts
            amounts[account, old] -= milli * length_ms
            amounts[account, new] = amounts.get((account, new), 0) + milli * length_ms
            if not amounts[account, old]:
                del amounts[account, old]

    def _oldest_ms(self) -> int:
        return min(self.hours, default=0)

    def _hour(self, hour: int) -> HourAmounts:
        found = self.hours.get(hour)
        if found is None:
            found = self.hours[hour] = HourAmounts()
        return found


def _same(known: _OpenPart, part: Part) -> bool:
    return known.account == part.account and known.milli == part.milli


def _keep(node: _OpenNode, index: int, span: UsageSpan) -> None:
    if span.end_ms > span.begin_ms:
        node.spans.setdefault(index, deque(maxlen=SPANS_MAX)).append(span)


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
