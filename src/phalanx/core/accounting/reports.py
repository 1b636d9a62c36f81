"""Reports of one attempt's ranks, parsed from the stream of its first node (JSON lines of `wire.rank`).

Called by the usage summary and the ledger. Invalid or incomplete lines are skipped: a training script may write anything into its pipe, and the
accounting must still work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.ids import Epoch
from phalanx.core.jsonline import finite_float

LINE_BYTES_MAX: Final = 1 << 20  # a report has at most wire.rank.REPORT_BYTES_MAX (4 KiB); longer lines are skipped
_US_MAX: Final = 1 << 62  # beyond any clock; bounds values like at_s=1e300


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
class CheckpointRecord:
    """One complete checkpoint. Training stalled for `stall_s`; the write of `write_s` ran in parallel."""

    epoch: Epoch
    generation: int
    step: int
    bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRecord:
    """A generation loaded a checkpoint that contains everything up to `step`."""

    generation: int
    step: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """All reports of one epoch, each kind sorted by its own fields, independent of the order in which lines arrived.

    Attributes:
        stalls_us: microseconds for which saves stalled training, by generation.
    """

    epoch: Epoch
    steps: tuple[StepRecord, ...] = ()
    saved: tuple[CheckpointRecord, ...] = ()
    resumed: tuple[ResumedRecord, ...] = ()
    stalls_us: Mapping[int, int]
    steps_total: int | None = None


def read_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream that arrives in pieces, without their line ends. Holds at most one piece and one partial line.

    Lines longer than LINE_BYTES_MAX are skipped.
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
    """Collect the reports of one epoch. Every rank of the node reports; the steps of the lowest rank that reports any count for the job.

    Each line is read once and dropped, so that `lines` may be a stream: only the records of one rank are held.
    """
    collector = _Collector(epoch=epoch)
    for line in lines:
        if _whole(line, "epoch") == epoch:
            collector.add(line)
    return collector.reports()


def step_rank(epoch: Epoch, line: Mapping[str, Any]) -> int | None:
    """The rank whose step of this epoch a line reports; None for any other line."""
    return _whole(line, "rank") if line.get("k") == "step" and _whole(line, "epoch") == epoch else None


@dataclass(slots=True, kw_only=True)
class _Collector:
    """Reports found so far. `lowest_rank`: the lowest rank that has reported a step; `steps` are its own."""

    epoch: Epoch
    lowest_rank: int | None = None
    steps: set[StepRecord] = field(default_factory=set)
    saved: set[CheckpointRecord] = field(default_factory=set)
    resumed: set[ResumedRecord] = field(default_factory=set)
    stalls_us: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # by rank and generation: `lowest_rank` may still change
    saves_us: dict[int, int] = field(default_factory=dict)
    steps_total: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of this epoch."""
        generation = _whole(line, "generation") or 0
        match line.get("k"):
            case "step":
                self._add_step(line)
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
        """All reports, each kind sorted by its own fields."""
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

    def _add_step(self, line: Mapping[str, Any]) -> None:
        """Add a step of the lowest rank; a step of a lower one replaces all steps. Exact duplicates are dropped."""
        rank = step_rank(self.epoch, line)
        if rank is None or (self.lowest_rank is not None and rank > self.lowest_rank):
            return
        if rank != self.lowest_rank:
            self.lowest_rank = rank
            self.steps.clear()
        record = _step(self.epoch, line)
        if record is not None:
            self.steps.add(record)

    def _stalls_us(self) -> dict[int, int]:
        """Each save is reported twice, as a stall at once and in the checkpoint when durable: the larger sum counts.

        Sums of integer microseconds, not floats, so that the result does not depend on the order of lines.
        """
        stalls = self.stalls_us.get(self.lowest_rank or 0, {})
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


def _saved(epoch: Epoch, generation: int, step: int, line: Mapping[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(
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
    """A finite number; None for NaN, which cannot be plotted or summed."""
    return finite_float(line.get(name))


def _seconds(line: Mapping[str, Any], name: str) -> float:
    return min(max(_number(line, name) or 0.0, 0.0), _US_MAX / 1e6)
