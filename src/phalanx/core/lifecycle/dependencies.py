"""Dependencies between jobs, with Slurm's names and semantics; evaluated at submit and whenever a job that others depend on ends.

`Job.unmet` contains the conditions that are not met yet. A met condition is removed; the scheduler starts a job only when none is left.
A condition that can never be met cancels the job, and in the same step the jobs that depend on it.

An array counts as one job: it has succeeded when all its elements have, and ended when the last one has. An `afternotok` on an array with
a failed element only waits for the other elements, and is stored as `afterany` from then on, so that the states of elements that were
dropped from memory are not needed.

Cycles are impossible: a condition names an existing job, is set at submit, and can later only be removed. So every chain leads to earlier
jobs only, and so does `singleton`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from phalanx.core.errors import NotFound, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.lifecycle.transitions import (
    AttemptCase,
    TransitionContext,
    TransitionResult,
    history_line,
)
from phalanx.core.state.relations import UserJobName
from phalanx.core.state.world import World
from phalanx.core.work.dependency import Dependency, DependencyKind, describe_dependencies
from phalanx.core.work.job import Job, dependency_reason
from phalanx.core.work.states import JobState, WaitReasonCode

NEVER_RAN: Final = 143  # exit code of a job that ended before it ran; the same as for a cancelled job
_OVER: Final = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.TIMEOUT: "exceeded its time limit",
}
_OF_ONE: Final = (
    DependencyKind.AFTER_OK,
    DependencyKind.AFTER_ANY,
    DependencyKind.AFTER_NOT_OK,
    DependencyKind.AFTER_CORR,
    DependencyKind.DATA,
)
_OF_FAILURE: Final = (DependencyKind.AFTER_OK, DependencyKind.AFTER_NOT_OK)

JobStates = Mapping[JobId, JobState]


class ConditionState(enum.Enum):
    """State of a condition."""

    MET = "holds"
    OPEN = "open"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class _Check:
    """Inputs for evaluating a condition. `text`: how one of the named jobs ended."""

    condition: Dependency
    alive: bool
    failed: bool
    text: str


def condition_state(kind: DependencyKind, *, alive: bool, failed: bool) -> ConditionState:
    """Evaluate a condition. `alive`: any of the jobs it names is live; `failed`: any ended without success."""
    match kind:
        case DependencyKind.AFTER_OK | DependencyKind.AFTER_CORR:
            return ConditionState.NEVER if failed else ConditionState.OPEN if alive else ConditionState.MET
        case DependencyKind.AFTER_ANY | DependencyKind.SINGLETON | DependencyKind.DATA:
            return ConditionState.OPEN if alive else ConditionState.MET
        case DependencyKind.AFTER_NOT_OK:
            return ConditionState.OPEN if alive else ConditionState.MET if failed else ConditionState.NEVER
        case _:
            assert_never(kind)


# ---- at the submit --------------------------------------------------------------------------------------------------


def parent_states(world: World, named: JobId, stored: JobStates | None) -> JobStates:
    """States of a job, or of the elements of an array, by id.

    Args:
        world: contains live jobs, and some ended ones.
        named: the id in the dependency.
        stored: states that the API read from the store for this request; the world is newer for jobs that both contain.

    Raises:
        NotFound: no such job.
        TryLater: a job ended after the store was read, and was dropped from memory already.

    Cost: linear in the elements of an array; without `stored`, in the jobs in memory.
    """
    known = world.jobs.get(named)
    if known is not None:
        return {named: known.state}
    if not stored:
        stored = {
            job.id: job.state for job in world.jobs.values() if job.array is not None and job.array.array_id == named
        }
    if not stored:
        raise NotFound(f"no job {named} to depend on", hint=Hint(HintCode.LIST_JOBS))
    states: dict[JobId, JobState] = {}
    for job_id, state in stored.items():
        now = world.jobs.get(job_id)
        if now is None and not state.terminal:
            raise TryLater(f"job {job_id} has just ended; its final state must be read again", hint="submit again")
        states[job_id] = state if now is None else now.state
    return states


def unmet_of(
    world: World, name: UserJobName, asked: Sequence[Dependency], parents: Mapping[JobId, JobStates]
) -> tuple[tuple[Dependency, ...], str]:
    """The conditions that are not met yet, and why if one can never be met. Call it before the job is put.

    Args:
        world: without the job.
        name: the job's user and name.
        asked: element by element for `aftercorr`.
        parents: by the name used.
    """
    unmet: dict[Dependency, None] = {}
    for one in asked:
        if one.kind is DependencyKind.SINGLETON:
            check = _Check(one, alive=name in world.relations.named, failed=False, text="")
        else:
            check = _check_of(one, parents[one.job_id])
        match condition_state(one.kind, alive=check.alive, failed=check.failed):
            case ConditionState.NEVER:
                return tuple(unmet), _never(check)
            case ConditionState.OPEN:
                unmet[_remaining(check)] = None
            case ConditionState.MET:
                pass
    return tuple(unmet), ""


def first_reason(
    *, held: bool, parked: bool = False, unmet: Sequence[Dependency], begin_s: float | None, now_s: float
) -> tuple[WaitReasonCode, str]:
    """Why a job waits that the scheduler has not considered yet, as a reason and a sentence."""
    if held:
        return WaitReasonCode.PARKED if parked else WaitReasonCode.HELD, ""
    if unmet:
        return dependency_reason(unmet), describe_dependencies(unmet)
    return (WaitReasonCode.BEGIN_TIME if begin_s is not None and begin_s > now_s else WaitReasonCode.NEW), ""


def _check_of(condition: Dependency, states: JobStates) -> _Check:
    alive = any(not state.terminal for state in states.values())
    failed = next(((id_, state) for id_, state in states.items() if _failed(state)), None)
    job_id, state = failed or next(iter(states.items()))
    return _Check(condition, alive=alive, failed=failed is not None, text=_sentence(job_id, state))


# ---- when jobs end --------------------------------------------------------------------------------------------------


def settle(world: World, ended: Sequence[Job], facts: TransitionContext) -> Iterator[TransitionResult]:
    """Outcomes for the jobs that depend on ended ones by id. Apply each outcome before requesting the next.

    Jobs that end through these outcomes need another call. Cost: linear in the jobs that are released or cancelled.

    Args:
        world: in which the jobs have ended.
        ended: all jobs that ended since the last call, so that elements of an array that end together are evaluated together.
        facts: inputs of transitions.
    """
    relations = world.relations
    # All conditions are evaluated before any outcome is applied, so that all see the same state.
    for check in _checks(world, ended):
        for job_id in tuple(relations.dependents.get(check.condition, ())):
            yield _dependent_outcome(world.jobs[job_id], check, facts)


def release_singletons(
    world: World, names: Iterable[UserJobName], facts: TransitionContext
) -> Iterator[TransitionResult]:
    """Outcomes that release waiting singletons after live jobs gave up these names. Call it once, when no more jobs end.

    Cost: for each name with waiting singletons, linear in its live jobs; so a chain of ending jobs must not call it for each.
    """
    for name in names:
        if name in world.relations.singletons:
            for job in _free_singletons(world, name):
                yield with_condition_met(
                    job, Dependency(kind=DependencyKind.SINGLETON), "no earlier job of its name is left", facts
                )


def _checks(world: World, ended: Sequence[Job]) -> list[_Check]:
    relations = world.relations
    checks: list[_Check] = []
    of_array: dict[JobId, Job] = {}
    for job in ended:
        text, failed = _sentence(job.id, job.state), _failed(job.state)
        checks += [
            _Check(Dependency(kind=kind, job_id=job.id), alive=False, failed=failed, text=text) for kind in _OF_ONE
        ]
        if job.array is not None and (failed or job.array.array_id not in of_array):
            of_array[job.array.array_id] = job
    for array_id, job in of_array.items():
        alive, failed = array_id in relations.elements, _failed(job.state)
        if alive and not failed:
            continue  # one more element succeeded and others still run: no condition changes
        checks += [
            _Check(
                Dependency(kind=kind, job_id=array_id), alive=alive, failed=failed, text=_sentence(job.id, job.state)
            )
            for kind in (_OF_FAILURE if alive else _OF_ONE)
        ]
    return [check for check in checks if check.condition in relations.dependents]


def _dependent_outcome(job: Job, check: _Check, facts: TransitionContext) -> TransitionResult:
    match condition_state(check.condition.kind, alive=check.alive, failed=check.failed):
        case ConditionState.NEVER:
            return cancel_unmeetable(job, _never(check), facts)
        case ConditionState.MET:
            return with_condition_met(job, check.condition, check.text, facts)
        case ConditionState.OPEN:
            unmet = tuple(
                dict.fromkeys(_remaining(check) if one == check.condition else one for one in job.unmet_dependencies)
            )
            return TransitionResult(
                job=replace(job, unmet_dependencies=unmet, detail=_detail(job, unmet)), attempt=None
            )


def cancel_unmeetable(job: Job, why: str, facts: TransitionContext) -> TransitionResult:
    """Cancel a job with a condition that can never be met."""
    entry = history_line(AttemptCase(job=job), facts, "cancelled", f"cancelled before it ran: {why}")
    after = replace(
        job,
        state=JobState.CANCELLED,
        ended_s=facts.now_s,
        exit_code=NEVER_RAN,
        detail=why,
        held=False,
        parked_s=None,
    )
    return TransitionResult(job=after, attempt=None, history=(entry,))


def with_condition_met(job: Job, condition: Dependency, text: str, facts: TransitionContext) -> TransitionResult:
    """Remove a met condition from the job; after the last one, the job may start."""
    unmet = tuple(one for one in job.unmet_dependencies if one != condition)
    reason, detail = first_reason(
        held=job.held, parked=job.parked_s is not None, unmet=unmet, begin_s=job.spec.begin_s, now_s=facts.now_s
    )
    after = replace(job, unmet_dependencies=unmet, reason=reason, detail=detail)
    lines = (
        ()
        if unmet
        else (history_line(AttemptCase(job=job), facts, "dependencies_met", f"its dependencies are met: {text}"),)
    )
    return TransitionResult(job=after, attempt=None, history=lines)


def _free_singletons(world: World, name: UserJobName) -> list[Job]:
    """Waiting singletons without an earlier live job of their name. Elements of one array do not wait for each other."""
    earliest: dict[JobId, int] = {}  # by array, or job
    for job_id in world.relations.named.get(name, ()):
        job = world.jobs[job_id]
        group = _group(job)
        earliest[group] = min(job.seq, earliest.get(group, job.seq))
    groups = sorted(earliest, key=lambda group: earliest[group])[:2]
    free: list[Job] = []
    for job_id in world.relations.singletons[name]:
        job = world.jobs[job_id]
        if all(earliest[group] > job.seq for group in groups if group != _group(job)):
            free.append(job)
    return sorted(free, key=lambda job: job.seq)  # plans must not depend on the order of an index


def _group(job: Job) -> JobId:
    return job.id if job.array is None else job.array.array_id


def _remaining(check: _Check) -> Dependency:
    """The condition that remains of an open one."""
    if check.failed and check.condition.kind is DependencyKind.AFTER_NOT_OK:
        return replace(check.condition, kind=DependencyKind.AFTER_ANY)
    return check.condition


def _detail(job: Job, unmet: Sequence[Dependency]) -> str:
    waits = job.reason in (WaitReasonCode.DEPENDENCY, WaitReasonCode.STAGING)
    return describe_dependencies(unmet) if waits else job.detail


def _failed(state: JobState) -> bool:
    return state.terminal and state is not JobState.SUCCEEDED


def _sentence(job_id: JobId, state: JobState) -> str:
    return f"job {job_id} {_OVER.get(state, 'has not ended')}"


def _never(check: _Check) -> str:
    return f"{check.text}, so {check.condition} can never be met"
