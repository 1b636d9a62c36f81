"""Explains why a job waits and which changes would start it, also for a job that is not submitted (dry run).

The controller provides a snapshot of the state between two steps, and a thread of the API computes the answer. Answers are computed one
at a time, as each uses the CPU for a while, and within a time limit, as each trial schedules the whole fleet. Callers who may see jobs
also see the jobs in the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import read_body, reply
from phalanx.api.gate import known_job, sees_all_of
from phalanx.api.parts import HeadParts
from phalanx.api.routes import Routes
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.api.submit import notes_of, wish_of
from phalanx.api.views import budgets
from phalanx.controller.peek import Peek
from phalanx.core.errors import TryLater
from phalanx.core.ids import JobId
from phalanx.core.scheduling.counterfactuals import OPERATORS, UPDATES, Change, Counterfactuals
from phalanx.core.scheduling.forecast import NEVER, Expected, Forecast
from phalanx.core.scheduling.trial import near, tried
from phalanx.core.state.plan import Waiting
from phalanx.core.units import format_duration
from phalanx.core.work.job import Job, JobState, Reason
from phalanx.core.work.people import Action
from phalanx.wire.api.jobs import JobBody
from phalanx.wire.why import BlockerView, ChangeView, DryRunReply, RunView, StartView, WhyReply

T = TypeVar("T")

WORK_S: Final = 2.0  # for the trials of one answer, which a person waits for; a trial on 12,500 nodes takes one second
ASKING_MAX: Final = 8  # answers being computed or waiting for it
BLOCKERS_MAX: Final = 8  # named in one answer
_one_at_a_time = threading.Lock()
_asking = threading.BoundedSemaphore(ASKING_MAX)

routes = Routes()


@routes.get("/v1/jobs/{job_id}/why", Action.SEE, reply=WhyReply)
async def why_job(request: Request, job_id: JobId) -> Response:
    """Explain why a job waits: the jobs in the way, its expected start, and the smallest changes that would start it now."""
    runtime = runtime_of(request)
    parts = runtime.parts
    job = known_job(parts.store, job_id)
    if job.state is not JobState.PENDING:
        return reply(await off_loop(_started_or_ended, parts, job, sees_all_of(caller_of(request), job)))
    found = await runtime.answers.of(parts.driver.peek(job_id=job_id))
    whole = sees_all_of(caller_of(request), job)
    return reply(await off_loop(_in_turn, lambda: _why(parts, found, job, whole)))


@routes.post("/v1/jobs/dry-run", Action.SUBMIT, body=JobBody, reply=DryRunReply, passing=True)
async def dry_run(request: Request) -> Response:
    """Show what would happen if the job were submitted now. Invalid jobs are refused as in a submit; nothing is written."""
    runtime = runtime_of(request)
    parts = runtime.parts
    body = await read_body(request, parts.limits.body_bytes)
    command = await wish_of(runtime, caller_of(request), body)
    found = await runtime.answers.of(parts.driver.peek(wish=command))
    notes = notes_of(runtime, command.spec)
    return reply(await off_loop(_in_turn, lambda: _dry_run(parts, found, notes)))


def _in_turn(work: Callable[[], T]) -> T:
    """Compute one answer at a time.

    Raises:
        TryLater: too many requests wait.
    """
    if not _asking.acquire(blocking=False):
        raise TryLater(f"{ASKING_MAX} such requests are already being answered", hint="try again in a moment")
    try:
        with _one_at_a_time:
            return work()
    finally:
        _asking.release()


# ---- a submitted job ----------------------------------------------------------------------------------------------------


def _started_or_ended(parts: HeadParts, job: Job, whole: bool) -> WhyReply:
    """Return the answer for a job that does not wait: how long it has run and where, or how it ended."""
    now_s = parts.clock.now_s()
    attempts = parts.store.attempts(job.id)
    nodes = [grant.node_id for grant in attempts[-1].allocation.grants] if attempts else []
    if job.state is JobState.RUNNING:
        since_s = attempts[-1].placed_s if attempts else job.started_s
        headline = f"has run for {format_duration(max(0.0, now_s - (since_s or now_s)))} on {_names(nodes)}"
        return WhyReply(
            job_id=job.id,
            state=job.state,
            now_s=now_s,
            headline=_with_budgets(headline, job, whole),
            nodes=nodes,
            since_s=since_s,
        )
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    by = f" by {job.cancelled_by}" if job.cancelled_by else ""
    ago = "" if job.ended_s is None else f" {format_duration(max(0.0, now_s - job.ended_s))} ago"
    headline = f"{job.state.value}{code}{by}{ago}" + (f": {job.detail}" if job.detail and whole else "")
    return WhyReply(
        job_id=job.id,
        state=job.state,
        now_s=now_s,
        headline=headline,
        nodes=nodes,
        since_s=job.ended_s,
        detail=job.detail if whole else "",
    )


def _why(parts: HeadParts, found: Peek, job: Job, whole: bool) -> WhyReply:
    job = found.seen.jobs.get(job.id, job)
    if job.state is not JobState.PENDING or job.id in found.seen.attempts:  # it has started meanwhile
        return _started_or_ended(parts, parts.store.job(job.id) or job, whole)
    with _Explanation(parts, found, job) as answer:
        waiting = found.waiting or answer.waiting
        expected = answer.forecast.start_of(job)
        blockers, more = answer.blockers(waiting)
        changes = [_change_view(change, job.id) for change in answer.search.find()]
        return WhyReply(
            job_id=job.id,
            state=job.state,
            now_s=answer.now_s,
            headline=_with_budgets(_headline(waiting), job, whole),
            reason=waiting.reason.value,
            detail=waiting.detail,
            blockers=blockers,
            blockers_more=more,
            start=answer.start(expected),
            changes=changes,
        )


# ---- a dry run ----------------------------------------------------------------------------------------------------------


def _dry_run(parts: HeadParts, found: Peek, notes: list[str]) -> DryRunReply:
    job = found.would_be[0]
    with _Explanation(parts, found, job) as answer:
        trial = answer.forecast.trial
        starts = trial.starts(job.id)
        low_s, high_s, ends, likes = answer.forecast.run_of(job)
        entry = trial.scheduler.entries.get(job.id)
        gpus = entry.klass.gpus if entry is not None else job.spec.role.gpus.total
        hours = gpus * len(found.would_be) / 3600.0
        waiting = None if starts else answer.waiting
        blockers, more = ([], 0) if waiting is None else answer.blockers(waiting)
        nodes = (
            []
            if entry is None or not starts
            else sorted({trial.scheduler.fit.nodes[number].id for number, _ in entry.places})
        )
        if job.spec.hold and waiting is None:
            waiting = Waiting(reason=Reason.HELD, detail="it would be held")
        return DryRunReply(
            now_s=answer.now_s,
            starts=starts,
            gpus=gpus,
            jobs=len(found.would_be),
            nodes=nodes,
            notes=notes,
            start=answer.start(answer.forecast.start_of(job)),
            run=RunView(low_s=low_s, high_s=high_s, ends=ends, likes=likes),
            gpu_hours_low=hours * low_s,
            gpu_hours_high=None if high_s is None else hours * high_s,
            reason="" if waiting is None else waiting.reason.value,
            detail="" if waiting is None else waiting.detail,
            blockers=blockers,
            blockers_more=more,
            changes=[_change_view(change, None) for change in answer.search.find()],
        )


# ---- both ---------------------------------------------------------------------------------------------------------------


class _Explanation:
    """A trial schedule for one job, and the parts of an answer that are read from it."""

    def __init__(self, parts: HeadParts, found: Peek, job: Job) -> None:
        self.now_s = found.seen.now_s
        self.job = job
        self.forecast = Forecast(tried(near(found.seen, job), found.like), found.history.predictor())
        until_s = parts.clock.boottime_s() + WORK_S
        self.search = Counterfactuals(self.forecast, job, found.like, lambda: parts.clock.boottime_s() < until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forecast.trial.over()

    @property
    def waiting(self) -> Waiting:
        """Why the job waits in the trial."""
        waiting = self.forecast.trial.scheduler.why(self.job)
        return waiting or Waiting(reason=Reason.NEW, detail="starts in a moment")

    def start(self, expected: Expected) -> StartView:
        """Return the expected start as a range in Unix seconds."""
        return StartView(
            earliest_s=None if expected.earliest_s is None else self.now_s + expected.earliest_s,
            latest_s=None if expected.latest_s is None else self.now_s + expected.latest_s,
            unknown=expected.unknown,
        )

    def blockers(self, waiting: Waiting) -> tuple[list[BlockerView], int]:
        """Return the jobs in the way, and the number of further ones."""
        scheduler = self.forecast.trial.scheduler
        entry = scheduler.entries.get(self.job.id)
        ids: Sequence[JobId] = self.search.blockers
        if waiting.reason is Reason.DEPENDENCY:
            ids = [one.job_id for one in self.job.unmet if one.job_id in self.forecast.trial.seen.jobs]
        elif waiting.reason is Reason.PRIORITY and entry is not None:
            ids = [scheduler.ids[other.seq] for other in self.forecast.before(entry)]
        return [self._blocker(job_id) for job_id in ids[:BLOCKERS_MAX]], max(0, len(ids) - BLOCKERS_MAX)

    def _blocker(self, job_id: JobId) -> BlockerView:
        job = self.forecast.trial.seen.jobs[job_id]
        attempt = self.forecast.trial.seen.attempts.get(job_id)
        left = self.forecast.left.get(job_id) if attempt is not None else None
        end = None
        if left is not None:
            latest_s = None if left.high_s == NEVER else self.now_s + left.high_s
            end = StartView(earliest_s=self.now_s + left.low_s, latest_s=latest_s)
        gpus = attempt.allocation.gpus if attempt is not None else job.spec.role.gpus.total
        return BlockerView(
            id=job.id,
            user=job.user,
            name=job.spec.name,
            state=JobState.PENDING if attempt is None else JobState.RUNNING,
            gpus=gpus,
            since_s=None if attempt is None else attempt.placed_s,
            end=end,
        )


def _with_budgets(headline: str, job: Job, whole: bool) -> str:
    """Append the cause of the last attempt's end, if the caller sees all of the job, and the used restart budgets."""
    ended = whole and job.state is JobState.PENDING and job.epoch and job.detail
    before = f"its last attempt ended: {job.detail}" if ended else ""
    return "; ".join(filter(None, [headline, before, ", ".join(budgets(job))]))


def _headline(waiting: Waiting) -> str:
    return f"waits ({waiting.reason.value.replace('_', ' ')}): {waiting.detail}"


def _change_view(change: Change, job_id: JobId | None) -> ChangeView:
    """Return the view of a change with its command line: for a submitted job, or for a dry run (no `job_id`)."""
    command = change.command
    if change.option and job_id is not None and change.kind in UPDATES:
        command = f"phalanx update {job_id} {change.option}"
    elif change.option:
        command = f"phalanx submit {change.option} ..."
    if job_id is None and change.kind.value == "release":
        command = "phalanx submit ... (without --hold)"
    return ChangeView(kind=change.kind.value, text=change.text, command=command, operator=change.kind in OPERATORS)


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown} and {len(nodes) - 4} more"
