"""Jobs: list, show, change, cancel."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.arrays import folded, states_of, whole_array
from phalanx.api.bodies import read_record, reply
from phalanx.api.discretion import Discretion
from phalanx.api.gate import first_element, known_job, sees_all_of, touch
from phalanx.api.parts import HeadParts
from phalanx.api.readings import all_seen, seen
from phalanx.api.receipts import receipt_of
from phalanx.api.routes import Routes, Shown, Whole, WholeOrNone
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.api.views import attempt_view
from phalanx.core.access.roles import Caller
from phalanx.core.accounting.receipt import Receipt
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.ids import JobId, ProjectId, QueueId, UserId
from phalanx.core.state.events import Cancel, Hold, Requeue, Update
from phalanx.core.state.events import Request as Command
from phalanx.core.units import parse_duration_s
from phalanx.core.work.begin import parse_begin_s
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Action
from phalanx.ports.store import JobFilter, Store
from phalanx.wire.api.jobs import CancelBody, JobDetail, JobList, JobReply, JobsReply, JobView, UpdateBody, WhyBody
from phalanx.wire.api.output import StoryReply

PAGE_MAX = 1000
CANCEL_MAX = 4096  # in one call: as many events as the controller handles in one step

routes = Routes()


@routes.get("/v1/jobs", Action.SEE, reply=JobList)
async def list_jobs(
    request: Request,
    state: Annotated[list[JobState] | None, Query()] = None,
    user: UserId | None = None,
    project: ProjectId | None = None,
    queue: QueueId | None = None,
    name: str | None = None,
    before_seq: WholeOrNone = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    fold: bool = False,
) -> Response:
    """List jobs, newest first. `state` may be repeated. With `fold` the waiting elements of an array are one entry."""
    parts, caller = runtime_of(request).parts, caller_of(request)
    wanted = JobFilter(
        states=frozenset(state or ()),
        user=user,
        project=project,
        queue=queue,
        name=name,
        before_seq=before_seq,
        limit=limit,
    )

    def read() -> JobList:
        if fold:
            views, after = folded(parts, caller, wanted)
            return JobList(jobs=views, next=after)
        jobs = parts.store.jobs(wanted)
        return JobList(jobs=all_seen(parts, caller, jobs), next=jobs[-1].seq if len(jobs) == limit else None)

    return reply(await off_loop(read))


@routes.get("/v1/jobs/{job_id}", Action.SEE, reply=JobDetail)
async def show_job(request: Request, job_id: JobId) -> Response:
    """Show one job with its attempts; an array is shown as one job, without attempts."""
    parts = runtime_of(request).parts
    first = first_element(parts.store, job_id) if parts.store.job(job_id) is None else None
    if first is not None:
        whole = await off_loop(whole_array, parts, caller_of(request), first)
        return reply(JobDetail(job=whole, attempts=[]))
    job = known_job(parts.store, job_id)
    attempts = parts.store.attempts(job_id)
    view = seen(parts, caller_of(request), job, attempts)
    seen_whole = sees_all_of(caller_of(request), job)
    return reply(JobDetail(job=view, attempts=[attempt_view(attempt, whole=seen_whole) for attempt in attempts]))


@routes.patch("/v1/jobs/{job_id}", Action.CHANGE_OWN, body=UpdateBody, reply=JobReply)
async def update_job(request: Request, job_id: JobId) -> Response:
    """Change name, priority, time limit, queue or begin."""
    parts = runtime_of(request).parts
    touch(parts.store, caller_of(request), Action.CHANGE_OWN, job_id, arrays=True)
    body = await read_record(request, UpdateBody, parts.limits.body_bytes)
    caller = caller_of(request)
    touch(
        parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True
    )  # again: permissions may have changed while the body arrived
    if body == UpdateBody():
        raise BadRequest("the request changes nothing", hint="send name, priority, time, queue or begin")
    command = Update(
        job_id=job_id,
        by=caller.user,
        name=body.name,
        priority=body.priority,
        queue=body.queue,
        time_limit_s=None if body.time is None else parse_duration_s(body.time),
        begin_s=None if body.begin is None else parse_begin_s(body.begin, now_s=parts.clock.now_s()),
    )
    return await _changed(request, command)


@routes.post("/v1/jobs/{job_id}/cancel", Action.CHANGE_OWN, body=WhyBody, reply=JobReply)
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Cancel a job. Once this is answered, the job never runs again. Idempotent."""
    parts = runtime_of(request).parts
    touch(parts.store, caller_of(request), Action.CHANGE_OWN, job_id, arrays=True)
    body = await read_record(request, WhyBody, parts.limits.body_bytes)
    caller = caller_of(request)
    first = touch(
        parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True
    )  # again: permissions may have changed while the body arrived
    if first.id != job_id and all(state.terminal for state in states_of(parts.store, first).values()):
        return reply(JobReply(job=await off_loop(whole_array, parts, caller, first)))  # all elements have ended
    return await _changed(request, Cancel(job_id=job_id, by=caller.user, why=body.why[:500]))


@routes.post("/v1/jobs/cancel", Action.CHANGE_OWN, body=CancelBody, reply=JobsReply)
async def cancel_jobs(request: Request) -> Response:
    """Cancel several jobs in one step, so that none starts on resources that another frees. All are refused if one may not be cancelled."""
    runtime = runtime_of(request)
    parts = runtime.parts
    body = await read_record(request, CancelBody, parts.limits.body_bytes)
    caller = caller_of(request)
    if len(body.jobs) > CANCEL_MAX:
        raise BadRequest(
            f"{len(body.jobs)} jobs to cancel; at most {CANCEL_MAX} in one call", hint="name fewer jobs in each call"
        )

    def read() -> dict[JobId, Job]:
        return {job_id: touch(parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True) for job_id in body.jobs}

    jobs = await off_loop(read)
    active = [job_id for job_id, job in jobs.items() if _is_active(parts.store, job_id, job)]
    pending_first = sorted(active, key=lambda job_id: jobs[job_id].state is not JobState.PENDING)
    commands: list[Command] = [Cancel(job_id=job_id, by=caller.user, why=body.why[:500]) for job_id in pending_first]
    answers = await runtime.ask_all(commands) if commands else []
    for answer in answers:
        if isinstance(answer, PhalanxError):
            raise answer
        ended = answer if isinstance(answer, list) else [answer]
        runtime.hub.tell(job.id for job in ended if isinstance(job, Job))

    def views() -> list[JobView]:
        return [_whole(parts, caller, job_id, job) for job_id, job in jobs.items()]

    return reply(JobsReply(jobs=await off_loop(views)))


@routes.post("/v1/jobs/{job_id}/hold", Action.CHANGE_OWN, body=Shown.NOTHING, reply=JobReply)
async def hold_job(request: Request, job_id: JobId) -> Response:
    """Hold a pending job, so that it does not start."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Hold(job_id=job_id, held=True, by=caller.user))


@routes.post("/v1/jobs/{job_id}/release", Action.CHANGE_OWN, body=Shown.NOTHING, reply=JobReply)
async def release_job(request: Request, job_id: JobId) -> Response:
    """Release a held job."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Hold(job_id=job_id, held=False, by=caller.user))


@routes.post("/v1/jobs/{job_id}/requeue", Action.CHANGE_OWN, body=Shown.NOTHING, reply=JobReply)
async def requeue_job(request: Request, job_id: JobId) -> Response:
    """Stop the running attempt after a checkpoint, and queue the job again."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Requeue(job_id=job_id, by=caller.user))


@routes.get("/v1/jobs/{job_id}/story", Action.SEE, reply=StoryReply)
async def job_story(
    request: Request, job_id: JobId, after: Whole = 0, limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX
) -> Response:
    """Show what happened to the job, oldest first."""
    parts = runtime_of(request).parts
    known_job(parts.store, job_id)
    lines = await off_loop(parts.store.story, job_id=job_id, after=after, limit=limit)
    visible = Discretion(parts.store, caller_of(request)).lines(lines)
    return reply(StoryReply(story=visible, last=lines[-1].seq if lines else after))


@routes.get("/v1/jobs/{job_id}/receipt", Action.SEE, reply=Receipt)
async def job_receipt(request: Request, job_id: JobId) -> Response:
    """Show GPU-seconds used and lost, goodput, attempts and their causes."""
    parts = runtime_of(request).parts
    job = known_job(parts.store, job_id)
    receipt = await receipt_of(runtime_of(request), job)
    if not sees_all_of(caller_of(request), job):
        receipt = replace(receipt, attempts=tuple(replace(attempt, why="") for attempt in receipt.attempts))
    return reply(receipt)


async def _changed(request: Request, command: Command) -> Response:
    """Perform a command, and return the changed job, or the array as one job."""
    runtime = runtime_of(request)
    answer = await runtime.ask(command)
    if isinstance(answer, list):
        runtime.hub.tell(one.id for one in answer)
        first = first_element(runtime.parts.store, _array_of(answer[0]))
        assert first is not None  # it was found before the command
        return reply(JobReply(job=await off_loop(whole_array, runtime.parts, caller_of(request), first)))
    assert isinstance(answer, Job)
    runtime.hub.tell((answer.id,))
    return reply(JobReply(job=seen(runtime.parts, caller_of(request), answer)))


def _is_active(store: Store, job_id: JobId, job: Job) -> bool:
    """Whether the job, or any element of the array, has not ended. `job` is the first element if `job_id` names an array."""
    if job.id == job_id:
        return not job.state.terminal
    return not all(state.terminal for state in states_of(store, job).values())


def _whole(parts: HeadParts, caller: Caller, job_id: JobId, job: Job) -> JobView:
    """Return the current view of the job, or of the array whose first element it is."""
    return seen(parts, caller, known_job(parts.store, job_id)) if job.id == job_id else whole_array(parts, caller, job)


def _array_of(job: Job) -> JobId:
    assert job.array is not None  # only the answer for an array is a list
    return job.array.array_id
