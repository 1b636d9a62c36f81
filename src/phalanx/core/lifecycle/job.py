"""The state machine of jobs: users' requests, and creating an attempt from a placement."""

from __future__ import annotations

from phalanx.core.errors import Conflict
from phalanx.core.ids import Epoch, NodeId
from phalanx.core.lifecycle import orders
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.dependencies import first_reason
from phalanx.core.lifecycle.facts import Case, Facts, Outcome, line
from phalanx.core.lifecycle.happenings import StopWanted
from phalanx.core.state.events import Update
from phalanx.core.state.revise import replace
from phalanx.core.units import format_duration
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.attempt import Attempt, Cause, Member
from phalanx.core.work.job import Job, JobState


def place(job: Job, allocation: Allocation, facts: Facts) -> Outcome:
    """Create the next epoch's attempt from a verified placement, with `Prepare` for each node."""
    attempt = Attempt(
        job_id=job.id,
        epoch=Epoch(job.epoch + 1),
        allocation=allocation,
        placed_s=facts.now_s,
        generation_s=facts.now_s,
        members=tuple(Member(node_id=grant.node_id) for grant in allocation.grants),
        kept=not all(_sees_head_files(grant.node_id, job, facts) for grant in allocation.grants),
    )
    job = replace(job, state=JobState.RUNNING, epoch=attempt.epoch, detail="")
    names = ", ".join(grant.node_id for grant in allocation.grants)
    waited = format_duration(max(0.0, facts.now_s - job.submit_s))
    entry = line(
        Case(job=job, attempt=attempt), facts, "placed", f"attempt {attempt.epoch} on {names} (submitted {waited} ago)"
    )
    return Outcome(job=job, attempt=attempt, commands=orders.prepare(job, attempt, facts), lines=(entry,))


def _sees_head_files(node_id: NodeId, job: Job, facts: Facts) -> bool:
    """Whether the job's ranks on the node can write to the head's checkpoint and output folders."""
    node = facts.nodes.get(node_id)
    return node is None or (node.sees_head_files and node.runs_as in {"", job.user})


def cancel(case: Case, by: str, why: str, facts: Facts) -> Outcome:
    """Cancel the job. A terminal job stays as it is."""
    job = case.job
    if job.state.terminal or job.cancelled_by:
        return Outcome(job=job, attempt=case.attempt)
    job = replace(job, cancelled_by=by, held=False)
    if case.attempt is None:
        entry = line(
            case,
            facts,
            "cancelled",
            f"cancelled by {by} before it ran" if job.epoch == 0 else f"cancelled by {by}",
            by=by,
        )
        return Outcome(
            job=replace(job, state=JobState.CANCELLED, ended_s=facts.now_s, detail=why, exit_code=143),
            attempt=None,
            lines=(entry,),
        )
    why = why or f"cancelled by {by}"
    return transition(Case(job=job, attempt=case.attempt), StopWanted(cause=Cause.CANCELLED, why=why, by=by), facts)


def hold(case: Case, held: bool, by: str, facts: Facts) -> Outcome:
    """Hold or release a pending job.

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
        return Outcome(job=job, attempt=case.attempt)
    if job.state is not JobState.PENDING:
        raise Conflict(
            f"job {job.id} is {job.state.value}; only a pending job can be {'held' if held else 'released'}",
            hint=f"phalanx requeue {job.id} stops it first" if held else "",
        )
    entry = line(case, facts, "held" if held else "released", f"{'held' if held else 'released'} by {by}", by=by)
    reason, detail = first_reason(held=held, unmet=job.unmet, begin_s=job.spec.begin_s, now_s=facts.now_s)
    return Outcome(job=replace(job, held=held, reason=reason, detail=detail), attempt=None, lines=(entry,))


def requeue(case: Case, by: str, facts: Facts) -> Outcome:
    """Stop the running attempt after a save; the job waits again.

    Raises:
        Conflict: the job does not run.
    """
    if case.attempt is None:
        raise Conflict(f"job {case.job.id} is {case.job.state.value}; only a running job can be requeued")
    return transition(case, StopWanted(cause=Cause.REQUEUED, why=f"requeued by {by}", by=by), facts)


def update(case: Case, event: Update, facts: Facts) -> Outcome:
    """Change fields of a live job.

    Raises:
        Conflict: the job has ended; or it runs, and the change would move it to another queue or lengthen its time limit.
    """
    job = case.job
    if job.state.terminal:
        raise Conflict(f"job {job.id} is {job.state.value} and can no longer be changed")
    if event.queue is not None and job.state is not JobState.PENDING:
        raise Conflict(f"job {job.id} runs in queue {job.queue}", hint=f"phalanx requeue {job.id} first")
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
            hint=f"phalanx requeue {job.id}, then update",
        )
    if event.begin_s is not None and job.state is not JobState.PENDING:
        raise Conflict(f"job {job.id} runs and has begun", hint=f"phalanx requeue {job.id} first")
    changes = {
        "name": event.name,
        "priority": event.priority,
        "time_limit_s": event.time_limit_s,
        "queue": event.queue,
        "begin_s": event.begin_s,
    }
    given = {key: value for key, value in changes.items() if value is not None}
    spec = replace(job.spec, **given)  # type: ignore[arg-type]  # the keys are JobSpec's own, of the types Update states
    entry = line(
        case, facts, "updated", ", ".join(f"{key} = {value}" for key, value in given.items()) or "nothing", by=event.by
    )
    after = replace(job, spec=spec, queue=event.queue or job.queue)
    if event.begin_s is not None:
        reason, detail = first_reason(held=job.held, unmet=job.unmet, begin_s=event.begin_s, now_s=facts.now_s)
        after = replace(after, reason=reason, detail=detail)
    return Outcome(job=after, attempt=case.attempt, lines=(entry,))
