"""Jobs: list, show, change, cancel."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import (
    authorize_job,
    first_element,
    may_see_all_of,
    require_job,
    viewer_of,
)
from phalanx.api.auth.redaction import JobRedactor
from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.paging import fitting
from phalanx.api.http.routing import (
    MediaType,
    NonNegative,
    OptionalNonNegative,
    RouteTable,
)
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.archives import archived_detail, archived_history
from phalanx.api.views.arrays import collapsed_page, element_states, whole_array_view
from phalanx.api.views.job_pages import cursor_behind, read_job_cursor
from phalanx.api.views.job_records import attempt_view
from phalanx.api.views.job_usage import job_usage_view
from phalanx.api.views.live import live_job_view, live_job_views
from phalanx.api.views.usage_summaries import usage_summary_of
from phalanx.core.access.caller import Caller
from phalanx.core.accounting.usage_summary import UsageSummary
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.ids import JobId, ProjectId, QueueId, UserId
from phalanx.core.state.events import (
    CancelJob,
    HoldJob,
    ParkJob,
    RequeueJob,
    UpdateJob,
)
from phalanx.core.state.events import Request as Command
from phalanx.core.state.history import HistoryLine
from phalanx.core.units import parse_duration_s
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.begin_time import parse_begin_s
from phalanx.core.work.job_file.labels import parse_label_filters
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action
from phalanx.ports.store import JobFilter, JobOrder, Store
from phalanx.wire.api.jobs import CancelBody, JobDetail, JobList, JobReply, JobsReply, JobView, UpdateBody, WhyBody
from phalanx.wire.api.output import HistoryReply
from phalanx.wire.api.usage import JobUsageView

PAGE_MAX = 1000
CANCEL_MAX = 4096  # in one call: as many events as the controller handles in one step

routes = RouteTable()


@routes.get("/v1/jobs", Action.VIEW, reply=JobList)
async def list_jobs(
    request: Request,
    state: Annotated[list[JobState] | None, Query()] = None,
    user: UserId | None = None,
    project: ProjectId | None = None,
    queue: QueueId | None = None,
    name: str | None = None,
    label: Annotated[list[str] | None, Query()] = None,
    before_seq: OptionalNonNegative = None,
    sort: JobOrder = JobOrder.NUMBER,
    ascending: bool = False,
    after: str = "",
    ended_since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    fold: bool = False,
) -> Response:
    """List jobs, newest first, or in the order of `sort`. `state` may be repeated, and `label`: `exp=7` or `exp`, of jobs whose labels the caller may see. `ended_since_s` lists only jobs that ended then or later.

    For the next page send `next` of the reply as `before_seq`, or in any order `after` as `after`. Equal values are sorted by number.
    With `fold` the elements of an array that wait are one entry, and so are those of each end state; such a list is newest first.
    """
    if fold and (sort is not JobOrder.NUMBER or ascending or after):
        raise BadRequest("fold: such a list is newest first", hint="leave out sort, ascending and after, or fold")
    services, caller = runtime_of(request).services, caller_of(request)
    labels = parse_label_filters(label or ())
    wanted = JobFilter(
        states=frozenset(state or ()),
        user=user,
        project=project,
        queue=queue,
        name=name,
        labels=labels,
        visible_to=viewer_of(caller) if labels else None,
        before_seq=before_seq,
        ended_since_s=ended_since_s,
        order=sort,
        ascending=ascending,
        after=read_job_cursor(after, sort),
        limit=limit,
    )
    newest_first = sort is JobOrder.NUMBER and not ascending

    def read() -> JobList:
        bytes_max = services.limits.answer_bytes
        if fold:
            views, next_seq = collapsed_page(services, caller, wanted)
            if (fits := len(fitting(views, bytes_max))) < len(views):
                views, next_seq = collapsed_page(services, caller, replace(wanted, limit=fits))
            return JobList(jobs=views, next=next_seq)
        jobs = services.store.jobs(wanted)
        views = fitting(live_job_views(services, caller, jobs), bytes_max)
        more = len(views) < len(jobs) or len(jobs) == limit > 0
        return JobList(
            jobs=views,
            next=views[-1].seq if newest_first and more else None,
            after=cursor_behind(jobs[len(views) - 1], wanted) if more else "",
        )

    return json_response(await run_in_thread(read))


@routes.get("/v1/jobs/{job_id}", Action.VIEW, reply=JobDetail)
async def show_job(request: Request, job_id: JobId) -> Response:
    """Show one job with its attempts; an array is shown as one job, without attempts."""
    services = runtime_of(request).services
    first = first_element(services.store, job_id) if services.store.job(job_id) is None else None
    if first is not None:
        whole = await run_in_thread(whole_array_view, services, caller_of(request), first)
        return json_response(JobDetail(job=whole, attempts=[]))
    if services.store.job(job_id) is None:
        runtime, caller = runtime_of(request), caller_of(request)
        return json_response(
            await run_in_thread(archived_detail, runtime.archives, caller, job_id, services.output_root)
        )
    job = require_job(services.store, job_id)
    attempts = services.store.attempts(job_id)
    view = live_job_view(services, caller_of(request), job, attempts)
    seen_whole = may_see_all_of(caller_of(request), job)
    if not job.state.terminal:  # in a thread, as a scheduling pass may hold what it reads
        view = msgspec.structs.replace(view, speeds=await run_in_thread(services.controller.speeds_of, job))
    return json_response(
        JobDetail(job=view, attempts=[attempt_view(attempt, show_all=seen_whole) for attempt in attempts])
    )


@routes.patch("/v1/jobs/{job_id}", Action.CHANGE_OWN, body=UpdateBody, reply=JobReply)
async def update_job(request: Request, job_id: JobId) -> Response:
    """Change name, priority, time limit, queue or begin."""
    services = runtime_of(request).services
    authorize_job(services.store, caller_of(request), Action.CHANGE_OWN, job_id, arrays=True)
    body = await read_record(request, UpdateBody, services.limits.body_bytes)
    caller = caller_of(request)
    authorize_job(
        services.store, caller, Action.CHANGE_OWN, job_id, arrays=True
    )  # again: permissions may have changed while the body arrived
    if body == UpdateBody():
        raise BadRequest("the request changes nothing", hint="send name, priority, time, queue or begin")
    command = UpdateJob(
        job_id=job_id,
        by=caller.user,
        name=body.name,
        priority=body.priority,
        queue=body.queue,
        time_limit_s=None if body.time is None else parse_duration_s(body.time),
        begin_s=None if body.begin is None else parse_begin_s(body.begin, now_s=services.clock.now_s()),
    )
    return await _changed(request, command)


@routes.post("/v1/jobs/{job_id}/cancel", Action.CHANGE_OWN, body=WhyBody, reply=JobReply)
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Cancel a job. Once this is answered, the job never runs again. Idempotent."""
    services = runtime_of(request).services
    authorize_job(services.store, caller_of(request), Action.CHANGE_OWN, job_id, arrays=True)
    body = await read_record(request, WhyBody, services.limits.body_bytes)
    caller = caller_of(request)
    first = authorize_job(
        services.store, caller, Action.CHANGE_OWN, job_id, arrays=True
    )  # again: permissions may have changed while the body arrived
    if first.id != job_id and all(state.terminal for state in element_states(services.store, first).values()):
        return json_response(
            JobReply(job=await run_in_thread(whole_array_view, services, caller, first))
        )  # all elements have ended
    return await _changed(request, CancelJob(job_id=job_id, by=caller.user, why=body.why[:500]))


@routes.post("/v1/jobs/cancel", Action.CHANGE_OWN, body=CancelBody, reply=JobsReply)
async def cancel_jobs(request: Request) -> Response:
    """Cancel several jobs in one step, so that none starts on resources that another frees. All are refused if one may not be cancelled."""
    runtime = runtime_of(request)
    services = runtime.services
    body = await read_record(request, CancelBody, services.limits.body_bytes)
    caller = caller_of(request)
    if len(body.jobs) > CANCEL_MAX:
        raise BadRequest(
            f"{len(body.jobs)} jobs to cancel; at most {CANCEL_MAX} in one call", hint="name fewer jobs in each call"
        )

    def read() -> dict[JobId, Job]:
        return {
            job_id: authorize_job(services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
            for job_id in body.jobs
        }

    jobs = await run_in_thread(read)
    active = [job_id for job_id, job in jobs.items() if _is_active(services.store, job_id, job)]
    pending_first = sorted(active, key=lambda job_id: jobs[job_id].state is not JobState.PENDING)
    commands = [CancelJob(job_id=job_id, by=caller.user, why=body.why[:500]) for job_id in pending_first]
    answers = await runtime.request_all(commands) if commands else []
    for answer in answers:
        if isinstance(answer, PhalanxError):
            raise answer
        ended = answer if isinstance(answer, list) else [answer]
        runtime.hub.notify(job.id for job in ended if isinstance(job, Job))

    def views() -> list[JobView]:
        return [_whole(services, caller, job_id, job) for job_id, job in jobs.items()]

    return json_response(JobsReply(jobs=await run_in_thread(views)))


@routes.post("/v1/jobs/{job_id}/hold", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=JobReply)
async def hold_job(request: Request, job_id: JobId) -> Response:
    """Hold a pending job, so that it does not start."""
    caller = caller_of(request)
    authorize_job(runtime_of(request).services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, HoldJob(job_id=job_id, held=True, by=caller.user))


@routes.post("/v1/jobs/{job_id}/release", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=JobReply)
async def release_job(request: Request, job_id: JobId) -> Response:
    """Release a held job."""
    caller = caller_of(request)
    authorize_job(runtime_of(request).services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, HoldJob(job_id=job_id, held=False, by=caller.user))


@routes.post("/v1/jobs/{job_id}/requeue", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=JobReply)
async def requeue_job(request: Request, job_id: JobId) -> Response:
    """Stop the running attempt after a checkpoint, and queue the job again."""
    caller = caller_of(request)
    authorize_job(runtime_of(request).services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, RequeueJob(job_id=job_id, by=caller.user))


@routes.post("/v1/jobs/{job_id}/park", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=JobReply)
async def park_job(request: Request, job_id: JobId) -> Response:
    """Stop a job after a checkpoint, and keep it parked, without GPUs, until it is resumed."""
    caller = caller_of(request)
    authorize_job(runtime_of(request).services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, ParkJob(job_id=job_id, parked=True, by=caller.user))


@routes.post("/v1/jobs/{job_id}/resume", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=JobReply)
async def resume_job(request: Request, job_id: JobId) -> Response:
    """Queue a parked job again."""
    caller = caller_of(request)
    authorize_job(runtime_of(request).services.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, ParkJob(job_id=job_id, parked=False, by=caller.user))


@routes.get("/v1/jobs/{job_id}/story", Action.VIEW, reply=HistoryReply)
async def job_history(
    request: Request, job_id: JobId, after: NonNegative = 0, limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX
) -> Response:
    """Show what happened to the job, oldest first."""
    services = runtime_of(request).services
    if services.store.job(job_id) is None and first_element(services.store, job_id) is None:
        archives = runtime_of(request).archives
        found = await run_in_thread(archived_history, archives, caller_of(request), job_id, after, limit)
        return json_response(history_page(found, found[-1].seq if found else after, services.limits.answer_bytes))
    require_job(services.store, job_id)
    lines = await run_in_thread(services.store.history, job_id=job_id, after=after, limit=limit)
    visible = JobRedactor(services.store, caller_of(request)).redact_all(lines)
    return json_response(history_page(visible, lines[-1].seq if lines else after, services.limits.answer_bytes))


def history_page(visible: list[HistoryLine], last: int, bytes_max: int) -> HistoryReply:
    """Return the lines that fit. `last`: number of the last line that was read, visible or not."""
    page = fitting(visible, bytes_max)
    return HistoryReply(history=page, last=last if len(page) == len(visible) else page[-1].seq)


@routes.get("/v1/jobs/{job_id}/receipt", Action.VIEW, reply=UsageSummary)
async def job_usage_summary(request: Request, job_id: JobId) -> Response:
    """Show GPU-seconds used and lost, goodput, attempts and their causes."""
    return json_response(await _usage_summary(request, require_job(runtime_of(request).services.store, job_id)))


@routes.get("/v1/jobs/{job_id}/usage", Action.VIEW, reply=JobUsageView)
async def job_usage(request: Request, job_id: JobId) -> Response:
    """Show GPU-hours by state, what the job used of what it asked for, and advice for the next run."""
    runtime = runtime_of(request)
    job = require_job(runtime.services.store, job_id)
    summary = await _usage_summary(request, job)
    return json_response(await run_in_thread(job_usage_view, runtime.services, job, summary))


async def _usage_summary(request: Request, job: Job) -> UsageSummary:
    usage = await usage_summary_of(runtime_of(request), job)
    if not may_see_all_of(caller_of(request), job):
        usage = replace(usage, attempts=tuple(replace(attempt, why="") for attempt in usage.attempts))
    return usage


async def _changed(request: Request, command: Command[Job | list[Job]]) -> Response:
    """Perform a command, and return the changed job, or the array as one job."""
    runtime = runtime_of(request)
    answer = await runtime.request(command)
    if isinstance(answer, list):
        runtime.hub.notify(one.id for one in answer)
        first = first_element(runtime.services.store, _array_of(answer[0]))
        assert first is not None  # it was found before the command
        return json_response(
            JobReply(job=await run_in_thread(whole_array_view, runtime.services, caller_of(request), first))
        )
    runtime.hub.notify((answer.id,))
    return json_response(JobReply(job=live_job_view(runtime.services, caller_of(request), answer)))


def _is_active(store: Store, job_id: JobId, job: Job) -> bool:
    """Whether the job, or any element of the array, has not ended. `job` is the first element if `job_id` names an array."""
    if job.id == job_id:
        return not job.state.terminal
    return not all(state.terminal for state in element_states(store, job).values())


def _whole(services: HeadServices, caller: Caller, job_id: JobId, job: Job) -> JobView:
    """Return the current view of the job, or of the array whose first element it is."""
    return (
        live_job_view(services, caller, require_job(services.store, job_id))
        if job.id == job_id
        else whole_array_view(services, caller, job)
    )


def _array_of(job: Job) -> JobId:
    assert job.array is not None  # only the answer for an array is a list
    return job.array.array_id
