"""Explains why a job waits and which changes would start it, also for a job that is not submitted (dry run).

The controller provides a snapshot of the state between two steps, and a thread of the API computes the answer. Answers are computed one
at a time, as each uses the CPU for a while, and within a time limit, as each trial schedules the whole fleet. Callers who may see jobs
also see the jobs in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import may_see_all_of, require_job
from phalanx.api.http.bodies import json_response, read_body
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.submit import submit_notes, submit_request, submit_warnings
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.turns import in_turn
from phalanx.api.views.job_records import staging_views, used_budgets
from phalanx.api.views.live import live_staging
from phalanx.controller.read_snapshot import ReadSnapshot
from phalanx.core.hints import Hint, HintCode, hint_keys
from phalanx.core.ids import JobId
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.scheduling.outlook.bursting import BurstRules
from phalanx.core.scheduling.outlook.counterfactuals import (
    OPERATOR_CHANGES,
    UPDATE_CHANGES,
    ChangeKind,
    CounterfactualSearch,
    SuggestedChange,
)
from phalanx.core.scheduling.outlook.forecast import NEVER, ExpectedStart, Forecast
from phalanx.core.scheduling.outlook.projection import FleetProjection
from phalanx.core.scheduling.outlook.what_if import trim_snapshot, what_if
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.records import PROJECTS
from phalanx.core.units import format_duration
from phalanx.core.work.dependency import DependencyKind
from phalanx.core.work.exit_code import code_beside
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.data_sources import data_note, mount_notes
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.core.work.users import Action
from phalanx.wire.api.jobs import JobBody, staging_text
from phalanx.wire.why import (
    BlockerView,
    BurstView,
    DryRunReply,
    RunTimeView,
    StartView,
    SuggestedChangeView,
    WhyReply,
)

TRIAL_TIME_S: Final = (
    2.0  # for the trials of one answer, which a person waits for; a trial on 12,500 nodes takes one second
)
PROJECTION_TIME_S: Final = 1.0  # for the decisions of one projection
BLOCKERS_MAX: Final = 8  # named in one answer

routes = RouteTable()


@routes.get("/v1/jobs/{job_id}/why", Action.VIEW, reply=WhyReply)
async def why_job(request: Request, job_id: JobId) -> Response:
    """Explain why a job waits: the jobs in the way, its expected start, and the smallest changes that would start it now."""
    runtime = runtime_of(request)
    services = runtime.services
    job = require_job(services.store, job_id)
    if job.state is not JobState.PENDING:
        return json_response(
            await run_in_thread(_started_or_ended, services, job, may_see_all_of(caller_of(request), job))
        )
    found = await runtime.controller_futures.result_of(services.controller.read_snapshot(job_id=job_id))
    whole = may_see_all_of(caller_of(request), job)
    return json_response(await in_turn(lambda: _why(services, found, job, whole)))


@routes.post("/v1/jobs/dry-run", Action.SUBMIT, body=JobBody, reply=DryRunReply, transient=True)
async def dry_run(request: Request) -> Response:
    """Show what would happen if the job were submitted now. Invalid jobs are refused as in a submit; nothing is written."""
    runtime = runtime_of(request)
    services = runtime.services
    body = await read_body(request, services.limits.body_bytes)
    command = await submit_request(runtime, caller_of(request), body)
    found = await runtime.controller_futures.result_of(services.controller.read_snapshot(submission=command))
    notes = submit_notes(runtime, command.spec)
    warnings = await submit_warnings(runtime, found.hypothetical_jobs[0])
    return json_response(await in_turn(lambda: forecast_submit(services, found, notes, warnings)))


# ---- a submitted job ----------------------------------------------------------------------------------------------------


def _started_or_ended(services: HeadServices, job: Job, whole: bool) -> WhyReply:
    """Return the answer for a job that does not wait: how long it has run and where, or how it ended."""
    now_s = services.clock.now_s()
    attempts = services.store.attempts(job.id)
    nodes = [grant.node_id for grant in attempts[-1].allocation.grants] if attempts else []
    if job.state is JobState.RUNNING:
        since_s = attempts[-1].placed_s if attempts else job.started_s
        sleep = attempts[-1].sleep if attempts else None
        headline = f"has run for {format_duration(max(0.0, now_s - (since_s or now_s)))} on {_names(nodes)}"
        if attempts and whole and (staging := staging_views(live_staging(services, job, attempts[-1]))):
            headline = f"{staging_text(staging)}; its ranks start then; {headline}"
        if attempts and attempts[-1].queued_why:
            waited = format_duration(max(0.0, now_s - attempts[-1].placed_s))
            headline = f"has waited for {waited}: {attempts[-1].queued_why}"
        if sleep is not None:
            headline = f"is {sleep.phase}{f': {sleep.why}' if sleep.why else ''}; {headline}"
        return WhyReply(
            job_id=job.id,
            state=job.state,
            now_s=now_s,
            headline=_with_budgets(headline, job, whole),
            nodes=nodes,
            since_s=since_s,
            speeds=services.controller.speeds_of(job),
        )
    named = code_beside(job.exit_code, job.detail if whole else "")
    code = f" with {named}" if named else ""
    by = f" by {job.cancelled_by}" if job.cancelled_by and not (whole and "cancelled by" in job.detail) else ""
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


def _why(services: HeadServices, found: ReadSnapshot, job: Job, whole: bool) -> WhyReply:
    job = found.snapshot.jobs.get(job.id, job)
    if job.state is not JobState.PENDING or job.id in found.snapshot.attempts:  # it has started meanwhile
        return _started_or_ended(services, services.store.job(job.id) or job, whole)
    if job.parked_s is not None:
        return _parked(services, job, whole)
    with _Explanation(services, found, job) as answer:
        waiting = found.waiting or answer.waiting
        never = waiting.reason is WaitReasonCode.NEVER
        limit = FeasibilityChecker(found.snapshot, answer.now_s).check_job(job).limit if never else ""
        blockers, more = answer.blockers(waiting)
        changes = [_change_view(change, job.id) for change in answer.search.find()]
        return WhyReply(
            job_id=job.id,
            state=job.state,
            now_s=answer.now_s,
            headline=_with_budgets(_with_data(services, _headline(waiting, limit), job, whole), job, whole),
            reason=waiting.reason.value,
            detail=waiting.detail,
            never=never,
            limit=limit,
            blockers=blockers,
            blockers_more=more,
            start=None if never else answer.start(answer.forecast.start_of(job)),
            changes=changes,
            burst=answer.burst,
            speeds=services.controller.speeds_of(job),
        )


def _parked(services: HeadServices, job: Job, whole: bool) -> WhyReply:
    """Return the answer for a parked job: it is in no queue, so that nothing is in its way."""
    assert job.parked_s is not None
    now_s = services.clock.now_s()
    detail = job.detail if whole else ""
    ago = format_duration(max(0.0, now_s - job.parked_s))
    hint = Hint(HintCode.RESUME_JOB, job=job.id)
    change = SuggestedChange(kind=ChangeKind.RELEASE, text="resume the job", hint=hint)
    return WhyReply(
        job_id=job.id,
        state=job.state,
        now_s=now_s,
        headline=f"was parked {ago} ago{f': {detail}' if detail else ''}",
        reason=WaitReasonCode.PARKED.value,
        detail=detail,
        changes=[_change_view(change, job.id)],
        since_s=job.parked_s,
    )


# ---- a dry run ----------------------------------------------------------------------------------------------------------


def forecast_submit(
    services: HeadServices, found: ReadSnapshot, notes: list[str], warnings: list[str], *, suggest: bool = True
) -> DryRunReply:
    """Return what would happen to the hypothetical job of the snapshot. `suggest`: also look for changes that would start it."""
    with _Explanation(services, found, found.hypothetical_jobs[0]) as answer:
        return _submit_reply(answer, found, notes, warnings, suggest=suggest)


def forecast_and_project(
    services: HeadServices, found: ReadSnapshot, notes: list[str], warnings: list[str], *, suggest: bool = True
) -> tuple[DryRunReply, FleetProjection]:
    """Return the same, and how many GPUs jobs hold and how many jobs wait if the job is submitted."""
    with _Explanation(services, found, found.hypothetical_jobs[0]) as answer:
        reply = _submit_reply(answer, found, notes, warnings, suggest=suggest)
        until_s = services.clock.boottime_s() + PROJECTION_TIME_S
        return reply, FleetProjection(answer.forecast, lambda: services.clock.boottime_s() < until_s)


def _submit_reply(
    answer: _Explanation, found: ReadSnapshot, notes: list[str], warnings: list[str], *, suggest: bool
) -> DryRunReply:
    job = found.hypothetical_jobs[0]
    trial = answer.forecast.trial
    starts = trial.starts(job.id)
    low_s, high_s, ends, likes = answer.forecast.run_time_of(job)
    entry = trial.scheduler.entries.get(job.id)
    gpus = gpus_of(entry.job_class.milli if entry is not None else job.spec.role.milli)
    hours = gpus * len(found.hypothetical_jobs) / 3600.0
    waiting = None if starts else answer.waiting
    blockers, more = ([], 0) if waiting is None else answer.blockers(waiting)
    nodes = (
        []
        if entry is None or not starts
        else sorted({trial.scheduler.fleet_index.nodes[number].id for number, _ in entry.places})
    )
    if job.spec.hold and waiting is None:
        waiting = WaitReason(reason=WaitReasonCode.HELD, detail="it would be held")
    return DryRunReply(
        now_s=answer.now_s,
        starts=starts,
        gpus=gpus,
        jobs=len(found.hypothetical_jobs),
        nodes=nodes,
        notes=notes,
        warnings=warnings,
        starting=[one.job_id for one in trial.plan.placements if one.job_id != job.id][:BLOCKERS_MAX],
        start=answer.start(answer.forecast.start_of(job)),
        run=RunTimeView(low_s=low_s, high_s=high_s, ends=ends, likes=likes),
        gpu_hours_low=hours * low_s,
        gpu_hours_high=None if high_s is None else hours * high_s,
        reason="" if waiting is None else waiting.reason.value,
        detail="" if waiting is None else waiting.detail,
        blockers=blockers,
        blockers_more=more,
        burst=answer.burst,
        changes=[_change_view(change, None) for change in answer.search.find()] if suggest else [],
    )


# ---- both ---------------------------------------------------------------------------------------------------------------


class _Explanation:
    """A trial schedule for one job, and the services of an answer that are read from it."""

    def __init__(self, services: HeadServices, found: ReadSnapshot, job: Job) -> None:
        self.now_s = found.snapshot.now_s
        self.job = job
        predictor = found.run_times.predictor()
        rules = BurstRules(
            lambda: predictor, lambda: {project.id: project for project in services.store.records(PROJECTS)}
        )
        trial = what_if(trim_snapshot(found.snapshot, job), found.scheduler, rules)
        self.forecast = Forecast(trial, predictor)
        self._choice = rules.choices.get(job.id)  # before trials of changed jobs
        until_s = services.clock.boottime_s() + TRIAL_TIME_S
        self.search = CounterfactualSearch(
            self.forecast, job, found.scheduler, lambda: services.clock.boottime_s() < until_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forecast.trial.release()

    @property
    def waiting(self) -> WaitReason:
        """Why the job waits in the trial."""
        waiting = self.forecast.trial.scheduler.wait_reason(self.job)
        return waiting or WaitReason(reason=WaitReasonCode.NEW, detail="starts in a moment")

    @property
    def burst(self) -> BurstView | None:
        """Both sides for a waiting job whose rule was asked."""
        choice = self._choice
        if choice is None:
            return None
        return BurstView(
            pools=dict(choice.pools),
            rule=str(choice.rule),
            there=choice.rents,
            here_s=None if choice.here_s == NEVER else choice.here_s,
            here_never=choice.here_s == NEVER,
            there_s=choice.there_s,
            boot_known=choice.boot_known,
            run_s=choice.run_s,
            price=choice.price,
            per_h=choice.per_h,
            refusal=choice.refusal,
        )

    def start(self, expected: ExpectedStart) -> StartView:
        """Return the expected start as a range in Unix seconds."""
        return StartView(
            earliest_s=None if expected.earliest_s is None else self.now_s + expected.earliest_s,
            latest_s=None if expected.latest_s is None else self.now_s + expected.latest_s,
            unknown=expected.unknown,
        )

    def blockers(self, waiting: WaitReason) -> tuple[list[BlockerView], int]:
        """Return the jobs in the way, and the number of further ones."""
        scheduler = self.forecast.trial.scheduler
        entry = scheduler.entries.get(self.job.id)
        ids: Sequence[JobId] = self.search.blockers
        if waiting.reason in (WaitReasonCode.DEPENDENCY, WaitReasonCode.STAGING):
            ids = [one.job_id for one in self.job.unmet_dependencies if one.job_id in self.forecast.trial.snapshot.jobs]
        elif waiting.reason is WaitReasonCode.PRIORITY and entry is not None:
            ids = [scheduler.job_id_by_seq[other.seq] for other in self.forecast.jobs_ahead(entry)]
        return [self._blocker(job_id) for job_id in ids[:BLOCKERS_MAX]], max(0, len(ids) - BLOCKERS_MAX)

    def _blocker(self, job_id: JobId) -> BlockerView:
        job = self.forecast.trial.snapshot.jobs[job_id]
        attempt = self.forecast.trial.snapshot.attempts.get(job_id)
        left = self.forecast.remaining_times.get(job_id) if attempt is not None else None
        end = None
        if left is not None:
            latest_s = None if left.high_s == NEVER else self.now_s + left.high_s
            end = StartView(earliest_s=self.now_s + left.low_s, latest_s=latest_s)
        milli = attempt.allocation.milli if attempt is not None else job.spec.role.milli
        return BlockerView(
            id=job.id,
            user=job.user,
            name=job.spec.name,
            state=JobState.PENDING if attempt is None else JobState.RUNNING,
            gpus=gpus_of(milli),
            since_s=None if attempt is None else attempt.placed_s,
            end=end,
        )


def _with_data(services: HeadServices, headline: str, job: Job, whole: bool) -> str:
    """Add why the job that copies its data waits, which nodes have the data, and how long a copy takes elsewhere; or that they mount it."""
    if not whole:
        return headline
    if not job.spec.stages_data:
        return "; ".join([headline, *mount_notes(job.spec.data, job.spec.data_mode)])
    held = {node.id: node.datasets for node in services.store.nodes()}
    now = staging_text(staging_views(live_staging(services, job, None)))
    copies = [one.job_id for one in job.unmet_dependencies if one.kind is DependencyKind.DATA]
    reasons = ((copy, services.controller.wait_reasons.get(copy)) for copy in copies)
    waits = [f"job {copy} waits: {why.detail or why.reason.value}" for copy, why in reasons if why is not None]
    return "; ".join(
        [headline, *waits, *([now] if now else []), *data_note(job.spec.data, job.spec.data_mode, held)[1:]]
    )


def _with_budgets(headline: str, job: Job, whole: bool) -> str:
    """Append the cause of the last attempt's end, if the caller sees all of the job, and the used restart budgets."""
    ended = whole and job.state is JobState.PENDING and job.epoch and job.detail and job.detail not in headline
    before = f"its last attempt ended: {job.detail}" if ended else ""
    return "; ".join(filter(None, [headline, before, ", ".join(used_budgets(job))]))


def _headline(waiting: WaitReason, limit: str) -> str:
    if waiting.reason is WaitReasonCode.NEVER:
        return f"can NEVER start{f' ({limit})' if limit else ''}: {waiting.detail}"
    return f"waits ({waiting.reason.value.replace('_', ' ')}): {waiting.detail}"


def _change_view(change: SuggestedChange, job_id: JobId | None) -> SuggestedChangeView:
    """Return the view of a change with its hint: for a submitted job, or for a dry run (no `job_id`)."""
    hint = change.hint
    if change.key and job_id is not None and change.kind in UPDATE_CHANGES:
        hint = Hint(HintCode.UPDATE_JOB, job=job_id, key=change.key, value=change.value)
    elif change.key:
        hint = Hint(HintCode.SUBMIT_WITH, key=change.key, value=change.value)
    elif job_id is None and change.kind is ChangeKind.RELEASE:
        hint = Hint(HintCode.SUBMIT_UNHELD)
    view = SuggestedChangeView(kind=change.kind.value, text=change.text, operator=change.kind in OPERATOR_CHANGES)
    return view if hint is None else msgspec.structs.replace(view, **hint_keys(hint))


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown} and {len(nodes) - 4} more"
