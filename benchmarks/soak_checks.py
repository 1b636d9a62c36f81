"""Records of the answers in a soak test. Every contradiction counts as a wrong answer. Pure bookkeeping, no network."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled", "timeout"})
WRONG_MAX: Final = 200  # stored wrong answers; the rest is only counted
Span = Sequence[Any]
"""(node, device or rank, job, epoch, generation, begin_ns, end_ns), as seen by a supervisor; CLOCK_BOOTTIME, common to all processes of this machine."""


@dataclass(slots=True)
class AnswerChecks:
    """The records of one run.

    Attributes:
        jobs: key of every acknowledged submit -> ids of its jobs (several for an array).
        seen: job -> last seen (state, epoch).
        cancelled: jobs whose cancel was acknowledged.
    """

    jobs: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[str, tuple[str, int]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def record_wrong(self, what: str) -> None:
        """Record a wrong answer."""
        self.counts["wrong answers"] += 1
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)

    def check_acknowledged(self, key: str, ids: list[str]) -> None:
        """Record the answer to a submit. A second answer for one key must have the same jobs."""
        before = self.jobs.setdefault(key, ids)
        if before != ids:
            self.record_wrong(f"submit {key} was acknowledged as {before[:2]} and as {ids[:2]}")

    def check_view(self, view: Mapping[str, Any]) -> None:
        """Record the view of a job. It must not contradict earlier views."""
        job_id, state, epoch = str(view["id"]), str(view["state"]), int(view["epoch"])
        before = self.seen.get(job_id)
        if before is not None and before[0] in TERMINAL and state != before[0]:
            self.record_wrong(f"job {job_id} was {before[0]} and is {state}")
        if before is not None and epoch < before[1]:
            self.record_wrong(f"job {job_id} was in epoch {before[1]} and is in {epoch}")
        self.seen[job_id] = (state, max(epoch, before[1] if before else 0))
        if state == "running" and view["gpu_count"] and not view["nodes"]:
            self.record_wrong(f"job {job_id} is running without nodes")

    def check_page(self, views: Sequence[Mapping[str, Any]], *, before_seq: int | None = None) -> None:
        """Check one page: newest first, no duplicates, no overlap with an earlier page."""
        seqs = [int(view["seq"]) for view in views]
        if any(later >= earlier for earlier, later in itertools.pairwise(seqs)):
            self.record_wrong(f"a page is not newest first, or has a job twice: {seqs[:20]}")
        if before_seq is not None and seqs and seqs[0] >= before_seq:
            self.record_wrong(f"a page before seq {before_seq} begins with {seqs[0]}")

    def check_list(self, views: Sequence[Mapping[str, Any]], states: Mapping[str, int]) -> None:
        """Check the whole list and the overview without activity: exactly the acknowledged jobs, once each, and equal counts."""
        times = Counter(str(view["id"]) for view in views)
        promised = {job_id for ids in self.jobs.values() for job_id in ids}
        duplicates = [job_id for job_id, count in times.items() if count > 1]
        lost, unknown = promised - set(times), set(times) - promised
        for what, jobs in (
            ("listed twice", duplicates),
            ("acknowledged but not listed", lost),
            ("listed but never acknowledged", unknown),
        ):
            if jobs:
                self.record_wrong(f"{len(jobs)} jobs {what}: {sorted(jobs)[:10]}")
        counted = Counter(str(view["state"]) for view in views)
        overview = {state: count for state, count in states.items() if count}
        if dict(counted) != overview:
            self.record_wrong(f"the list has {dict(counted)}, but the overview {overview}")
        for view in views:
            self.check_view(view)
            if view["id"] in self.cancelled and view["state"] not in TERMINAL:
                self.record_wrong(f"job {view['id']} was cancelled and is {view['state']}")

    def check_history(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Check the history of the head: no gaps, and no job placed after its end or in an epoch that is not the next one."""
        for number, line in enumerate(lines, start=1):
            if line["seq"] != number:
                self.record_wrong(f"line {number} of the history has seq {line['seq']}")
                break
        epochs: dict[str, int] = defaultdict(int)
        ended: dict[str, str] = {}
        for line in lines:
            job_id, kind = line["job_id"], line["kind"]
            if job_id is None:
                continue
            if kind == "placed":
                if job_id in ended:
                    self.record_wrong(f"job {job_id} was placed (seq {line['seq']}) after it had {ended[job_id]}")
                if line["epoch"] != epochs[job_id] + 1:
                    self.record_wrong(
                        f"job {job_id} was placed in epoch {line['epoch']} after {epochs[job_id]} (seq {line['seq']})"
                    )
                epochs[job_id] = int(line["epoch"])
            elif kind in TERMINAL:
                if job_id in ended:
                    self.record_wrong(f"job {job_id} {kind} (seq {line['seq']}) after it had {ended[job_id]}")
                ended[job_id] = kind

    def check_devices(self, spans: Iterable[Span]) -> None:
        """Check that no device had two tasks at once, frozen or not."""
        by_device: dict[Any, list[Span]] = defaultdict(list)
        for span in spans:
            self.counts["tasks on devices"] += 1
            by_device[span[0], span[1]].append(span)
        for place, tasks in by_device.items():
            for earlier, later in _overlaps(tasks):
                self.record_wrong(f"device {place} had tasks {earlier[2:]} and {later[2:]} at once")

    def check_generations(self, spans: Iterable[Span]) -> None:
        """Check that no job ran in two epochs or generations at once: the older one must be frozen or ended."""
        by_job: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_job[span[2]].append(span)
        for job_id, runs in by_job.items():
            starts = {(span[3], span[4]) for span in runs}
            for one, two in itertools.combinations(sorted(starts), 2):
                last_ns = max(span[6] for span in runs if (span[3], span[4]) == one)
                first_ns = min(span[5] for span in runs if (span[3], span[4]) == two)
                if first_ns < last_ns:
                    self.record_wrong(
                        f"job {job_id} ran as (epoch, generation) {one} and {two} at once, for {(last_ns - first_ns) / 1e9:.3f} s"
                    )


def _overlaps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    ordered = sorted(spans, key=lambda span: (span[5], span[6]))
    return [(one, two) for one, two in itertools.pairwise(ordered) if two[5] < one[6]]
