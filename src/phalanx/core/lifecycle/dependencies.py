"""What jobs wait for, judged when they are submitted and whenever one of those they wait for ends. Slurm's words and meaning.

`Job.unmet` holds what does not hold yet. A condition that comes true is taken out; the scheduler starts a job only when none is left.
One that can never hold any more ends the job CANCELLED, and with it, in the same step, those that waited for this one.

An array that is depended on counts as one: it succeeded when all its elements did, it is over when the last one is. `afternotok` on an
array of which an element has already failed only waits for the rest, and is kept as `afterany` from then on: so nobody has to remember
how elements ended that left the memory long ago.

There can be no cycle: a condition names a job that exists, is set at the submit, and is never changed afterwards but by falling away. So
every chain leads to earlier jobs only. `singleton` too looks at earlier jobs only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from phalanx.core.errors import NotFound, TryLater
from phalanx.core.ids import JobId
from phalanx.core.lifecycle.facts import Case, Facts, Outcome, line
from phalanx.core.state.relations import Name
from phalanx.core.state.world import World
from phalanx.core.work.dependency import Dependency, DependencyKind, sentence
from phalanx.core.work.job import Job, JobState, Reason

NEVER_RAN: Final = 143  # exit code of a job that was ended before it ran; what a cancelled one has
_OVER: Final = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.TIMEOUT: "was over its time limit",
}
_OF_ONE: Final = (
    DependencyKind.AFTER_OK,
    DependencyKind.AFTER_ANY,
    DependencyKind.AFTER_NOT_OK,
    DependencyKind.AFTER_CORR,
)
_OF_FAILURE: Final = (DependencyKind.AFTER_OK, DependencyKind.AFTER_NOT_OK)

States = Mapping[JobId, JobState]


class Verdict(enum.Enum):
    """How a condition stands."""

    HOLDS = "holds"
    OPEN = "open"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class _Look:
    """A condition to be judged anew: whether any job it names is alive, and one that ended, in words."""

    condition: Dependency
    alive: bool
    failed: bool
    told: str


def verdict(kind: DependencyKind, *, alive: bool, failed: bool) -> Verdict:
    """How a condition stands, when any of the jobs it names is `alive`, and any has `failed`: is over without success."""
    match kind:
        case DependencyKind.AFTER_OK | DependencyKind.AFTER_CORR:
            return Verdict.NEVER if failed else Verdict.OPEN if alive else Verdict.HOLDS
        case DependencyKind.AFTER_ANY | DependencyKind.SINGLETON:
            return Verdict.OPEN if alive else Verdict.HOLDS
        case DependencyKind.AFTER_NOT_OK:
            return Verdict.OPEN if alive else Verdict.HOLDS if failed else Verdict.NEVER
        case _:
            assert_never(kind)


# ---- at the submit --------------------------------------------------------------------------------------------------


def parent_states(world: World, named: JobId, brought: States | None) -> States:
    """How the job or the elements of the array of this name stand, by id.

    Args:
        world: where live jobs are, and some that ended.
        named: as the dependency names it.
        brought: what the store said of them when the request came; older than the world where both know a job.

    Raises:
        NotFound: there is no such job.
        TryLater: one ended since the store was read, and has left the memory as well.

    Cost: linear in the elements of an array; where nothing was brought, in the jobs in memory.
    """
    known = world.jobs.get(named)
    if known is not None:
        return {named: known.state}
    if not brought:
        brought = {
            job.id: job.state for job in world.jobs.values() if job.array is not None and job.array.array_id == named
        }
    if not brought:
        raise NotFound(f"no job {named} to depend on", hint="phalanx ps -a lists them")
    states: dict[JobId, JobState] = {}
    for job_id, state in brought.items():
        now = world.jobs.get(job_id)
        if now is None and not state.terminal:
            raise TryLater(f"job {job_id} has just ended; how is not known here any more", hint="submit once more")
        states[job_id] = state if now is None else now.state
    return states


def unmet_of(
    world: World, name: Name, asked: Sequence[Dependency], parents: Mapping[JobId, States]
) -> tuple[tuple[Dependency, ...], str]:
    """What of the conditions asked for does not hold yet, and, where one can never hold, why; the job must not be put yet.

    Args:
        world: without the job.
        name: the job's user and name.
        asked: element by element for `aftercorr`.
        parents: by the name used.
    """
    unmet: dict[Dependency, None] = {}
    for one in asked:
        if one.kind is DependencyKind.SINGLETON:
            look = _Look(one, alive=name in world.relations.named, failed=False, told="")
        else:
            look = _look(one, parents[one.job_id])
        match verdict(one.kind, alive=look.alive, failed=look.failed):
            case Verdict.NEVER:
                return tuple(unmet), _never(look)
            case Verdict.OPEN:
                unmet[_left(look)] = None
            case Verdict.HOLDS:
                pass
    return tuple(unmet), ""


def first_reason(*, held: bool, unmet: Sequence[Dependency], begin_s: float | None, now_s: float) -> tuple[Reason, str]:
    """Why a job waits that the scheduler has not judged, as a word and a sentence."""
    if held:
        return Reason.HELD, ""
    if unmet:
        return Reason.DEPENDENCY, sentence(unmet)
    return (Reason.BEGIN_TIME if begin_s is not None and begin_s > now_s else Reason.NEW), ""


def _look(condition: Dependency, states: States) -> _Look:
    alive = any(not state.terminal for state in states.values())
    failed = next(((id_, state) for id_, state in states.items() if _failed(state)), None)
    job_id, state = failed or next(iter(states.items()))
    return _Look(condition, alive=alive, failed=failed is not None, told=_told(job_id, state))


# ---- when jobs end --------------------------------------------------------------------------------------------------


def settle(world: World, ended: Sequence[Job], facts: Facts) -> Iterator[Outcome]:
    """What the ends of jobs mean for those that waited for them by their numbers. Each outcome must be applied before the next is asked for.

    Jobs that end by these outcomes are for another call. Cost: linear in the jobs that are let go or ended.

    Args:
        world: in which the jobs have ended.
        ended: all jobs that ended since the last call, so that an array whose last elements end together is judged by all of them.
        facts: the surroundings.
    """
    relations = world.relations
    # All judged before any outcome is applied, so that who is alive is as of the same moment as who has ended.
    for look in _looks(world, ended):
        for job_id in tuple(relations.dependents.get(look.condition, ())):
            yield _after(world.jobs[job_id], look, facts)


def let_singletons_go(world: World, names: Iterable[Name], facts: Facts) -> Iterator[Outcome]:
    """What it means for waiting singletons that live jobs gave up these names: for once when no more jobs end. None ends by it.

    Cost: for each name with waiting singletons linear in its live jobs, so a chain that ends job by job must not ask for each.
    """
    for name in names:
        if name in world.relations.singletons:
            for job in _free_singletons(world, name):
                yield without(
                    job, Dependency(kind=DependencyKind.SINGLETON), "no earlier job of its name is left", facts
                )


def _looks(world: World, ended: Sequence[Job]) -> list[_Look]:
    relations = world.relations
    looks: list[_Look] = []
    of_array: dict[JobId, Job] = {}
    for job in ended:
        told, failed = _told(job.id, job.state), _failed(job.state)
        looks += [
            _Look(Dependency(kind=kind, job_id=job.id), alive=False, failed=failed, told=told) for kind in _OF_ONE
        ]
        if job.array is not None and (failed or job.array.array_id not in of_array):
            of_array[job.array.array_id] = job
    for array_id, job in of_array.items():
        alive, failed = array_id in relations.elements, _failed(job.state)
        if alive and not failed:
            continue  # one more has succeeded, and others go on: nothing new for anybody
        looks += [
            _Look(Dependency(kind=kind, job_id=array_id), alive=alive, failed=failed, told=_told(job.id, job.state))
            for kind in (_OF_FAILURE if alive else _OF_ONE)
        ]
    return [look for look in looks if look.condition in relations.dependents]


def _after(job: Job, look: _Look, facts: Facts) -> Outcome:
    match verdict(look.condition.kind, alive=look.alive, failed=look.failed):
        case Verdict.NEVER:
            return cancelled(job, _never(look), facts)
        case Verdict.HOLDS:
            return without(job, look.condition, look.told, facts)
        case Verdict.OPEN:
            unmet = tuple(dict.fromkeys(_left(look) if one == look.condition else one for one in job.unmet))
            return Outcome(job=replace(job, unmet=unmet, detail=_detail(job, unmet)), attempt=None)


def cancelled(job: Job, why: str, facts: Facts) -> Outcome:
    """The end of a job that waits for what can never hold."""
    told = line(Case(job=job), facts, "cancelled", f"cancelled before it ran: {why}")
    after = replace(job, state=JobState.CANCELLED, ended_s=facts.now_s, exit_code=NEVER_RAN, detail=why, held=False)
    return Outcome(job=after, attempt=None, lines=(told,))


def without(job: Job, condition: Dependency, told: str, facts: Facts) -> Outcome:
    """The job after a condition came true; the last one lets it go."""
    unmet = tuple(one for one in job.unmet if one != condition)
    reason, detail = first_reason(held=job.held, unmet=unmet, begin_s=job.spec.begin_s, now_s=facts.now_s)
    after = replace(job, unmet=unmet, reason=reason, detail=detail)
    lines = () if unmet else (line(Case(job=job), facts, "dependencies_met", f"its dependencies hold: {told}"),)
    return Outcome(job=after, attempt=None, lines=lines)


def _free_singletons(world: World, name: Name) -> list[Job]:
    """Waiting singletons that no earlier live job of their name keeps any longer. Elements of one array do not wait for each other."""
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
    return sorted(free, key=lambda job: job.seq)  # a plan must not hang on the order of an index


def _group(job: Job) -> JobId:
    return job.id if job.array is None else job.array.array_id


def _left(look: _Look) -> Dependency:
    """What is still to be waited for of an open condition."""
    if look.failed and look.condition.kind is DependencyKind.AFTER_NOT_OK:
        return replace(look.condition, kind=DependencyKind.AFTER_ANY)
    return look.condition


def _detail(job: Job, unmet: Sequence[Dependency]) -> str:
    return sentence(unmet) if job.reason is Reason.DEPENDENCY else job.detail


def _failed(state: JobState) -> bool:
    return state.terminal and state is not JobState.SUCCEEDED


def _told(job_id: JobId, state: JobState) -> str:
    return f"job {job_id} {_OVER.get(state, 'is not over')}"


def _never(look: _Look) -> str:
    return f"{look.told}, so that {look.condition} can never hold"
