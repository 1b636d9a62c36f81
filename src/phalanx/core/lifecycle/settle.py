"""Settles an attempt once every member is stopped or lost: determines the cause from all evidence, and requeues, restarts or ends the job.

The cause is determined here and not at the first failure, because the first report is often a symptom: when a node dies, its peers'
collectives fail with exit code 1 long before the dead node's lease expires.
"""

from __future__ import annotations

from phalanx.core.ids import Generation, NodeId
from phalanx.core.lifecycle import blame, hang, orders
from phalanx.core.lifecycle.facts import (
    AVOID_MAX,
    BACKOFF_FIRST_S,
    HANGS_BEFORE_STOP,
    NO_PROGRESS_BUDGET,
    PORT_TRIES,
    Case,
    Facts,
    Mark,
    Outcome,
    line,
)
from phalanx.core.state.revise import replace
from phalanx.core.work.attempt import TIME_LIMIT_NOTE, Attempt, AttemptState, Cause, Member, MemberState
from phalanx.core.work.failure import Remedy
from phalanx.core.work.job import BACKOFF_MAX_S, Job, JobState, Reason

_REASON = {
    Cause.PREEMPTED: Reason.PREEMPTED,
    Cause.MOVED: Reason.MOVED,
    Cause.DRAINED: Reason.DRAINED,
    Cause.REQUEUED: Reason.REQUEUED,
    Cause.CONTENDED: Reason.CONTENDED,
}
_SIGTERM_CODE = 143  # 128 + SIGTERM: a shell's exit code for a command that ended by SIGTERM
_START_WEIGHT = 0.3  # of a failed start against the node: the job's environment is at fault as often
_HANG_WEIGHT = 0.3  # of a hang against the culprit's node: the program is at fault as often


def settle(case: Case, attempt: Attempt, facts: Facts) -> Outcome:
    """End the attempt or start its next generation in place, with the verdict in the story and marks against faulty nodes."""
    cause = judge(attempt)
    outcome = _settled(case, blame.explained(attempt, cause), cause, facts)
    if cause is Cause.START_FAIL:
        against = tuple(Mark(node_id=node, weight=_START_WEIGHT, why="a failed start") for node in _bad_nodes(attempt))
        return replace(outcome, marks=(*outcome.marks, *against))
    if cause not in (Cause.FAILED, Cause.CRASH, Cause.FAULT):
        return outcome
    return _with_verdict(case, attempt, cause, facts, outcome)


def _with_verdict(case: Case, attempt: Attempt, cause: Cause, facts: Facts, outcome: Outcome) -> Outcome:
    """The outcome with the verdict as the first story line."""
    job = outcome.job
    budget = f"restart {min(job.stalls, NO_PROGRESS_BUDGET)} of {NO_PROGRESS_BUDGET} without progress"
    if cause is Cause.FAILED:
        budget = f"retry {job.user_retries} of {job.spec.retry}" if job.spec.retry else "no retry requested, none"
    then = blame.next_step(attempt, goes_on=not job.state.terminal, budget=budget)
    first = blame.first_failure(attempt)
    lines = outcome.lines
    if then and first is not None:
        text = f"rank {first.rank} on {first.node_id}: {blame.in_words(first)}; {then}"
        lines = (line(case, facts, "verdict", text, node_id=first.node_id), *lines)
    more = () if cause is Cause.FAILED else blame.faults(attempt)
    return replace(outcome, lines=lines, faults=(*outcome.faults, *more), marks=(*outcome.marks, *blame.marks(attempt)))


def _settled(case: Case, attempt: Attempt, cause: Cause, facts: Facts) -> Outcome:
    job = case.job
    match cause:
        case Cause.SUCCEEDED:
            return _end(case, attempt, cause, JobState.SUCCEEDED, 0, facts)
        case Cause.CANCELLED:
            return _end(case, attempt, cause, JobState.CANCELLED, _SIGTERM_CODE, facts)
        case Cause.TIMEOUT:
            return _end(case, attempt, cause, JobState.TIMEOUT, _SIGTERM_CODE, facts)
        case Cause.PREEMPTED | Cause.MOVED | Cause.DRAINED | Cause.REQUEUED | Cause.CONTENDED:
            preempted = cause is Cause.PREEMPTED
            after = replace(job, preemptions=job.preemptions + preempted, moves=job.moves + (cause is Cause.MOVED))
            return _requeue(after, attempt, cause, _REASON[cause], 0.0, facts)
        case Cause.FREEZE:
            return _restart_in_place(job, attempt, cause, facts)
        case Cause.PORT_TAKEN:
            if attempt.causes[-PORT_TRIES:] != (cause,) * PORT_TRIES:
                return _restart_in_place(job, attempt, cause, facts)
            why = f"a port was taken {PORT_TRIES + 1} times in a row: does the job bind a fixed port? The last: {attempt.why}"
            return _end(case, replace(attempt, why=why), cause, JobState.FAILED, _first_failure_code(attempt), facts)
        case Cause.FAILED:
            return _failed(case, attempt, facts)
        case Cause.HANG:
            return _hung(case, attempt, facts)
        case Cause.UNFIT if len(job.avoid) < AVOID_MAX and not set(_bad_nodes(attempt)) <= set(job.avoid):
            # Each such swap adds a node to `avoid`: at most AVOID_MAX swaps, after which it counts as a failed start.
            after = replace(job, avoid=_avoid(job.avoid, _bad_nodes(attempt)))
            return _requeue(after, attempt, cause, Reason.START_FAIL, 0.0, facts)
        case Cause.CRASH | Cause.NODE_FAIL | Cause.FAULT | Cause.START_FAIL | Cause.UNFIT:
            return _charged(case, attempt, cause, facts)


def _charged(case: Case, attempt: Attempt, cause: Cause, facts: Facts) -> Outcome:
    """Restart the job, charged to its no-progress budget."""
    job = case.job
    lost = cause in (Cause.CRASH, Cause.NODE_FAIL, Cause.FAULT)
    after = replace(job, stalls=job.stalls + 1, losses=job.losses + lost)
    if after.stalls > NO_PROGRESS_BUDGET:
        why = f"{NO_PROGRESS_BUDGET} restarts without progress; the last: {attempt.why}"
        return _end(case, replace(attempt, why=why), cause, JobState.FAILED, _first_failure_code(attempt), facts)
    if cause in (Cause.CRASH, Cause.HANG):
        return _restart_in_place(after, attempt, cause, facts)
    after = replace(after, avoid=_avoid(job.avoid, _bad_nodes(attempt)))
    backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (after.stalls - 1))
    if cause is Cause.NODE_FAIL:
        return _requeue(after, attempt, cause, Reason.NODE_FAIL, 0.0, facts)
    if cause is Cause.FAULT:
        # The first time at once, on another node. A fault that recurs there (a full shared disk) gets time to pass.
        later_s = facts.now_s + backoff_s / 2 if after.stalls > 1 else 0.0
        return _requeue(after, attempt, cause, Reason.NODE_FAIL, later_s, facts)
    return _requeue(after, attempt, cause, Reason.START_FAIL, facts.now_s + backoff_s, facts)


def _failed(case: Case, attempt: Attempt, facts: Facts) -> Outcome:
    """The job's own failure: restart it while `retry` allows, in place unless a rule requires another node."""
    job, first = case.job, blame.first_failure(attempt)
    remedy = Remedy.HERE if first is None or first.verdict is None else first.verdict.remedy
    if job.user_retries >= job.spec.retry or not attempt.exits or remedy is Remedy.STOP:
        return _end(case, attempt, Cause.FAILED, JobState.FAILED, _first_failure_code(attempt), facts)
    after = replace(job, user_retries=job.user_retries + 1)
    if remedy is Remedy.HERE:
        return _restart_in_place(after, attempt, Cause.FAILED, facts)
    after = replace(after, avoid=_avoid(job.avoid, _bad_nodes(attempt)))
    return _requeue(after, attempt, Cause.FAILED, Reason.NODE_FAIL, 0.0, facts)


def _hung(case: Case, attempt: Attempt, facts: Facts) -> Outcome:
    """A hang: restart once, as the rules require; end the job if it hangs again without progress."""
    job, verdict = case.job, facts.judge_cause(Cause.HANG)
    remedy = Remedy.HERE if verdict is None else verdict.remedy
    found, _ = hang.culprits(attempt.exits)
    why = f"{attempt.why}; {hang.told(attempt.exits)}"
    attempt = replace(attempt, why=why)
    entry = line(case, facts, "hung", f"{hang.told(attempt.exits)}; stacks: phalanx logs {job.id} --stacks")
    nodes = dict.fromkeys(exit.node_id for exit in found) if len(found) < len(attempt.exits) else {}
    against = tuple(Mark(node_id=node_id, weight=_HANG_WEIGHT, why="a rank hung there") for node_id in nodes)
    if job.hangs >= HANGS_BEFORE_STOP or remedy is Remedy.STOP:
        ended = replace(attempt, why=f"hung again without progress: {why}" if job.hangs else why)
        outcome = _end(case, ended, Cause.HANG, JobState.FAILED, _first_failure_code(attempt), facts)
    elif remedy is Remedy.HERE:
        after = replace(job, hangs=job.hangs + 1)
        outcome = _charged(replace(case, job=after), attempt, Cause.HANG, facts)
    else:
        bad = tuple(replace(m, why=m.why or "a rank hung there") if m.node_id in nodes else m for m in attempt.members)
        after = replace(job, hangs=job.hangs + 1)
        outcome = _charged(replace(case, job=after), replace(attempt, members=bad), Cause.FAULT, facts)
    return replace(outcome, lines=(entry, *outcome.lines), marks=(*outcome.marks, *against))


def judge(attempt: Attempt) -> Cause:
    """The cause from all evidence: requested stops first, then lost nodes, then signals, then exit codes."""
    finished = len(attempt.exits) == attempt.allocation.world_size and all(
        exit.shell_code == 0 and not exit.by_us for exit in attempt.exits
    )
    if attempt.ending is Cause.CANCELLED:
        return Cause.CANCELLED
    if finished:
        return Cause.SUCCEEDED
    lost = any(member.state is MemberState.LOST for member in attempt.members)
    if attempt.ending in (Cause.TIMEOUT, Cause.PREEMPTED, Cause.MOVED, Cause.DRAINED, Cause.REQUEUED):
        return attempt.ending
    if any(exit.note == TIME_LIMIT_NOTE for exit in attempt.exits):  # enforced by a supervisor without the head
        return Cause.TIMEOUT
    if lost:
        return Cause.NODE_FAIL
    if attempt.ending is not None:
        return attempt.ending
    first = blame.first_failure(attempt)
    if first is None:
        return Cause.START_FAIL  # a member stopped without task exits: its supervisor lost its tasks
    if first.verdict is not None:
        return blame.cause_of(first.verdict, alone=attempt.allocation.world_size == 1)
    return Cause.CRASH if first.code is None else Cause.FAILED


def _first_failure_code(attempt: Attempt) -> int:
    """The exit code of the first failure; if no task ran, the code with which a member refused."""
    first = blame.first_failure(attempt)
    return first.shell_code if first is not None else attempt.exit_code or 1


def _end(case: Case, attempt: Attempt, cause: Cause, state: JobState, code: int, facts: Facts) -> Outcome:
    ended = _ended(attempt, cause, facts, code)
    job = replace(
        case.job,
        state=state,
        ended_s=facts.now_s,
        exit_code=code,
        detail=attempt.why if state is not JobState.SUCCEEDED else "",
        reason=Reason.NEW,
    )
    text = (
        state.value
        if state is JobState.SUCCEEDED
        else f"{state.value} with exit code {code}: {attempt.why or cause.value}"
    )
    entry = line(case, facts, state.value, text)
    return Outcome(job=job, attempt=ended, commands=orders.forget(attempt), lines=(entry,))


def _requeue(job: Job, attempt: Attempt, cause: Cause, reason: Reason, not_before_s: float, facts: Facts) -> Outcome:
    """End the attempt; the job is PENDING again with `reason`."""
    ended = _ended(attempt, cause, facts, None)
    attained_s = job.attained_s + _kept_s(job, attempt)
    after = replace(
        job, state=JobState.PENDING, reason=reason, detail=attempt.why, not_before_s=not_before_s, attained_s=attained_s
    )
    resume = f"; resumes from step {job.checkpoints[-1].step}" if job.checkpoints else ""
    entry = line(
        Case(job=job, attempt=attempt),
        facts,
        "requeued",
        f"attempt {attempt.epoch} ended ({cause.value}): {attempt.why}{resume}",
    )
    return Outcome(job=after, attempt=ended, commands=orders.forget(attempt), lines=(entry,))


def _kept_s(job: Job, attempt: Attempt) -> float:
    """Running time of this attempt whose work a checkpoint contains."""
    newest = job.checkpoints[-1] if job.checkpoints else None
    if newest is None or newest.epoch != attempt.epoch or attempt.first_running_s is None:
        return 0.0
    return max(0.0, newest.saved_s - attempt.first_running_s)


def _restart_in_place(job: Job, attempt: Attempt, cause: Cause, facts: Facts) -> Outcome:
    """Start the next generation in place: same nodes, same epoch, new rendezvous."""
    if any(member.state is MemberState.LOST for member in attempt.members):
        return _requeue(job, attempt, Cause.NODE_FAIL, Reason.NODE_FAIL, 0.0, facts)
    fresh = replace(
        attempt,
        generation=Generation(attempt.generation + 1),
        state=AttemptState.PLACED,
        generation_s=facts.now_s,
        members=tuple(Member(node_id=member.node_id) for member in attempt.members),
        running_s=None,
        exits=(),
        ending=None,
        why="",
        exit_code=None,
        resume=None,
        causes=(*attempt.causes, cause),
    )
    entry = line(
        Case(job=job, attempt=attempt),
        facts,
        "restart",
        f"restart {fresh.generation} in place ({cause.value}: {attempt.why})",
    )
    return Outcome(job=job, attempt=fresh, commands=orders.prepare(job, fresh, facts), lines=(entry,))


def _ended(attempt: Attempt, cause: Cause, facts: Facts, code: int | None) -> Attempt:
    return replace(
        attempt,
        state=AttemptState.ENDED,
        ended_s=facts.now_s,
        ending=cause,
        causes=(*attempt.causes, cause),
        exit_code=code,
    )


def _bad_nodes(attempt: Attempt) -> tuple[NodeId, ...]:
    return tuple(member.node_id for member in attempt.members if member.why)


def _avoid(known: tuple[NodeId, ...], bad: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys((*(node for node in known if node not in bad), *bad)))[-AVOID_MAX:]
