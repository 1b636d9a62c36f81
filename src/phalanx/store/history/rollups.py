"""Rollups of a node's metrics: how many values of ten seconds each holds, and their mean, minimum and maximum. Pure functions over arrays.

Shapes: F fields (count, mean, minimum, maximum), R rows (metrics of the node, then of each device), T times. Counts, minima and maxima of
rollups are exact however they were combined. A mean is rounded to its metric's unit each time. The mean of throttle reasons is the share of
time with any; their maximum is the set of those that occurred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from phalanx.store.history.metrics import (
    DEVICE_METRICS,
    NODE_METRICS,
    UNKNOWN,
    Codes,
    Metric,
    decode,
    encode,
    metrics_of,
    reason_rows,
)

COUNT, MEAN, MINIMUM, MAXIMUM = range(4)
_ALWAYS: Final = 200  # of throttle reasons: the code of a share of one


@dataclass(frozen=True, slots=True, eq=False)
class Rollups:
    """Consecutive rollups of one node.

    Attributes:
        begin_s: Unix time of the first.
        step_s: the time that each covers.
        devices: indexes of the devices, in the order of their rows.
        cells_FRT: the fields.
    """

    begin_s: int
    step_s: int
    devices: tuple[int, ...]
    cells_FRT: Codes  # noqa: N815  # the suffix names the axes

    @property
    def end_s(self) -> int:
        """Unix time of the end of the last."""
        return self.begin_s + self.step_s * int(self.cells_FRT.shape[2])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metric of each row."""
        return metrics_of(len(self.devices))


def of_values(begin_s: int, step_s: int, devices: tuple[int, ...], codes_RT: Codes) -> Rollups:  # noqa: N803  # axes
    """Rollups of one value each."""
    cells = np.stack([(codes_RT >= 0).astype(np.int16), codes_RT, codes_RT, codes_RT])
    reasons = reason_rows(metrics_of(len(devices)))
    share = np.where(codes_RT > 0, _ALWAYS, codes_RT)[reasons]
    cells[MEAN, reasons] = share
    cells[MINIMUM, reasons] = share
    return Rollups(begin_s, step_s, devices, cells)


def empty(begin_s: int, step_s: int, devices: tuple[int, ...], times: int) -> Rollups:
    """Rollups of nothing."""
    rows = len(NODE_METRICS) + len(devices) * len(DEVICE_METRICS)
    cells = np.full((4, rows, times), UNKNOWN, np.int16)
    cells[COUNT] = 0
    return Rollups(begin_s, step_s, devices, cells)


def combined(found: Rollups, step_s: int) -> Rollups:
    """Combine consecutive rollups to longer ones of `step_s`, a multiple of theirs that divides their number."""
    factor = step_s // found.step_s
    if factor == 1:
        return found
    fields, rows, times = found.cells_FRT.shape
    parts = found.cells_FRT.reshape(fields, rows, times // factor, factor)
    counts = parts[COUNT].astype(np.int64)
    known = counts > 0
    count = counts.sum(axis=2)
    values = np.where(known, decode(parts[MEAN], found.metrics), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (values * counts).sum(axis=2) / count
    least = np.where(known, parts[MINIMUM], np.int16(32_767)).min(axis=2)
    most = np.where(known, parts[MAXIMUM], np.int16(UNKNOWN)).max(axis=2)
    reasons = reason_rows(found.metrics)
    if reasons.any():
        most[reasons] = np.bitwise_or.reduce(np.where(known, parts[MAXIMUM], 0)[reasons], axis=2)
    some = count > 0
    cells = np.stack(
        [
            np.minimum(count, 32_767).astype(np.int16),
            encode(mean, found.metrics),
            np.where(some, least, UNKNOWN).astype(np.int16),
            np.where(some, most, UNKNOWN).astype(np.int16),
        ]
    )
    return Rollups(found.begin_s, step_s, found.devices, cells)


def laid_out(parts: Iterable[Rollups], begin_s: int, end_s: int, step_s: int) -> Rollups:
    """Lay rollups of one step over [begin_s, end_s); later parts replace what earlier ones have, where they know something."""
    found: Sequence[Rollups] = [part for part in parts if part.begin_s < end_s and part.end_s > begin_s]
    devices = tuple(sorted({device for part in found for device in part.devices}))
    whole = empty(begin_s, step_s, devices, (end_s - begin_s) // step_s)
    for part in found:
        rows = _rows(part.devices, devices)
        first = max(part.begin_s, begin_s)
        last = min(part.end_s, end_s)
        source = part.cells_FRT[:, :, (first - part.begin_s) // step_s : (last - part.begin_s) // step_s]
        times = slice((first - begin_s) // step_s, (last - begin_s) // step_s)
        target = whole.cells_FRT[:, rows, times]
        whole.cells_FRT[:, rows, times] = np.where(source[COUNT] > 0, source, target)
    return whole


def _rows(devices: tuple[int, ...], among: tuple[int, ...]) -> list[int]:
    """Where the rows of a node with `devices` are in one with `among`."""
    each = len(DEVICE_METRICS)
    place = {device: number for number, device in enumerate(among)}
    rows = list(range(len(NODE_METRICS)))
    for device in devices:
        first = len(NODE_METRICS) + place[device] * each
        rows += range(first, first + each)
    return rows
