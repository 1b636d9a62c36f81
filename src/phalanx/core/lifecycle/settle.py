"""Settles an attempt once every member is stopped or lost: determines the cause from all evidence, and requeues, restarts or ends the job.

The cause is determined here and not at the first failure, because the first report is often a symptom: when a node dies, its peers'
collectives fail with exit code 1 long before the dead node's lease expires.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.ids import Generation, NodeId
from phalanx.core.lifecycle import failure_attribution, gang_commands, hang_culprits
from phalanx.core.lifecycle.transitions import (
    AVOID_MAX,
    BACKOFF_FIRST_S,
    HANGS_BEFORE_STOP,
    NO_PROGRESS_BUDGET,
    PORT_TRIES,
    AttemptCase,
    FaultMark,
    TransitionContext,
    TransitionResult,
    history_line,
)
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.attempt import TIME_LIMIT_NOTE, Attempt, EndCause, Member, MemberState
from phalanx.core.work.exit_code import code_beside
from phalanx.core.work.failure import FailureReaction
from phalanx.core.work.job import BACKOFF_MAX_S, Job
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode

_REASON = {
    EndCause.PREEMPTED: WaitReasonCode.PREEMPTED,
    EndCause.MOVED: WaitReasonCode.MOVED,
    EndCause.DRAINED: WaitReasonCode.DRAINED,
    EndCause.REQUEUED: WaitReasonCode.REQUEUED,
    EndCause.CONTENDED: WaitReasonCode.CONTENDED,
}
STEADY_S: Final = BACKOFF_MAX_S  # a replica ready for this long has recovered from its last failure
_NODE_FAILURES: Final = (EndCause.NODE_FAIL, EndCause.FAULT, EndCause.START_FAIL, EndCause.UNFIT)
_STOPS: Final = (
    EndCause.TIMEOUT,
    EndCause.PREEMPTED,
    EndCause.MOVED,
    EndCause.DRAINED,
    EndCause.REQUEUED,
    EndCause.IDLE,
    EndCause.PARKED,
)
_REPLICA_FAILURES: Final = (
    *_NODE_FAILURES,
    EndCause.SUCCEEDED,
    EndCause.FAILED,
    EndCause.CRASH,
    EndCause.HANG,
    EndCause.PORT_TAKEN,
)
_DOUBLINGS_MAX: Final = 10  # more would only overflow: the pause has reached BACKOFF_MAX_S
_SIGTERM_CODE = 143  # 128 + SIGTERM: a shell's exit code for a command that ended by SIGTERM
_START_WEIGHT = 0.3  # of a failed start against the node: the job's environment is at fault as often
_HANG_WEIGHT = 0.3  # of a hang against the culprit's node: the program is at fault as often


def settle(case: AttemptCase, attempt: Attempt, facts: TransitionContext) -> TransitionResult:
    """End the attempt or start its next generation in place, with the diagnosis in the history and marks against faulty nodes."""
    cause = determine_cause(attempt, completes=case.job.replica is None)
    outcome = _settled(case, failure_attribution.with_explanation(attempt, cause), cause, facts)
    if cause is EndCause.START_FAIL:
        against = tuple(
            FaultMark(node_id=node, weight=_START_WEIGHT, why="a failed start") for node in _bad_nodes(attempt)
        )
        return replace(outcome, marks=(*outcome.marks, *against))
    if cause not in (EndCause.FAILED, EndCause.CRASH, EndCause.FAULT):
        return outcome
    return _with_diagnosis(case, attempt, cause, facts, outcome)


def _with_diagnosis(
    case: AttemptCase, attempt: Attempt, cause: EndCause, facts: TransitionContext, outcome: TransitionResult
) -> TransitionResult:
    """The outcome with the diagnosis as the first history line."""
    job = outcome.job
    budget = f"restart {min(job.charged_restarts, NO_PROGRESS_BUDGET)} of {NO_PROGRESS_BUDGET} without progress"
    if job.replica is not None:
        budget = f"restart {job.charged_restarts} of this replica"
    elif cause is EndCause.FAILED:
        budget = f"retry {job.user_retries} of {job.spec.retry}" if job.spec.retry else "no retry requested, none"
    then = failure_attribution.next_step(attempt, goes_on=not job.state.terminal, budget=budget)
    first = failure_attribution.first_failure(attempt)
    lines = outcome.history
    if then and first is not None:
        text = f"rank {first.rank} on {first.node_id}: {failure_attribution.describe_exit(first)}; {then}"
        lines = (history_line(case, facts, "verdict", text, node_id=first.node_id), *lines)
    more = () if cause is EndCause.FAILED else failure_attribution.node_faults(attempt)
    return replace(
        outcome,
        history=lines,
        faults=(*outcome.faults, *more),
        marks=(*outcome.marks, *failure_attribution.fault_marks(attempt)),
    )


def _settled(case: AttemptCase, attempt: Attempt, cause: EndCause, facts: TransitionContext) -> TransitionResult:
    job = case.job
    if job.replica is not None and cause in _REPLICA_FAILURES:
        return _restart_replica(job, attempt, cause, facts)
    match cause:
        case EndCause.SUCCEEDED:
            return _end(case, attempt, cause, JobState.SUCCEEDED, 0, facts)
        case EndCause.CANCELLED:
            return _end(case, attempt, cause, JobState.CANCELLED, _SIGTERM_CODE, facts)
        case EndCause.TIMEOUT:
            return _end(case, attempt, cause, JobState.TIMEOUT, _SIGTERM_CODE, facts)
        case EndCause.PREEMPTED | EndCause.MOVED | EndCause.DRAINED | EndCause.REQUEUED | EndCause.CONTENDED:
            preempted = cause is EndCause.PREEMPTED
            after = replace(job, preemptions=job.preemptions + preempted, moves=job.moves + (cause is EndCause.MOVED))
            return _requeue(after, attempt, cause, _REASON[cause], 0.0, facts)
        case EndCause.IDLE:
            return _requeue(replace(job, held=True), attempt, cause, WaitReasonCode.HELD, 0.0, facts)
        case EndCause.PARKED:
            after = replace(job, held=True, parked_s=facts.now_s)
            return _requeue(after, attempt, cause, WaitReasonCode.PARKED, 0.0, facts)
        case EndCause.LIMITED:
            return _requeue(job, attempt, cause, WaitReasonCode.ENGINE_LIMIT, facts.now_s + BACKOFF_MAX_S, facts)
        case EndCause.FREEZE:
            return _restart_in_place(job, attempt, cause, facts)
        case EndCause.PORT_TAKEN:
            if attempt.causes[-PORT_TRIES:] != (cause,) * PORT_TRIES:
                return _restart_in_place(job, attempt, cause, facts)
            why = f"a port was taken {PORT_TRIES + 1} times in a row: does the job bind a fixed port? The last: {attempt.why}"
            return _end(case, replace(attempt, why=why), cause, JobState.FAILED, _first_failure_code(attempt), facts)
        case EndCause.FAILED:
            return _failed(case, attempt, facts)
        case EndCause.HANG:
            return _hung(case, attempt, facts)
        case EndCause.UNFIT if len(job.avoided_nodes) < AVOID_MAX and not set(_bad_nodes(attempt)) <= set(
            job.avoided_nodes
        ):
            # Each such swap adds a node to `avoided_nodes`: at most AVOID_MAX swaps, after which it counts as a failed start.
            after = replace(job, avoided_nodes=_avoid(job.avoided_nodes, _bad_nodes(attempt)))
            return _requeue(after, attempt, cause, WaitReasonCode.START_FAIL, 0.0, facts)
        case EndCause.UNFIT if any(member.disk_full for member in attempt.members):
            # The node is cordoned until it has room. Without that cordon (an operator undid it) this is the pace of the tries.
            later_s = facts.now_s + BACKOFF_MAX_S
            return _requeue(job, attempt, cause, WaitReasonCode.START_FAIL, later_s, facts)
        case EndCause.CRASH | EndCause.NODE_FAIL | EndCause.FAULT | EndCause.START_FAIL | EndCause.UNFIT:
            return _charged(case, attempt, cause, facts)


def _charged(case: AttemptCase, attempt: Attempt, cause: EndCause, facts: TransitionContext) -> TransitionResult:
    """Restart the job, charged to its no-progress budget."""
    job = case.job
    lost = cause in (EndCause.CRASH, EndCause.NODE_FAIL, EndCause.FAULT)
    after = replace(job, charged_restarts=job.charged_restarts + 1, failure_count=job.failure_count + lost)
    if after.charged_restarts > NO_PROGRESS_BUDGET:
        why = f"{NO_PROGRESS_BUDGET} restarts without progress; the last: {attempt.why}"
        return _end(case, replace(attempt, why=why), cause, JobState.FAILED, _first_failure_code(attempt), facts)
    if cause in (EndCause.CRASH, EndCause.HANG):
        return _restart_in_place(after, attempt, cause, facts)
    after = replace(after, avoided_nodes=_avoid(job.avoided_nodes, _bad_nodes(attempt)))
    backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (after.charged_restarts - 1))
    if cause is EndCause.NODE_FAIL:
        return _requeue(after, attempt, cause, WaitReasonCode.NODE_FAIL, 0.0, facts)
    if cause is EndCause.FAULT:
        # The first time at once, on another node. A fault that recurs there (a full shared disk) gets time to pass.
        later_s = facts.now_s + backoff_s / 2 if after.charged_restarts > 1 else 0.0
        return _requeue(after, attempt, cause, WaitReasonCode.NODE_FAIL, later_s, facts)
    return _requeue(after, attempt, cause, WaitReasonCode.START_FAIL, facts.now_s + backoff_s, facts)


def _restart_replica(job: Job, attempt: Attempt, cause: EndCause, facts: TransitionContext) -> TransitionResult:
    """Restart a replica of a service, however often it fails: only its service ends it.

    The first restart is at once and in place. Later ones follow after a growing pause, in which its devices are free, on whichever node
    has room. A replica that was ready for STEADY_S counts from the first again.
    """
    if cause is EndCause.SUCCEEDED:
        attempt = replace(attempt, why="its command ended with exit code 0; a service's command must keep running")
    if cause in _NODE_FAILURES:
        job = replace(job, avoided_nodes=_avoid(job.avoided_nodes, _bad_nodes(attempt)))
    if cause is EndCause.NODE_FAIL:
        return _requeue(
            replace(job, failure_count=job.failure_count + 1), attempt, cause, WaitReasonCode.NODE_FAIL, 0.0, facts
        )
    steady = attempt.ready and attempt.ready_s is not None and facts.now_s - attempt.ready_s >= STEADY_S
    after = replace(job, charged_restarts=1 if steady else job.charged_restarts + 1)
    if after.charged_restarts == 1 and cause not in _NODE_FAILURES:
        return _restart_in_place(after, attempt, cause, facts)
    pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(after.charged_restarts - 1, _DOUBLINGS_MAX))
    reason = WaitReasonCode.START_FAIL if cause in _NODE_FAILURES else WaitReasonCode.CRASH
    return _requeue(after, attempt, cause, reason, facts.now_s + pause_s, facts)


def _failed(case: AttemptCase, attempt: Attempt, facts: TransitionContext) -> TransitionResult:
    """The job's own failure: restart it while `retry` allows, in place unless a rule requires another node."""
    job, first = case.job, failure_attribution.first_failure(attempt)
    remedy = FailureReaction.RESTART_IN_PLACE if first is None or first.diagnosis is None else first.diagnosis.remedy
    if job.user_retries >= job.spec.retry or not attempt.exits or remedy is FailureReaction.STOP:
        return _end(case, attempt, EndCause.FAILED, JobState.FAILED, _first_failure_code(attempt), facts)
    after = replace(job, user_retries=job.user_retries + 1)
    if remedy is FailureReaction.RESTART_IN_PLACE:
        return _restart_in_place(after, attempt, EndCause.FAILED, facts)
    after = replace(after, avoided_nodes=_avoid(job.avoided_nodes, _bad_nodes(attempt)))
    return _requeue(after, attempt, EndCause.FAILED, WaitReasonCode.NODE_FAIL, 0.0, facts)


def _hung(case: AttemptCase, attempt: Attempt, facts: TransitionContext) -> TransitionResult:
    """A hang: restart once, as the rules require; end the job if it hangs again without progress."""
    job, diagnosis = case.job, facts.diagnose_cause(EndCause.HANG)
    remedy = FailureReaction.RESTART_IN_PLACE if diagnosis is None else diagnosis.remedy
    found, _ = hang_culprits.find_culprits(attempt.exits)
    why = f"{attempt.why}; {hang_culprits.explain_hang(attempt.exits)}"
    attempt = replace(attempt, why=why)
    entry = history_line(case, facts, "hung", hang_culprits.explain_hang(attempt.exits))
    nodes = dict.fromkeys(exit.node_id for exit in found) if len(found) < len(attempt.exits) else {}
    against = tuple(FaultMark(node_id=node_id, weight=_HANG_WEIGHT, why="a rank hung there") for node_id in nodes)
    if job.hang_restarts >= HANGS_BEFORE_STOP or remedy is FailureReaction.STOP:
        ended = replace(attempt, why=f"hung again without progress: {why}" if job.hang_restarts else why)
        outcome = _end(case, ended, EndCause.HANG, JobState.FAILED, _first_failure_code(attempt), facts)
    elif remedy is FailureReaction.RESTART_IN_PLACE:
        after = replace(job, hang_restarts=job.hang_restarts + 1)
        outcome = _charged(replace(case, job=after), attempt, EndCause.HANG, facts)
    else:
        bad = tuple(replace(m, why=m.why or "a rank hung there") if m.node_id in nodes else m for m in attempt.members)
        after = replace(job, hang_restarts=job.hang_restarts + 1)
        outcome = _charged(replace(case, job=after), replace(attempt, members=bad), EndCause.FAULT, facts)
    return replace(outcome, history=(entry, *outcome.history), marks=(*outcome.marks, *against))


def determine_cause(attempt: Attempt, *, completes: bool = True) -> EndCause:
    """The cause from all evidence: requested stops first, then lost nodes, then signals, then exit codes.

    Ranks that ended with exit code 0 before a stop reached them have completed the job; a service's replica never completes: its stop holds.
    """
    finished = len(attempt.exits) == attempt.allocation.world_size and all(
        exit.shell_code == 0 and not exit.requested_by_phalanx for exit in attempt.exits
    )
    if attempt.stop_cause is EndCause.CANCELLED:
        return EndCause.CANCELLED
    to_stop = attempt.stop_cause in _STOPS
    if finished and (completes or not to_stop):
        return EndCause.SUCCEEDED
    lost = any(member.state is MemberState.LOST for member in attempt.members)
    if attempt.stop_cause is not None and to_stop:
        return attempt.stop_cause
    if any(exit.note == TIME_LIMIT_NOTE for exit in attempt.exits):  # enforced by a supervisor without the head
        return EndCause.TIMEOUT
    if lost:
        return EndCause.NODE_FAIL
    if attempt.stop_cause is not None:
        return attempt.stop_cause
    first = failure_attribution.first_failure(attempt)
    if first is None:
        return EndCause.START_FAIL  # a member stopped without task exits: its supervisor lost its tasks
    if first.diagnosis is not None:
        return failure_attribution.cause_of(first.diagnosis, alone=attempt.allocation.world_size == 1)
    return EndCause.CRASH if first.code is None else EndCause.FAILED


def _first_failure_code(attempt: Attempt) -> int:
    """The exit code of the first failure; if no task ran, the code with which a member refused."""
    first = failure_attribution.first_failure(attempt)
    return first.shell_code if first is not None else attempt.exit_code or 1


def _end(
    case: AttemptCase, attempt: Attempt, cause: EndCause, state: JobState, code: int, facts: TransitionContext
) -> TransitionResult:
    ended = _ended(attempt, cause, facts, code)
    job = replace(
        case.job,
        state=state,
        ended_s=facts.now_s,
        exit_code=code,
        detail=attempt.why if state is not JobState.SUCCEEDED else "",
        reason=WaitReasonCode.NEW,
    )
    why = attempt.why or cause.value
    named = code_beside(code, why)
    with_code = f" with {named}" if named else ""
    text = state.value if state is JobState.SUCCEEDED else f"{state.value}{with_code}: {why}"
    entry = history_line(case, facts, state.value, text)
    return TransitionResult(job=job, attempt=ended, commands=gang_commands.clean_up(attempt), history=(entry,))


def _requeue(
    job: Job, attempt: Attempt, cause: EndCause, reason: WaitReasonCode, not_before_s: float, facts: TransitionContext
) -> TransitionResult:
    """End the attempt; the job is PENDING again with `reason`."""
    ended = _ended(attempt, cause, facts, None)
    attained_s = job.attained_s + _saved_running_s(job, attempt)
    after = replace(
        job, state=JobState.PENDING, reason=reason, detail=attempt.why, not_before_s=not_before_s, attained_s=attained_s
    )
    resume = f"; resumes from step {job.checkpoints[-1].step}" if job.checkpoints else ""
    entry = history_line(
        AttemptCase(job=job, attempt=attempt),
        facts,
        "requeued",
        f"attempt {attempt.epoch} ended ({cause.value}): {attempt.why}{resume}",
    )
    return TransitionResult(job=after, attempt=ended, commands=gang_commands.clean_up(attempt), history=(entry,))


def _saved_running_s(job: Job, attempt: Attempt) -> float:
    """Running time of this attempt whose work a checkpoint contains."""
    newest = job.checkpoints[-1] if job.checkpoints else None
    if newest is None or newest.epoch != attempt.epoch or attempt.first_running_s is None:
        return 0.0
    return max(0.0, newest.saved_s - attempt.first_running_s)


def _restart_in_place(job: Job, attempt: Attempt, cause: EndCause, facts: TransitionContext) -> TransitionResult:
    """Start the next generation in place: same nodes, same epoch, new rendezvous."""
    if any(member.state is MemberState.LOST for member in attempt.members):
        return _requeue(job, attempt, EndCause.NODE_FAIL, WaitReasonCode.NODE_FAIL, 0.0, facts)
    if attempt.gave_devices_back:  # others may use them by now
        return _requeue(job, attempt, cause, WaitReasonCode.REQUEUED, 0.0, facts)
    fresh = replace(
        attempt,
        generation=Generation(attempt.generation + 1),
        state=AttemptState.PLACED,
        generation_s=facts.now_s,
        members=tuple(Member(node_id=member.node_id, address=member.address) for member in attempt.members),
        running_s=None,
        exits=(),
        stop_cause=None,
        why="",
        exit_code=None,
        resume_from=None,
        service_port=0,
        ready=False,
        ready_s=None,
        sleep=None,
        causes=(*attempt.causes, cause),
    )
    entry = history_line(
        AttemptCase(job=job, attempt=attempt),
        facts,
        "restart",
        f"restart {fresh.generation} in place ({cause.value}: {attempt.why})",
    )
    return TransitionResult(job=job, attempt=fresh, commands=gang_commands.prepare(job, fresh, facts), history=(entry,))


def _ended(attempt: Attempt, cause: EndCause, facts: TransitionContext, code: int | None) -> Attempt:
    return replace(
        attempt,
        state=AttemptState.ENDED,
        allocation=attempt.full_allocation,  # for its bill: an ended attempt holds nothing
        asleep_s=attempt.sleep_s(facts.now_s),
        sleep=None,
        ended_s=facts.now_s,
        stop_cause=cause,
        causes=(*attempt.causes, cause),
        exit_code=code,
    )


def _bad_nodes(attempt: Attempt) -> tuple[NodeId, ...]:
    return tuple(member.node_id for member in attempt.members if member.why)


def _avoid(known: tuple[NodeId, ...], bad: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys((*(node for node in known if node not in bad), *bad)))[-AVOID_MAX:]
