"""Collects failed attempts for the report of failures: from the records of jobs, and the usage summaries of those that failed."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from phalanx.api.runtime import ApiRuntime, run_in_thread
from phalanx.api.services import HeadServices
from phalanx.api.views.usage_summaries import usage_summary_of
from phalanx.core.accounting.cost_report import Amount, Metered
from phalanx.core.accounting.failure_report import FAILURES, FailedAttempt
from phalanx.core.accounting.usage_summary import AttemptSummary
from phalanx.core.lifecycle.failure_attribution import first_failure
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.job import Job
from phalanx.ports.store import JobFilter

FAILED_JOBS_MAX: Final = 300  # whose reports of steps are read: some milliseconds each, of long trainings a second
_PAGE: Final = 500


async def failed_attempts(
    runtime: ApiRuntime, since_s: float, until_s: float, metered: Metered
) -> tuple[list[FailedAttempt], int]:
    """Return the attempts that failed in a period, and the number of older failed jobs that were not read."""
    failed, count = await run_in_thread(_failed_jobs, runtime.services, since_s, until_s)
    costs = job_costs(metered)
    found: list[FailedAttempt] = []
    for job, attempts in failed:
        summary = await usage_summary_of(runtime, job)
        by_epoch = {each.epoch: each for each in summary.attempts}
        found += [
            _failed(job, one, by_epoch[one.epoch], costs.get(job.id)) for one in attempts if one.epoch in by_epoch
        ]
    return found, count - len(failed)


@dataclass(frozen=True, slots=True)
class NodeFailures:
    """The failures of attempts whose first failure was on this node, and the number of their jobs; `node` is "" where that is unknown."""

    node: str
    failures: int
    jobs: int


def failures_by_node(
    services: HeadServices, since_s: float, until_s: float, *, jobs_max: int
) -> tuple[list[NodeFailures], bool]:
    """Return failures of a period by node, most first, and whether older jobs were left out. Reads no reports, so it is fast.

    Args:
        services: of the head.
        since_s: begin of the period, Unix time.
        until_s: its end.
        jobs_max: number of jobs that are read, those that have not ended and then the newest.
    """
    failures: Counter[str] = Counter()
    jobs: dict[str, set[str]] = {}
    # By number: a search by time sorts all that it finds, which takes 5 s for a million jobs.
    every = _jobs_with_attempts(services, None)
    for job, attempts in islice(every, jobs_max):
        for attempt in attempts:
            causes = _failures(attempt) if _is_within(attempt, since_s, until_s) else []
            if causes:
                node = _node_of(attempt)
                failures[node] += len(causes)
                jobs.setdefault(node, set()).add(job.id)
    found = [NodeFailures(node, count, len(jobs[node])) for node, count in failures.items()]
    return sorted(found, key=lambda one: (-one.failures, -one.jobs, one.node)), next(every, None) is not None


def job_costs(metered: Metered) -> dict[str, Amount]:
    """What each job held, and its exact cost."""
    found: dict[str, Amount] = {}
    for line in metered.values():
        for holder, amount in line.held.items():
            found.setdefault(holder.job, Amount()).add(amount)
    return found


def _failed_jobs(services: HeadServices, since_s: float, until_s: float) -> tuple[list[tuple[Job, list[Attempt]]], int]:
    """The newest jobs with failures in the period and their failed attempts, and the number of all; only the newest are held."""
    count = 0

    def failed_jobs() -> Iterator[tuple[Job, list[Attempt]]]:
        nonlocal count
        for job, attempts in _jobs_with_attempts(services, since_s):
            failed = [one for one in attempts if _failures(one) and _is_within(one, since_s, until_s)]
            if failed:
                count += 1
                yield job, failed

    newest = heapq.nlargest(FAILED_JOBS_MAX, failed_jobs(), key=lambda one: one[0].seq)
    return newest, count


def _is_within(attempt: Attempt, since_s: float, until_s: float) -> bool:
    return attempt.placed_s < until_s and (attempt.ended_s is None or since_s <= attempt.ended_s < until_s)


def _jobs_with_attempts(services: HeadServices, since_s: float | None) -> Iterator[tuple[Job, list[Attempt]]]:
    """Jobs that have not ended, then those that ended since then (None: ever), the newest first, with their attempts."""
    store = services.store
    live = {job.id: job for job, _ in services.controller.live_attempts()}
    live |= {job.id: job for job in services.controller.pending_jobs() if job.epoch}
    for job in live.values():
        yield job, store.attempts(job.id)
    before: int | None = None
    while page := store.jobs(JobFilter(ended_since_s=since_s, before_seq=before, limit=_PAGE)):
        before = page[-1].seq
        ended = [job for job in page if job.id not in live]
        newest = store.newest_attempts([job.id for job in ended])
        for job in ended:
            if job.epoch > 1:
                yield job, store.attempts(job.id)
            else:
                yield job, [newest[job.id]] if job.id in newest else []


def _failures(attempt: Attempt) -> list[EndCause]:
    """The failures of all its generations; the end of the last one is not always among the causes."""
    causes = [cause for cause in attempt.causes if cause in FAILURES]
    last = attempt.stop_cause
    if attempt.ended_s is not None and last in FAILURES and (not attempt.causes or attempt.causes[-1] is not last):
        causes.append(last)
    return causes


def _node_of(attempt: Attempt) -> str:
    """The node of the first failure, else the first node that was lost."""
    first = first_failure(attempt)
    lost = [member.node_id for member in attempt.members if member.state is MemberState.LOST]
    return first.node_id if first is not None else lost[0] if lost else ""


def _failed(job: Job, attempt: Attempt, summary: AttemptSummary, cost: Amount | None) -> FailedAttempt:
    first, causes = first_failure(attempt), _failures(attempt)
    rule = first.diagnosis.rule if first is not None and first.diagnosis is not None else ""
    lost_us = round(summary.gpu_seconds.lost * 1e6)
    return FailedAttempt(
        job=job.id,
        cause=rule or causes[-1].value,
        node=_node_of(attempt),
        user=job.user,
        project=job.project,
        queue=job.queue,
        failures=len(causes),
        held_us=round(summary.gpu_seconds.total * 1e6),
        lost_us=lost_us,
        exact=0 if cost is None or not cost.gpu_us else lost_us * cost.exact // cost.gpu_us,
    )
