"""Jobs: list, show, change, end."""

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
from phalanx.core.state.events import Request as Wish
from phalanx.core.units import parse_duration_s
from phalanx.core.work.begin import parse_begin_s
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Action
from phalanx.ports.store import JobFilter, Store
from phalanx.wire.api.jobs import CancelBody, JobDetail, JobList, JobReply, JobsReply, JobView, UpdateBody, WhyBody
from phalanx.wire.api.output import StoryReply

PAGE_MAX = 1000
CANCEL_MAX = 4096  # in one call: as many as the controller hears in one step

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
    """Show one job with its attempts; of an array all elements as one job, without any."""
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
    touch(parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)  # again, as they may be less by now
    if body == UpdateBody():
        raise BadRequest("nothing to change", hint="send name, priority, time, queue or begin")
    wish = Update(
        job_id=job_id,
        by=caller.user,
        name=body.name,
        priority=body.priority,
        queue=body.queue,
        time_limit_s=None if body.time is None else parse_duration_s(body.time),
        begin_s=None if body.begin is None else parse_begin_s(body.begin, now_s=parts.clock.now_s()),
    )
    return await _changed(request, wish)


@routes.post("/v1/jobs/{job_id}/cancel", Action.CHANGE_OWN, body=WhyBody, reply=JobReply)
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """End a job for good. Once this is answered it never runs again. Harmless twice."""
    parts = runtime_of(request).parts
    touch(parts.store, caller_of(request), Action.CHANGE_OWN, job_id, arrays=True)
    body = await read_record(request, WhyBody, parts.limits.body_bytes)
    caller = caller_of(request)
    first = touch(parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)  # as above
    if first.id != job_id and all(state.terminal for state in states_of(parts.store, first).values()):
        return reply(
            JobReply(job=await off_loop(whole_array, parts, caller, first))
        )  # nothing of the array is left to end
    return await _changed(request, Cancel(job_id=job_id, by=caller.user, why=body.why[:500]))


@routes.post("/v1/jobs/cancel", Action.CHANGE_OWN, body=CancelBody, reply=JobsReply)
async def cancel_jobs(request: Request) -> Response:
    """End several jobs for good, in one step: none of them starts on what another frees. One that may not be ended refuses all."""
    runtime = runtime_of(request)
    parts = runtime.parts
    body = await read_record(request, CancelBody, parts.limits.body_bytes)
    caller = caller_of(request)
    if len(body.jobs) > CANCEL_MAX:
        raise BadRequest(
            f"{len(body.jobs)} jobs to cancel; at most {CANCEL_MAX} at once", hint="name fewer in each call"
        )

    def read() -> dict[JobId, Job]:
        return {job_id: touch(parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True) for job_id in body.jobs}

    jobs = await off_loop(read)
    alive = [job_id for job_id, job in jobs.items() if _alive(parts.store, job_id, job)]
    pending_first = sorted(alive, key=lambda job_id: jobs[job_id].state is not JobState.PENDING)
    wishes: list[Wish] = [Cancel(job_id=job_id, by=caller.user, why=body.why[:500]) for job_id in pending_first]
    answers = await runtime.ask_all(wishes) if wishes else []
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
    """Keep a pending job from starting."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Hold(job_id=job_id, held=True, by=caller.user))


@routes.post("/v1/jobs/{job_id}/release", Action.CHANGE_OWN, body=Shown.NOTHING, reply=JobReply)
async def release_job(request: Request, job_id: JobId) -> Response:
    """Let a held job start."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Hold(job_id=job_id, held=False, by=caller.user))


@routes.post("/v1/jobs/{job_id}/requeue", Action.CHANGE_OWN, body=Shown.NOTHING, reply=JobReply)
async def requeue_job(request: Request, job_id: JobId) -> Response:
    """Stop the running attempt, saving first, and wait again."""
    caller = caller_of(request)
    touch(runtime_of(request).parts.store, caller, Action.CHANGE_OWN, job_id, arrays=True)
    return await _changed(request, Requeue(job_id=job_id, by=caller.user))


@routes.get("/v1/jobs/{job_id}/story", Action.SEE, reply=StoryReply)
async def job_story(
    request: Request, job_id: JobId, after: Whole = 0, limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX
) -> Response:
    """What happened to the job, oldest first."""
    parts = runtime_of(request).parts
    known_job(parts.store, job_id)
    lines = await off_loop(parts.store.story, job_id=job_id, after=after, limit=limit)
    told = Discretion(parts.store, caller_of(request)).lines(lines)
    return reply(StoryReply(story=told, last=lines[-1].seq if lines else after))


@routes.get("/v1/jobs/{job_id}/receipt", Action.SEE, reply=Receipt)
async def job_receipt(request: Request, job_id: JobId) -> Response:
    """GPU-seconds used and lost, goodput, attempts and their causes."""
    parts = runtime_of(request).parts
    job = known_job(parts.store, job_id)
    receipt = await receipt_of(runtime_of(request), job)
    if not sees_all_of(caller_of(request), job):
        receipt = replace(receipt, attempts=tuple(replace(attempt, why="") for attempt in receipt.attempts))
    return reply(receipt)


async def _changed(request: Request, wish: Wish) -> Response:
    """The job, or the array as a whole, after a wish was carried out."""
    runtime = runtime_of(request)
    answer = await runtime.ask(wish)
    if isinstance(answer, list):
        runtime.hub.tell(one.id for one in answer)
        first = first_element(runtime.parts.store, _array_of(answer[0]))
        assert first is not None  # it was found before the wish
        return reply(JobReply(job=await off_loop(whole_array, runtime.parts, caller_of(request), first)))
    assert isinstance(answer, Job)
    runtime.hub.tell((answer.id,))
    return reply(JobReply(job=seen(runtime.parts, caller_of(request), answer)))


def _alive(store: Store, job_id: JobId, job: Job) -> bool:
    """Whether anything of it is left to end. `job` is an array's first element where `job_id` names the array."""
    if job.id == job_id:
        return not job.state.terminal
    return not all(state.terminal for state in states_of(store, job).values())


def _whole(parts: HeadParts, caller: Caller, job_id: JobId, job: Job) -> JobView:
    """The job as it stands now, or the array that it is the first element of."""
    return seen(parts, caller, known_job(parts.store, job_id)) if job.id == job_id else whole_array(parts, caller, job)


def _array_of(job: Job) -> JobId:
    assert job.array is not None  # answers come as a list for arrays alone
    return job.array.array_id
