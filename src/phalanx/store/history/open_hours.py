"""The hour that is being recorded: samples become values of ten seconds for each node and for the fleet. In memory; no thread, no clock.

A sample stands for the time until the next one, as its sender announces it, so that a large fleet that samples rarely has no holes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from phalanx.core.ids import NodeId
from phalanx.store.history.levels import HOUR_S, STEP_S
from phalanx.store.history.metrics import (
    DEVICE_METRICS,
    NODE_METRICS,
    UNKNOWN,
    Codes,
    Values,
    encode,
    metrics_of,
    reasons_code,
)
from phalanx.store.history.rollups import MAXIMUM, Rollups, of_values
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

FLEET: Final = ""
DEVICES_MAX: Final = 1024  # of one node that are recorded; a rack-scale node has 72
_HOLD_MAX_S: Final = 60.0  # a sample stands for no longer than this, whatever its sender announces
_TIMES: Final = HOUR_S // STEP_S
_PER_DEVICE: Final = len(DEVICE_METRICS)
_REASONS: Final = _PER_DEVICE - 1  # the row of the throttle reasons among those of a device
_NODE: Final = len(NODE_METRICS)


@dataclass(slots=True, eq=False)
class OpenHour:
    """One hour of one series. `changed`: since it was stored last, at `stored_s`."""

    series: str
    begin_s: int
    devices: tuple[int, ...]
    codes_RT: Codes  # noqa: N815  # the suffix names the axes: rows, times
    stored_s: float
    changed: bool = False

    def rollups(self) -> Rollups:
        """A copy of what it has, as rollups."""
        return of_values(self.begin_s, STEP_S, self.devices, self.codes_RT.copy())


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums of the samples of one node in the current ten seconds. `row`: the newest complete values, NaN if unknown, which hold until `fresh_until_s`."""

    devices: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)
    sums: list[float] = field(default_factory=lambda: [0.0] * _NODE)
    counts: list[int] = field(default_factory=lambda: [0] * _NODE)
    sampled: bool = False
    row: Values | None = None
    fresh_until_s: float = -math.inf

    def add(self, at: int, value: float | None) -> None:
        """Add a value of one row; JSON has no NaN and no infinity."""
        if value is not None:
            self.sums[at] += value
            self.counts[at] += 1

    def row_of(self, device: int) -> int | None:
        """The first row of a device; None if the node has too many."""
        if device not in self.place:
            if len(self.devices) >= DEVICES_MAX or not 0 <= device < 1 << 16:
                return None
            self.place[device] = len(self.devices)
            self.devices.append(device)
            self.sums += [0.0] * _PER_DEVICE
            self.counts += [0] * _PER_DEVICE
        return _NODE + self.place[device] * _PER_DEVICE

    def clear(self) -> None:
        """Begin the next ten seconds."""
        self.sums = [0.0] * len(self.sums)
        self.counts = [0] * len(self.counts)
        self.sampled = False


class OpenHours:
    """See the module.

    Args:
        load: the hour that an earlier head stored of a series, if it began before this one: (series, begin) to rollups or None.
        now_s: Unix time.
    """

    def __init__(self, load: Callable[[str, int], Rollups | None], now_s: float) -> None:
        self._load = load
        self._loads_until_s = now_s
        self._step = int(now_s) // STEP_S
        self._loaded: dict[str, Rollups] = {}
        self._nodes: dict[NodeId, _Sums] = {}
        self._open: dict[str, OpenHour] = {}
        self._sealed: dict[tuple[str, int], OpenHour] = {}

    @property
    def nodes(self) -> int:
        """The number of nodes that are recorded now."""
        return len(self._nodes)

    def add(self, request: SamplesRequest, now_s: float) -> None:
        """Add the samples of a node, which arrived now."""
        self.advance(now_s)
        node = self._nodes.get(request.node_id)
        if node is None:
            node = self._nodes[request.node_id] = self._known_before(request.node_id)
        node.sampled = True
        node.fresh_until_s = now_s + min(max(1.5 * request.every_s, STEP_S), _HOLD_MAX_S)
        used = None
        if request.memory_total_bytes is not None and request.memory_available_bytes is not None:
            used = float(request.memory_total_bytes - request.memory_available_bytes)
        node.add(0, request.cpu_utilization)
        node.add(1, used)
        node.add(2, request.network_received_bytes_per_s)
        node.add(3, request.network_sent_bytes_per_s)
        for device in request.devices:
            first = node.row_of(device.index)
            if first is not None:
                _add_device(node, first, device)

    def advance(self, now_s: float) -> None:
        """Complete the ten seconds that are over, and the hour. Time that went back changes nothing."""
        now_step = int(now_s) // STEP_S
        if now_step - self._step > _TIMES:  # the machine slept: nothing holds that long
            self._complete()
            self._seal()
            self._step = now_step
        while self._step < now_step:
            self._complete()
            self._step += 1
            if self._step % _TIMES == 0:
                self._seal()

    def due(self, now_s: float, period_s: float, limit: int) -> list[OpenHour]:
        """At most `limit` hours to store: the complete ones, then those that changed and were stored a period ago.

        They count as unchanged from now on: the caller packs them now, and sets `changed` again if it cannot store them.
        """
        found = list(self._sealed.values())[:limit]
        if len(found) < limit:
            late = (one for one in self._open.values() if one.changed and now_s - one.stored_s >= period_s)
            found += [one for one, _ in zip(late, range(limit - len(found)), strict=False)]
        for one in found:
            one.changed = False
        return found

    def stored(self, hours: list[OpenHour], now_s: float) -> None:
        """Note that these hours are stored; complete ones leave the memory, unless they changed meanwhile."""
        for hour in hours:
            hour.stored_s = now_s
            if not hour.changed:
                self._sealed.pop((hour.series, hour.begin_s), None)

    def drop_sealed(self, count_max: int) -> int:
        """Drop the oldest complete hours that could not be stored, past a number; return how many."""
        dropped = 0
        while len(self._sealed) > count_max:
            del self._sealed[next(iter(self._sealed))]
            dropped += 1
        return dropped

    @property
    def has_sealed(self) -> bool:
        """Whether complete hours wait to be stored."""
        return bool(self._sealed)

    def held(self, series: str) -> list[Rollups]:
        """What the memory has of a series, oldest first."""
        found = [hour.rollups() for (name, _), hour in self._sealed.items() if name == series]
        return [*found, self._open[series].rollups()] if series in self._open else found

    def _complete(self) -> None:
        """End ten seconds: nodes with equally many devices are one matrix."""
        end_s = (self._step + 1) * STEP_S
        by_devices: dict[int, list[tuple[NodeId, _Sums]]] = {}
        for name, node in self._nodes.items():
            if node.sampled or (node.row is not None and node.fresh_until_s >= end_s):
                by_devices.setdefault(len(node.devices), []).append((name, node))
        fleet_sums, fleet_counts = np.zeros((2, _NODE + _PER_DEVICE))
        for count, nodes in by_devices.items():
            values = _values(nodes)
            for (name, node), row, codes in zip(
                nodes, values, encode(values.T, metrics_of(count), sets=True).T, strict=True
            ):
                node.row = row
                node.clear()
                self._write(name, tuple(node.devices), codes)
            of_devices = values[:, _NODE:].reshape(-1, _PER_DEVICE)
            fleet_sums += np.concatenate([np.nansum(values[:, :_NODE], axis=0), np.nansum(of_devices, axis=0)])
            known = ~np.isnan(values[:, :_NODE]), ~np.isnan(of_devices)
            fleet_counts += np.concatenate([known[0].sum(axis=0), known[1].sum(axis=0)])
        if by_devices:
            fleet_counts[_NODE + _REASONS] = 0  # the reasons of thousands of devices together say nothing
            means = np.where(fleet_counts > 0, fleet_sums / np.maximum(fleet_counts, 1), np.nan)
            self._write(FLEET, (0,), encode(means, metrics_of(1)))

    def _write(self, series: str, devices: tuple[int, ...], codes: Codes) -> None:
        hour = self._open.get(series)
        if hour is None:
            hour = self._open[series] = self._begin(series, self._step // _TIMES * HOUR_S, devices)
        if len(hour.devices) < len(devices):
            hour.codes_RT = np.vstack([hour.codes_RT, _unknown(len(devices) - len(hour.devices), 0)])
            hour.devices = devices
        hour.codes_RT[:, self._step % _TIMES] = codes
        hour.changed = True

    def _known_before(self, series: str) -> _Sums:
        """A node that is new here, with the devices that an earlier head recorded in this hour, in the same order."""
        node = _Sums()
        begin_s = self._step // _TIMES * HOUR_S
        found = self._load(series, begin_s) if begin_s <= self._loads_until_s else None
        if found is not None and found.begin_s == begin_s and found.cells_FRT.shape[2] == _TIMES:
            self._loaded[series] = found
            for device in found.devices:
                node.row_of(device)
        return node

    def _begin(self, series: str, begin_s: int, devices: tuple[int, ...]) -> OpenHour:
        """A new hour, or the one that an earlier head began to store."""
        if series == FLEET:
            self._known_before(FLEET)
        hour = OpenHour(series, begin_s, devices, _unknown(len(devices), _NODE), stored_s=self._step * STEP_S)
        found = self._loaded.pop(series, None)
        if found is not None and found.begin_s == begin_s:
            codes = found.cells_FRT[MAXIMUM]  # of single values: the value itself, or the set of reasons
            hour.codes_RT[: codes.shape[0]] = codes
        return hour

    def _seal(self) -> None:
        self._sealed.update({(hour.series, hour.begin_s): hour for hour in self._open.values()})
        silent = [name for name in self._nodes if name not in self._open]
        for name in silent:
            del self._nodes[name]
        self._open.clear()


def _add_device(node: _Sums, first: int, device: DeviceSample) -> None:
    sums, counts = node.sums, node.counts
    if device.utilization is not None:
        sums[first] += device.utilization
        counts[first] += 1
    if device.memory_used_bytes is not None:
        sums[first + 1] += device.memory_used_bytes
        counts[first + 1] += 1
    if device.power_w is not None:
        sums[first + 2] += device.power_w
        counts[first + 2] += 1
    if device.temperature_c is not None:
        sums[first + 3] += device.temperature_c
        counts[first + 3] += 1
    if device.throttle is not None:  # a set, not a sum
        code = reasons_code(device.throttle) if device.throttle else 0
        sums[first + _REASONS] = int(sums[first + _REASONS]) | code
        counts[first + _REASONS] = 1


def _values(nodes: list[tuple[NodeId, _Sums]]) -> Values:
    """The means of nodes with equally many devices, one row for each; of one without samples the row before."""
    counts = np.array([node.counts for _, node in nodes], np.float64)
    values = np.array([node.sums for _, node in nodes], np.float64) / np.maximum(counts, 1)
    values[counts == 0] = np.nan
    for number, (_, node) in enumerate(nodes):
        if not node.sampled and node.row is not None:
            values[number] = np.nan
            values[number, : node.row.size] = node.row
    return values


def _unknown(devices: int, rows: int) -> Codes:
    return np.full((rows + devices * _PER_DEVICE, _TIMES), UNKNOWN, np.int16)
