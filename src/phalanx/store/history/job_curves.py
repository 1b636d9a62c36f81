"""The course of a job's training in at most 256 points, however many steps it makes. Pure: no clock, no store.

A point covers a number of steps that doubles whenever there are too many points. It keeps the first, last, smallest and largest loss, so a
spike of one step stays visible. A step that is repeated after a restart counts as it ran last: the points from there on are dropped, and the
time that they took stays spent.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from phalanx.core.work.pace import TimedStep
from phalanx.store.history.packing import DamagedChunk

POINTS_MAX: Final = 256
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BIQ")  # version, points, width
_STEP_MAX: Final = 1 << 53  # a float is exact up to here


@dataclass(slots=True)
class CurvePoint:
    """Consecutive steps. Times are Unix seconds; NaN is unknown.

    Attributes:
        steps: the number of steps that were reported.
        begin_s, end_s: end of the first and of the last step.
        seconds: the length of all steps with a known length, of which there are `timed`.
    """

    first_step: float
    last_step: float
    steps: float
    begin_s: float
    end_s: float
    loss_first: float
    loss_last: float
    loss_min: float
    loss_max: float
    timed: float
    seconds: float
    step_s_min: float
    step_s_max: float


_NAMES: Final = tuple(one.name for one in fields(CurvePoint))


class JobCurve:
    """The points of one job."""

    def __init__(self, points: Sequence[CurvePoint] = (), width: int = 1) -> None:
        self.points: list[CurvePoint] = list(points)
        self.width = width

    def add(self, one: TimedStep) -> None:
        """Add a step."""
        if not 0 <= one.step < _STEP_MAX:
            return
        if self.points and one.step <= self.points[-1].last_step:
            self._cut(one.step)
        fresh = _point(one)
        last = self.points[-1] if self.points else None
        if last is not None and last.first_step // self.width == one.step // self.width:
            _extend(last, fresh)
            return
        self.points.append(fresh)
        while len(self.points) > POINTS_MAX:
            self._halve()

    def _halve(self) -> None:
        self.width *= 2
        merged: list[CurvePoint] = []
        for point in self.points:
            if merged and merged[-1].first_step // self.width == point.first_step // self.width:
                _extend(merged[-1], point)
            else:
                merged.append(point)
        self.points = merged

    def _cut(self, step: int) -> None:
        """Drop the steps from `step` on. Of a point that has earlier ones too, a share of its time stays."""
        while self.points and self.points[-1].first_step >= step:
            self.points.pop()
        if self.points and (last := self.points[-1]).last_step >= step:
            share = (step - last.first_step) / (last.last_step + 1 - last.first_step)
            last.steps, last.timed, last.seconds = last.steps * share, last.timed * share, last.seconds * share
            last.end_s = last.begin_s + (last.end_s - last.begin_s) * share
            last.last_step = float(step - 1)

    def pack(self) -> bytes:
        """The curve as bytes."""
        columns = b"".join(array("d", [getattr(point, name) for point in self.points]).tobytes() for name in _NAMES)
        planes = b"".join(columns[byte::8] for byte in range(8))
        return zlib.compress(_HEAD.pack(_VERSION, len(self.points), self.width) + planes, 6)

    @classmethod
    def unpack(cls, data: bytes) -> JobCurve:
        """The curve of bytes that `pack` made.

        Raises:
            DamagedChunk: they are damaged, or of another release.
        """
        try:
            whole = zlib.decompress(data)
            version, count, width = _HEAD.unpack_from(whole)
            planes = whole[_HEAD.size :]
            size = len(_NAMES) * count
            if version != _VERSION or len(planes) != size * 8 or count > POINTS_MAX or width < 1:
                raise DamagedChunk(f"a curve of version {version}")
            mixed = bytearray(size * 8)
            for byte in range(8):
                mixed[byte::8] = planes[byte * size : (byte + 1) * size]
            values = array("d", bytes(mixed))
        except (zlib.error, struct.error) as error:
            raise DamagedChunk(str(error)) from error
        return cls([CurvePoint(*values[at::count]) for at in range(count)], width)


def goodput(points: Sequence[CurvePoint], held: Sequence[tuple[float, float]]) -> list[float | None]:
    """At each point, the share of the time that the job held its devices until then which became steps of its result.

    Args:
        points: of the curve.
        held: from when to when attempts held their devices, in Unix seconds; the last one may be open-ended.
    """
    found: list[float | None] = []
    done_s = 0.0
    for point in points:
        done_s += point.seconds
        spent_s = sum(max(0.0, min(end_s, point.end_s) - begin_s) for begin_s, end_s in held)
        found.append(min(1.0, done_s / spent_s) if spent_s > 0 and point.timed else None)
    return found


def _point(one: TimedStep) -> CurvePoint:
    loss = math.nan if one.loss is None else one.loss
    length = math.nan if one.seconds is None else one.seconds
    known = one.seconds is not None
    step = float(one.step)
    return CurvePoint(
        step,
        step,
        1.0,
        one.at_s,
        one.at_s,
        loss,
        loss,
        loss,
        loss,
        float(known),
        length if known else 0.0,
        length,
        length,
    )


def _extend(point: CurvePoint, later: CurvePoint) -> None:
    """Add a later point to an earlier one."""
    point.last_step, point.end_s = later.last_step, later.end_s
    point.steps += later.steps
    point.timed += later.timed
    point.seconds += later.seconds
    point.loss_first = later.loss_first if math.isnan(point.loss_first) else point.loss_first
    point.loss_last = point.loss_last if math.isnan(later.loss_last) else later.loss_last
    point.loss_min, point.loss_max = _least(point.loss_min, later.loss_min), _most(point.loss_max, later.loss_max)
    point.step_s_min = _least(point.step_s_min, later.step_s_min)
    point.step_s_max = _most(point.step_s_max, later.step_s_max)


def _least(one: float, other: float) -> float:
    return other if math.isnan(one) or other < one else one


def _most(one: float, other: float) -> float:
    return other if math.isnan(one) or other > one else one
