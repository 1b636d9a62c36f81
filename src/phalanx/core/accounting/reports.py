"""What the ranks of one attempt reported, read from the stream that its first node shipped (JSON lines of `wire.rank`).

Called by the receipt and the ledger. It judges nothing: a line that is no report, or lacks what its kind needs, is left out, because
a training script may write anything into its pipe and a bill must come out all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.ids import Epoch
from phalanx.core.jsonline import finite

LINE_BYTES_MAX: Final = 1 << 20  # a report is at most wire.rank.REPORT_BYTES_MAX, 4 KiB; longer ones are noise
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


def read_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream that comes in pieces, without their ends. No more is held than a piece and a line's beginning.

    One that goes past LINE_BYTES_MAX is no report: it is left out.
    """
    rest, too_long = b"", False
    for piece in pieces:
        first, *lines = piece.split(b"\n")
        rest = b"" if too_long else rest + first
        too_long = too_long or len(rest) > LINE_BYTES_MAX
        if lines:
            if not too_long:
                yield rest
            *whole, rest = lines
            too_long = False
            yield from whole
    if not too_long:
        yield rest


def read_reports(epoch: Epoch, lines: Iterable[Mapping[str, Any]]) -> Reports:
    """The reports of one epoch. Every rank of the node reports; the lowest one that reports steps speaks for the job.

    Each line is looked at once and let go, so that they may come from a stream: what is held are the records of one rank.
    """
    reading = _Reading(epoch=epoch)
    for line in lines:
        if _whole(line, "epoch") == epoch:
            reading.take(line)
    return reading.reports()


def step_rank(epoch: Epoch, line: Mapping[str, Any]) -> int | None:
    """The rank whose step of this epoch a line reports; None for any other line."""
    return _whole(line, "rank") if line.get("k") == "step" and _whole(line, "epoch") == epoch else None


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What was found so far. `speaker`: the lowest rank that has reported a step; the steps are its own."""

    epoch: Epoch
    speaker: int | None = None
    steps: set[StepRecord] = field(default_factory=set)
    saved: set[SavedRecord] = field(default_factory=set)
    resumed: set[ResumedRecord] = field(default_factory=set)
    stalls_us: dict[int, dict[int, int]] = field(default_factory=dict)  # by rank and generation: who speaks shows later
    saves_us: dict[int, int] = field(default_factory=dict)
    steps_total: int | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        """Keep what a line of this epoch says."""
        generation = _whole(line, "generation") or 0
        match line.get("k"):
            case "step":
                self._take_step(line)
            case "checkpoint":
                self.saves_us[generation] = self.saves_us.get(generation, 0) + _stall_us(line, "stall_s")
                if (step := _whole(line, "step")) is not None:
                    self.saved.add(_saved(self.epoch, generation, step, line))
            case "resumed":
                if (step := _whole(line, "step")) is not None:
                    load_s = _seconds(line, "load_s")
                    self.resumed.add(ResumedRecord(generation=generation, step=step, load_s=load_s))
            case "stall":
                if line.get("cause") == "save" and (rank := _whole(line, "rank")) is not None:
                    sums = self.stalls_us.setdefault(rank, {})
                    sums[generation] = sums.get(generation, 0) + _stall_us(line, "seconds")
            case "planned":
                if (total := _whole(line, "steps_total")) is not None:
                    self.steps_total = total if self.steps_total is None else max(total, self.steps_total)
            case _:
                pass

    def reports(self) -> Reports:
        """All of it, each kind in the order of its own numbers."""
        saved = sorted(
            self.saved, key=lambda each: (each.generation, each.step, each.bytes, each.stall_s, each.write_s)
        )
        return Reports(
            epoch=self.epoch,
            steps=tuple(sorted(self.steps, key=_step_place)),
            saved=tuple(saved),
            resumed=tuple(sorted(self.resumed, key=lambda each: (each.generation, each.step, each.load_s))),
            stalls_us=self._stalls_us(),
            steps_total=self.steps_total,
        )

    def _take_step(self, line: Mapping[str, Any]) -> None:
        """A step of the speaker; one of a lower rank makes that the speaker. Exact doubles are dropped."""
        rank = step_rank(self.epoch, line)
        if rank is None or (self.speaker is not None and rank > self.speaker):
            return
        if rank != self.speaker:
            self.speaker = rank
            self.steps.clear()
        record = _step(self.epoch, line)
        if record is not None:
            self.steps.add(record)

    def _stalls_us(self) -> dict[int, int]:
        """Each save is reported twice, at once as a stall and when durable as part of the checkpoint: the larger sum counts.

        Sums of whole microseconds, not of floats, so that the order of the lines cannot show in the last digit.
        """
        stalls = self.stalls_us.get(self.speaker or 0, {})
        return {
            each: max(stalls.get(each, 0), self.saves_us.get(each, 0)) for each in sorted({*stalls, *self.saves_us})
        }


def _step_place(record: StepRecord) -> tuple[int, int, int, int, int, float, int]:
    """By generation and time, then by every field, so that equal sets give equal tuples."""
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


def _saved(epoch: Epoch, generation: int, step: int, line: Mapping[str, Any]) -> SavedRecord:
    return SavedRecord(
        epoch=epoch,
        generation=generation,
        step=step,
        bytes=_whole(line, "bytes") or 0,
        stall_s=_seconds(line, "stall_s"),
        write_s=_seconds(line, "write_s"),
    )


def _stall_us(line: Mapping[str, Any], name: str) -> int:
    return round(_seconds(line, name) * 1e6)


def _whole(line: Mapping[str, Any], name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """A finite number; a loss that became NaN is no loss to draw or to sum."""
    return finite(line.get(name))


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return min(max(_number(line, name) or 0.0, 0.0), _US_MAX / 1e6)
