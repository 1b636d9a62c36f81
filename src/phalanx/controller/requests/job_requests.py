"""Requests about jobs that exist: cancel, hold, requeue, change. Of an array they apply to each element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from phalanx.controller.requests import services
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionResult
from phalanx.core.state.events import CancelAllJobs, CancelJob, HoldJob, ParkJob, RequeueJob, UpdateJob
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action

handlers: Final = RequestHandlers()


@handlers.add(CancelJob, Action.CHANGE_OWN, audit=lambda request, _: f"job {request.job_id}")
def cancel(context: StepContext, request: CancelJob) -> Job | list[Job]:
    """Cancel a job."""
    act = partial(jobs.cancel, by=request.by, why=request.why, facts=context.facts)
    return _each(context, request.job_id, act, lambda _: True, "is live")


@handlers.add(CancelAllJobs, Action.OPERATE, audit=lambda *_: "all live jobs")
def cancel_all(context: StepContext, request: CancelAllJobs) -> list[Job]:
    """Cancel all live jobs, and stop all services, which would replace theirs."""
    services.stop_all(context, request.by)
    live = [job.id for job in context.world.jobs.values() if not job.state.terminal]
    for job_id in live:
        context.apply(jobs.cancel(context.case(job_id), request.by, "cancelled with the head", context.facts))
    return [context.world.jobs[job_id] for job_id in live]


@handlers.add(
    HoldJob,
    Action.CHANGE_OWN,
    audit=lambda request, _: f"job {request.job_id} {'hold' if request.held else 'release'}",
)
def hold(context: StepContext, request: HoldJob) -> Job | list[Job]:
    """Hold or release a job. Of an array only the pending elements; running ones continue, as with Slurm."""
    act = partial(jobs.hold, held=request.held, by=request.by, facts=context.facts)
    return _each(context, request.job_id, act, lambda case: case.job.state is JobState.PENDING, "waits")


@handlers.add(
    ParkJob,
    Action.CHANGE_OWN,
    audit=lambda request, _: f"job {request.job_id} {'park' if request.parked else 'resume'}",
)
def park(context: StepContext, request: ParkJob) -> Job | list[Job]:
    """Park or resume a job; of an array, each element that is live or parked."""
    if request.parked:
        return _each(
            context,
            request.job_id,
            partial(jobs.park, by=request.by, facts=context.facts),
            lambda case: not case.job.state.terminal,
            "is live",
        )
    act = partial(jobs.resume, by=request.by, facts=context.facts)
    return _each(context, request.job_id, act, jobs.is_parked, "is parked")


@handlers.add(RequeueJob, Action.CHANGE_OWN, audit=lambda request, _: f"job {request.job_id}")
def requeue(context: StepContext, request: RequeueJob) -> Job | list[Job]:
    """Stop the running attempt after a save."""
    act = partial(jobs.requeue, by=request.by, facts=context.facts)
    return _each(context, request.job_id, act, lambda case: case.attempt is not None, "runs")


def _describe_update(request: UpdateJob, _: object) -> str:
    asked = {
        "priority": request.priority,
        "queue": request.queue,
        "time_limit_s": request.time_limit_s,
        "begin_s": request.begin_s,
        "name": None if request.name is None else "changed",
    }
    return f"job {request.job_id} " + " ".join(f"{k}={v}" for k, v in asked.items() if v is not None)


@handlers.add(UpdateJob, Action.CHANGE_OWN, audit=_describe_update)
def update(context: StepContext, request: UpdateJob) -> Job | list[Job]:
    """Change fields of a job.

    Raises:
        NeverFits: it could never start in the requested queue.
    """
    job = context.world.jobs.get(request.job_id)
    if job is not None and job.replica is not None:
        service = job.replica.service
        raise Conflict(
            f"job {job.id} is a replica of service {service}", hint=Hint(HintCode.UPDATE_SERVICE, service=service)
        )
    if request.queue is not None and request.queue not in context.world.queues:
        raise NotFound(f"no queue {request.queue!r}", hint=f"there are: {', '.join(sorted(context.world.queues))}")

    def act(case: AttemptCase) -> TransitionResult:
        result = jobs.update(case, request, context.facts)
        if request.queue is not None and not case.job.spec.allow_never:
            outlook = context.feasibility.check_job(result.job)
            if outlook.never:
                raise outlook.error()
        return result

    return _each(context, request.job_id, act, lambda _: True, "is live")


def _each(
    context: StepContext,
    job_id: JobId,
    act: Callable[[AttemptCase], TransitionResult],
    applies: Callable[[AttemptCase], bool],
    word: str,
) -> Job | list[Job]:
    """Apply `act` to the job, or to each live element of an array for which `applies` holds; all or none.

    Raises:
        NotFound: no such job, or no live element.
        Conflict: it applies to no element; or what `act` raises for any.
    """
    world = context.world
    if job_id in world.jobs:
        context.apply(act(context.case(job_id)))
        return world.jobs[job_id]
    if job_id not in world.relations.elements:
        raise NotFound(f"no job {job_id}", hint=Hint(HintCode.LIST_JOBS))
    cases = [case for element in world.relations.elements[job_id] if applies(case := context.case(element))]
    if not cases:
        raise Conflict(f"no element of array {job_id} {word}", hint=Hint(HintCode.SHOW_JOB, job=job_id))
    outcomes = [act(case) for case in sorted(cases, key=lambda case: case.job.seq)]
    for outcome in outcomes:
        context.apply(outcome)
    return [world.jobs[outcome.job.id] for outcome in outcomes]
