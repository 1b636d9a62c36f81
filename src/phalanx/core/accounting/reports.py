"""What the ranks of one attempt reported, read from the stream that its first node shipped (JSON lines of `wire.rank`).

Called by the receipt and the ledger. It judges nothing: a line that is no report, or lacks what its kind needs, is left out, because
a training script may write anything into its pipe and a bill must come out all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.ids import Epoch
from phalanx.core.jsonline import finite, object_of

_US_MAX: Final = 1 << 62  # past any clock; bounds a typo like at_s=1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as rank 0 reported it. `begin_us` and `end_us` are Unix time, `begin_ns` is its node's CLOCK_BOOTTIME."""

    epoch: Epoch
    generation: int
    step: int
    begin_us: int
    end_us: int
    begin_ns: int
    loss: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRecord:
    """One checkpoint that is whole on disk. Training stood still for `stall_s`; `write_s` ran beside it."""

    epoch: Epoch
    generation: int
    step: int
    bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRecord:
    """A generation loaded a checkpoint that holds everything up to `step`."""

    generation: int
    step: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """All of one epoch, each kind in the order of its own numbers: the order in which lines arrived plays no part.

    Attributes:
        stalls_us: microseconds in which a save made training wait, by generation.
    """

    epoch: Epoch
    steps: tuple[StepRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    resumed: tuple[ResumedRecord, ...] = ()
    stalls_us: Mapping[int, int]
    steps_total: int | None = None


def parse_reports(data: bytes) -> list[dict[str, Any]]:
    """The objects in a stream of JSON lines; a torn last line and lines that are no JSON object are left out."""
    found: list[dict[str, Any]] = []
    for line in data.split(b"\n"):
        value = object_of(line)
        if value is not None:
            found.append(value)
    return found


def read_reports(epoch: Epoch, lines: Iterable[Mapping[str, Any]]) -> Reports:
    """The reports of one epoch. Every rank of the node reports; the lowest one that reports steps speaks for the job."""
    own = [line for line in lines if _whole(line, "epoch") == epoch]
    stepping = [rank for line in own if line.get("k") == "step" and (rank := _whole(line, "rank")) is not None]
    speaker = min(stepping, default=0)
    spoken = [line for line in own if _whole(line, "rank") == speaker]
    totals = [
        total for line in own if line.get("k") == "planned" and (total := _whole(line, "steps_total")) is not None
    ]
    return Reports(
        epoch=epoch,
        steps=_steps(epoch, spoken),
        saved=_saved(epoch, own),
        resumed=_resumed(own),
        stalls_us=_stalls_us(spoken, own),
        steps_total=max(totals, default=None),
    )


def _steps(epoch: Epoch, lines: Iterable[Mapping[str, Any]]) -> tuple[StepRecord, ...]:
    """By generation and time, then by every field, so that equal sets give equal tuples; exact doubles are dropped."""
    found = {record for line in lines if line.get("k") == "step" and (record := _step(epoch, line)) is not None}
    return tuple(sorted(found, key=_step_place))


def _step_place(record: StepRecord) -> tuple[int, int, int, int, int, float, int]:
    loss = -math.inf if record.loss is None else record.loss
    return record.generation, record.begin_us, record.end_us, record.step, record.begin_ns, loss, record.tokens or 0


def _step(epoch: Epoch, line: Mapping[str, Any]) -> StepRecord | None:
    step, begin_ns, end_ns = _whole(line, "step"), _whole(line, "begin_ns"), _whole(line, "end_ns")
    at_s = _number(line, "at_s")
    if step is None or begin_ns is None or end_ns is None or at_s is None or abs(at_s) * 1e6 > _US_MAX:
        return None
    end_us = round(at_s * 1e6)
    return StepRecord(
        epoch=epoch,
        generation=_whole(line, "generation") or 0,
        step=step,
        begin_us=end_us - max(0, end_ns - begin_ns) // 1000,
        end_us=end_us,
        begin_ns=begin_ns,
        loss=_number(line, "loss"),
        tokens=_whole(line, "tokens"),
    )


def _saved(epoch: Epoch, lines: Iterable[Mapping[str, Any]]) -> tuple[SavedRecord, ...]:
    found = {
        SavedRecord(
            epoch=epoch,
            generation=_whole(line, "generation") or 0,
            step=step,
            bytes=_whole(line, "bytes") or 0,
            stall_s=_seconds(line, "stall_s"),
            write_s=_seconds(line, "write_s"),
        )
        for line in lines
        if line.get("k") == "checkpoint" and (step := _whole(line, "step")) is not None
    }
    return tuple(sorted(found, key=lambda each: (each.generation, each.step, each.bytes, each.stall_s, each.write_s)))


def _resumed(lines: Iterable[Mapping[str, Any]]) -> tuple[ResumedRecord, ...]:
    found = {
        ResumedRecord(generation=_whole(line, "generation") or 0, step=step, load_s=_seconds(line, "load_s"))
        for line in lines
        if line.get("k") == "resumed" and (step := _whole(line, "step")) is not None
    }
    return tuple(sorted(found, key=lambda each: (each.generation, each.step, each.load_s)))


def _stalls_us(spoken: list[Mapping[str, Any]], own: list[Mapping[str, Any]]) -> dict[int, int]:
    """Each save is reported twice, at once as a stall and when durable as part of the checkpoint: the larger sum counts.

    Sums of whole microseconds, not of floats, so that the order of the lines cannot show in the last digit.
    """
    sums: dict[tuple[str, int], int] = {}
    stalls = [line for line in spoken if line.get("k") == "stall" and line.get("cause") == "save"]
    for kind, name, lines in (("stall", "seconds", stalls), ("checkpoint", "stall_s", own)):
        for line in lines:
            if line.get("k") == kind:
                key = (kind, _whole(line, "generation") or 0)
                sums[key] = sums.get(key, 0) + round(_seconds(line, name) * 1e6)
    generations = {generation for _, generation in sums}
    return {each: max(sums.get(("stall", each), 0), sums.get(("checkpoint", each), 0)) for each in sorted(generations)}


def _whole(line: Mapping[str, Any], name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """A finite number; a loss that became NaN is no loss to draw or to sum."""
    return finite(line.get(name))


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return min(max(_number(line, name) or 0.0, 0.0), _US_MAX / 1e6)
