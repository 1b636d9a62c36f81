"""The state machine of jobs: users' requests, and creating an attempt from a placement."""

from __future__ import annotations

from phalanx.core.errors import Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import Epoch, NodeId
from phalanx.core.lifecycle import gang_commands
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.dependencies import first_reason
from phalanx.core.lifecycle.events import StopRequested
from phalanx.core.lifecycle.transitions import (
    AttemptCase,
    TransitionContext,
    TransitionResult,
    history_line,
)
from phalanx.core.state.events import UpdateJob
from phalanx.core.state.fast_replace import replace
from phalanx.core.units import format_duration
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.attempt import Attempt, EndCause, Member
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState, WaitReasonCode


def place(job: Job, allocation: Allocation, facts: TransitionContext, speed: float = 1.0) -> TransitionResult:
    """Create the next epoch's attempt from a verified placement, with `PrepareTasks` for each node. `speed` as in `Placement`."""
    attempt = Attempt(
        job_id=job.id,
        epoch=Epoch(job.epoch + 1),
        folder=f"{job.folder}/epoch-{job.epoch + 1}-{facts.storage_key}",
        allocation=allocation,
        speed=speed,
        placed_s=facts.now_s,
        generation_s=facts.now_s,
        members=tuple(Member(node_id=grant.node_id) for grant in allocation.grants),
        head_stores_copies=not all(_sees_head_files(grant.node_id, job, facts) for grant in allocation.grants),
    )
    job = replace(job, state=JobState.RUNNING, epoch=attempt.epoch, detail="")
    names = ", ".join(grant.node_id for grant in allocation.grants)
    waited = format_duration(max(0.0, facts.now_s - job.submit_s))
    entry = history_line(
        AttemptCase(job=job, attempt=attempt),
        facts,
        "placed",
        f"attempt {attempt.epoch} on {names} (submitted {waited} ago)",
    )
    return TransitionResult(
        job=job, attempt=attempt, commands=gang_commands.prepare(job, attempt, facts), history=(entry,)
    )


def _sees_head_files(node_id: NodeId, job: Job, facts: TransitionContext) -> bool:
    """Whether the job's ranks on the node can write to the head's checkpoint and output folders."""
    node = facts.nodes.get(node_id)
    return node is None or (node.shares_head_files and node.supervisor_account in {"", job.user})


def cancel(case: AttemptCase, by: str, why: str, facts: TransitionContext) -> TransitionResult:
    """Cancel the job. A terminal job stays as it is."""
    job = case.job
    if job.state.terminal or job.cancelled_by:
        return TransitionResult(job=job, attempt=case.attempt)
    job = replace(job, cancelled_by=by, held=False, parked_s=None)
    if case.attempt is None:
        text = f"cancelled by {by} before it ran" if job.epoch == 0 else f"cancelled by {by}"
        entry = history_line(case, facts, "cancelled", text, by=by)
        return TransitionResult(
            job=replace(job, state=JobState.CANCELLED, ended_s=facts.now_s, detail=why or text, exit_code=143),
            attempt=None,
            history=(entry,),
        )
    why = why or f"cancelled by {by}"
    return transition(
        AttemptCase(job=job, attempt=case.attempt), StopRequested(cause=EndCause.CANCELLED, why=why, by=by), facts
    )


def hold(case: AttemptCase, held: bool, by: str, facts: TransitionContext) -> TransitionResult:
    """Hold or release a pending job. A parked one is released as `resume` does.

    Raises:
        Conflict: the job has ended, or it runs. Releasing a running job that is not held is allowed.
    """
    job = case.job
    if job.state.terminal:
        word = "held" if held else "released"
        raise Conflict(
            f"job {job.id} is {job.state.value}; a job that has ended cannot be {word}",
            hint="submit it again",
        )
    if job.held == held:
        return TransitionResult(job=job, attempt=case.attempt)
    if job.parked_s is not None:
        return resume(case, by, facts)
    if job.state is not JobState.PENDING:
        raise Conflict(
            f"job {job.id} is {job.state.value}; only a pending job can be {'held' if held else 'released'}",
            hint=Hint(HintCode.REQUEUE_JOB, job=job.id) if held else "",
        )
    entry = history_line(
        case, facts, "held" if held else "released", f"{'held' if held else 'released'} by {by}", by=by
    )
    reason, detail = first_reason(held=held, unmet=job.unmet_dependencies, begin_s=job.spec.begin_s, now_s=facts.now_s)
    return TransitionResult(job=replace(job, held=held, reason=reason, detail=detail), attempt=None, history=(entry,))


def park(case: AttemptCase, by: str, facts: TransitionContext) -> TransitionResult:
    """Stop the running attempt after a save, and keep the job parked until it is resumed. A waiting job is parked at once.

    Raises:
        Conflict: the job has ended, or it is a replica, whose service would miss it.
    """
    job = case.job
    if job.state.terminal:
        raise Conflict(f"job {job.id} is {job.state.value}; a job that has ended cannot be parked")
    if job.replica is not None:
        service = job.replica.service
        raise Conflict(
            f"job {job.id} is a replica of service {service}", hint=Hint(HintCode.SLEEP_SERVICE, service=service)
        )
    if case.attempt is not None:
        return transition(case, StopRequested(cause=EndCause.PARKED, why=f"parked by {by}", by=by), facts)
    if job.parked_s is not None or job.cancelled_by:
        return TransitionResult(job=job, attempt=None)
    entry = history_line(case, facts, "parked", f"parked by {by}", by=by)
    after = replace(job, held=True, parked_s=facts.now_s, reason=WaitReasonCode.PARKED, detail=f"parked by {by}")
    return TransitionResult(job=after, attempt=None, history=(entry,))


def is_parked(case: AttemptCase) -> bool:
    """Whether the job is parked, or will be as soon as it has stopped."""
    stops = case.attempt is not None and case.attempt.stop_cause is EndCause.PARKED
    return stops or case.job.parked_s is not None


def resume(case: AttemptCase, by: str, facts: TransitionContext) -> TransitionResult:
    """Queue a parked job again; one that is just being parked, as soon as it has stopped. Any other that may start stays as it is.

    Raises:
        Conflict: the job has ended, or it is held.
    """
    job, attempt = case.job, case.attempt
    if job.state.terminal:
        raise Conflict(f"job {job.id} is {job.state.value}; a job that has ended cannot be resumed")
    if attempt is not None and attempt.stop_cause is EndCause.PARKED:
        why = f"resumed by {by}"
        entry = history_line(case, facts, "resumed", f"{why}; it is queued again once it has stopped", by=by)
        requeued = replace(attempt, stop_cause=EndCause.REQUEUED, why=why)
        return TransitionResult(job=job, attempt=requeued, history=(entry,))
    if job.parked_s is None:
        if job.held:
            raise Conflict(f"job {job.id} is held, not parked", hint=Hint(HintCode.RELEASE_JOB, job=job.id))
        return TransitionResult(job=job, attempt=attempt)
    entry = history_line(case, facts, "resumed", f"resumed by {by}", by=by)
    reason, detail = first_reason(held=False, unmet=job.unmet_dependencies, begin_s=job.spec.begin_s, now_s=facts.now_s)
    after = replace(job, held=False, parked_s=None, reason=reason, detail=detail)
    return TransitionResult(job=after, attempt=None, history=(entry,))


def requeue(case: AttemptCase, by: str, facts: TransitionContext) -> TransitionResult:
    """Stop the running attempt after a save; the job waits again.

    Raises:
        Conflict: the job does not run.
    """
    if case.attempt is None:
        raise Conflict(f"job {case.job.id} is {case.job.state.value}; only a running job can be requeued")
    return transition(case, StopRequested(cause=EndCause.REQUEUED, why=f"requeued by {by}", by=by), facts)


def update(case: AttemptCase, event: UpdateJob, facts: TransitionContext) -> TransitionResult:
    """Change fields of a live job.

    Raises:
        Conflict: the job has ended; or it runs, and the change would move it to another queue or lengthen its time limit.
    """
    job = case.job
    if job.state.terminal:
        raise Conflict(f"job {job.id} is {job.state.value} and can no longer be changed")
    if event.queue is not None and job.state is not JobState.PENDING:
        raise Conflict(f"job {job.id} runs in queue {job.queue}", hint=Hint(HintCode.REQUEUE_JOB, job=job.id))
    limit_s = job.spec.time_limit_s
    if (
        event.time_limit_s is not None
        and limit_s is not None
        and case.attempt is not None
        and event.time_limit_s > limit_s
    ):
        # Its supervisors enforce the limit that they received at the start, even without a head.
        raise Conflict(
            f"job {job.id} runs under a limit of {format_duration(limit_s)}; while it runs it can only be shortened",
            hint=Hint(HintCode.REQUEUE_JOB, job=job.id),
        )
    if event.begin_s is not None and job.state is not JobState.PENDING:
        raise Conflict(f"job {job.id} runs and has begun", hint=Hint(HintCode.REQUEUE_JOB, job=job.id))
    changes = {
        "name": event.name,
        "priority": event.priority,
        "time_limit_s": event.time_limit_s,
        "queue": event.queue,
        "begin_s": event.begin_s,
    }
    given = {key: value for key, value in changes.items() if value is not None}
    spec = replace(job.spec, **given)  # type: ignore[arg-type]  # the keys are JobSpec's own, of the types Update states
    entry = history_line(
        case, facts, "updated", ", ".join(f"{key} = {value}" for key, value in given.items()) or "nothing", by=event.by
    )
    after = replace(job, spec=spec, queue=event.queue or job.queue)
    if event.begin_s is not None:
        reason, detail = first_reason(
            held=job.held,
            parked=job.parked_s is not None,
            unmet=job.unmet_dependencies,
            begin_s=event.begin_s,
            now_s=facts.now_s,
        )
        after = replace(after, reason=reason, detail=detail)
    return TransitionResult(job=after, attempt=case.attempt, history=(entry,))
