"""Failure attribution: which task's failure ended a gang, and what follows from its diagnosis. Applies to attempts whose members all stopped.

When one task fails, its peers fail too: they wait in a collective until their connections are reset. So the order of exits alone is
misleading; failures that the rules classify as echoes (follow-on failures) come last.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.core.fleet.fitness import RECOVERY, NodeFault
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.transitions import FaultMark
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.attempt import Attempt, EndCause, TaskExit
from phalanx.core.work.failure import (
    FailureAttribution,
    FailureDiagnosis,
    FailureReaction,
    RestartBudget,
)

_MOVES = (FailureReaction.RESTART_ELSEWHERE, FailureReaction.DRAIN)


def first_failure(attempt: Attempt) -> TaskExit | None:
    """The failure that explains the others: node and device failures first, echoes last; signals before exit codes; then the earliest."""
    failures = [exit for exit in attempt.exits if exit.failed]
    return min(failures, key=_order, default=None)


def _order(exit: TaskExit) -> tuple[int, bool, float, int]:
    diagnosis, place = exit.diagnosis, 1
    if diagnosis is not None and diagnosis.attribution is FailureAttribution.FOLLOW_ON:
        place = 2
    elif diagnosis is not None and diagnosis.attribution is not FailureAttribution.USER and diagnosis.remedy in _MOVES:
        place = 0
    return (place, exit.code is not None, exit.ended_s, exit.rank)


def cause_of(diagnosis: FailureDiagnosis, *, alone: bool = False) -> EndCause:
    """The cause with which the attempt machine applies the diagnosis. `alone`: a task without peers cannot have a follow-on failure."""
    if alone and diagnosis.attribution is FailureAttribution.FOLLOW_ON:
        return EndCause.FAILED
    if diagnosis.charge is RestartBudget.RETRY or diagnosis.remedy is FailureReaction.STOP:
        return EndCause.FAILED
    return EndCause.FAULT if diagnosis.remedy in _MOVES else EndCause.CRASH


def with_explanation(attempt: Attempt, cause: EndCause) -> Attempt:
    """The attempt with its first failure's diagnosis as the reason it ended, and with the reason on the members of faulty nodes."""
    if cause not in (EndCause.FAILED, EndCause.CRASH, EndCause.FAULT):
        return attempt
    first = first_failure(attempt)
    if first is None or first.diagnosis is None:
        return attempt
    bad = {exit.node_id: exit.diagnosis.description for exit in _node_failures(attempt) if exit.diagnosis is not None}
    members = tuple(
        replace(member, why=member.why or bad[member.node_id]) if member.node_id in bad else member
        for member in attempt.members
    )
    return replace(attempt, why=f"rank {first.rank} on {first.node_id}: {describe_exit(first)}", members=members)


def describe_exit(exit: TaskExit) -> str:
    """`exit code 1: ValueError: bad shape (python-error: user)`."""
    how = f"signal {exit.signal}" if exit.code is None else f"exit code {exit.code}"
    if exit.note:
        how = f"{how} ({exit.note})"
    diagnosis = exit.diagnosis
    if diagnosis is None or not diagnosis.description:
        return how
    return f"{how}: {diagnosis.description} ({diagnosis.rule}: {diagnosis.attribution.value})"


def next_step(attempt: Attempt, *, goes_on: bool, budget: str) -> str:
    """The next step, for the history: `the gang restarts in place; counted as retry 1 of 2`."""
    first = first_failure(attempt)
    diagnosis = None if first is None else first.diagnosis
    if first is None or diagnosis is None:
        return ""
    if not goes_on:
        stopped = f"by rule {diagnosis.rule}" if diagnosis.remedy is FailureReaction.STOP else f"{budget} used"
        return f"the job ends: {stopped}"
    where = "the gang is placed again elsewhere" if diagnosis.remedy in _MOVES else "the gang restarts in place"
    drained = f"; {first.node_id} is drained" if diagnosis.remedy is FailureReaction.DRAIN else ""
    return f"{where}{drained}; counted as {budget}"


def node_faults(attempt: Attempt) -> tuple[NodeFault, ...]:
    """The nodes to drain, each once, with the evidence."""
    found: dict[NodeId, NodeFault] = {}
    for exit in _node_failures(attempt):
        diagnosis = exit.diagnosis
        if diagnosis is not None and diagnosis.remedy is FailureReaction.DRAIN and exit.node_id not in found:
            why = f"{diagnosis.description} (job {attempt.job_id}, rule {diagnosis.rule})"
            found[exit.node_id] = NodeFault(node_id=exit.node_id, why=why, cordon=True, by=RECOVERY, drain=True)
    return tuple(found.values())


def fault_marks(attempt: Attempt) -> tuple[FaultMark, ...]:
    """Marks against nodes, at most one for each: the first failure's node, and nodes whose device or disk failed."""
    first = first_failure(attempt)
    counted: Iterable[TaskExit] = (*([] if first is None else [first]), *_node_failures(attempt))
    found: dict[NodeId, FaultMark] = {}
    for exit in counted:
        diagnosis = exit.diagnosis
        if diagnosis is not None and diagnosis.weight > 0 and exit.node_id not in found:
            found[exit.node_id] = FaultMark(node_id=exit.node_id, weight=diagnosis.weight, why=diagnosis.description)
    return tuple(found.values())


def _node_failures(attempt: Attempt) -> list[TaskExit]:
    """Failures that the rules attribute to their node, by rank."""
    return sorted(
        (
            exit
            for exit in attempt.exits
            if exit.failed
            and exit.diagnosis is not None
            and exit.diagnosis.remedy in _MOVES
            and exit.diagnosis.attribution is not FailureAttribution.PREEMPTED
        ),
        key=lambda exit: exit.rank,
    )
