"""Determines which steps are part of the result: those of the newest generation back to where it resumed, and so on to the first.

A generation is identified by (epoch, generation). Called by the ledger and the usage summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.accounting.reports import Reports, StepRecord
from phalanx.core.ids import Epoch
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLineage:
    """All steps, each in either `kept` or `lost`, in order of (epoch, generation, time)."""

    kept: tuple[StepRecord, ...]
    lost: tuple[StepRecord, ...]

    @property
    def redone(self) -> int:
        """Number of steps that were made more than once."""
        counts = Counter(record.step for record in (*self.kept, *self.lost))
        return sum(1 for count in counts.values() if count > 1)


def split_steps(job: Job, attempts: Sequence[Attempt], reports: Mapping[Epoch, Reports]) -> StepLineage:
    """Split the steps of a job into kept and lost.

    For a running job, all steps of its newest generation count as kept so far. For one that failed, was cancelled or waits again, only
    the steps that a published checkpoint contains.
    """
    steps_of: dict[tuple[Epoch, int], list[StepRecord]] = {}
    for epoch in sorted(reports):
        for record in reports[epoch].steps:
            steps_of.setdefault((epoch, record.generation), []).append(record)
    limit = _last_kept_step(job, attempts, steps_of, reports)
    kept: list[StepRecord] = []
    taken: set[int] = set()
    for key in sorted(steps_of, reverse=True):
        records = steps_of[key]
        mine = [record for record in records if (limit is None or record.step <= limit) and record.step not in taken]
        mine = list({record.step: record for record in reversed(mine)}.values())[::-1]
        kept.extend(mine)
        taken.update(record.step for record in mine)
        start = resumed_step(key[1], records, reports[key[0]])
        limit = start if limit is None else min(limit, start)
    marks = set(map(id, kept))
    every = [record for key in sorted(steps_of) for record in steps_of[key]]
    return StepLineage(
        kept=tuple(record for record in every if id(record) in marks),
        lost=tuple(record for record in every if id(record) not in marks),
    )


def resumed_step(generation: int, records: Iterable[StepRecord], reports: Reports) -> int:
    """The step from which a generation resumed: as it reported, else the one before its first step."""
    reported = [record.step for record in reports.resumed if record.generation == generation]
    return reported[-1] if reported else min(record.step for record in records) - 1


def _last_kept_step(
    job: Job,
    attempts: Sequence[Attempt],
    steps_of: Mapping[tuple[Epoch, int], list[StepRecord]],
    reports: Mapping[Epoch, Reports],
) -> int | None:
    """The highest step number that can be kept; None if all steps of the newest generation are kept."""
    if job.state is JobState.SUCCEEDED or not steps_of:
        return None
    newest = max(steps_of)
    live = next((attempt for attempt in attempts if attempt.holds_allocation), None)
    if live is not None and (live.epoch, int(live.generation)) <= newest:
        return None
    if live is not None and live.resume_from is not None:
        return live.resume_from.step
    published = [checkpoint.step for checkpoint in job.checkpoints]
    if live is not None:  # it has made no step yet, and its checkpoint is not verified yet
        return max(published, default=0)
    durable = [record.step for epoch in reports for record in reports[epoch].saved]
    return max(published or durable, default=0)


def overlapping_steps(reports: Mapping[Epoch, Reports], *, one_clock: bool) -> int:
    """Number of steps of an older epoch that began at or after the first step of a newer one: two attempts ran at once. Must be 0.

    Args:
        reports: the reports of all epochs.
        one_clock: all nodes share one boot, so that CLOCK_BOOTTIME is comparable; otherwise Unix time is used.
    """

    def begun(record: StepRecord) -> int:
        return record.begin_ns if one_clock else record.begin_us * 1000

    count, newer_ns = 0, None
    for epoch in sorted(reports, reverse=True):
        starts = [begun(record) for record in reports[epoch].steps]
        if newer_ns is not None:
            count += sum(1 for start in starts if start >= newer_ns)
        if starts:
            newer_ns = min(starts) if newer_ns is None else min(newer_ns, *starts)
    return count
