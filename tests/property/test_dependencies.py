"""Dependencies against a judge who looks at everything anew: whatever ends, in whatever company, the same jobs are let go and ended."""

from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis import given

from phalanx.core.ids import JobId
from phalanx.core.lifecycle import dependencies
from phalanx.core.state.relations import JobRelations, UserJobName
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.dependency import (
    ArrayPosition,
    Dependency,
    DependencyKind,
    array_element_id,
)
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from tests.builders import T, facts, job

ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT)
KINDS = tuple(kind for kind in DependencyKind if kind is not DependencyKind.AFTER_CORR)


@dataclass
class Line:
    """One submit: how many elements (0 for a job of its own), its name, and what it waits for among earlier submits."""

    elements: int
    name: str
    waits: list[tuple[DependencyKind, int, bool]]  # kind, which earlier submit, whether one element of it alone


LINES = st.builds(
    Line,
    elements=st.sampled_from((0, 0, 2, 3)),
    name=st.sampled_from(("a", "b")),
    waits=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.booleans()), max_size=3),
)


@dataclass
class Case:
    """The world under test, and beside it every job ever made with what it waits for as asked."""

    world: World = field(default_factory=World)
    all: dict[JobId, Job] = field(default_factory=dict)
    asked: dict[JobId, tuple[Dependency, ...]] = field(default_factory=dict)
    made: list[list[JobId]] = field(default_factory=list)

    def submit(self, line: Line) -> None:
        change = WorldChange(world=self.world)
        asked = tuple(dict.fromkeys(self._asked(line)))
        parents = {
            one.job_id: dependencies.parent_states(self.world, one.job_id, self._brought(one.job_id))
            for one in asked
            if one.job_id
        }
        like = job("x")
        unmet, never = dependencies.unmet_of(self.world, (like.user, line.name), asked, parents)
        seqs = [change.new_job_seq() for _ in range(max(1, line.elements))]
        ids = []
        for index, seq in enumerate(seqs):
            place = (
                ArrayPosition(array_id=JobId(str(seqs[0])), index=index, size=line.elements) if line.elements else None
            )
            id_ = array_element_id(place.array_id, index) if place else JobId(str(seq))
            one = replace(
                like, id=id_, seq=seq, spec=replace(like.spec, name=line.name), array=place, unmet_dependencies=unmet
            )
            change.put(one)
            if never:
                self._apply(change, dependencies.cancel_unmeetable(one, never, facts()))
            ids.append(id_)
            self.asked[id_] = asked
        self.made.append(ids)
        self._note()

    def end(self, ends: dict[JobId, JobState]) -> None:
        """These end in one step, each so; what follows from it is carried out as `Turn.settle_dependents` does."""
        change = WorldChange(world=self.world)
        ended = []
        for id_, state in ends.items():
            one = replace(self.world.jobs[id_], state=state, ended_s=T)
            change.put(replace(self.world.jobs[id_], state=JobState.RUNNING))
            assert self.world.relations == recounted(self.world)
            change.put(one)
            ended.append(one)
        names: dict[UserJobName, None] = {}
        while ended:
            batch, ended = ended, []
            names |= dict.fromkeys((one.user, one.name) for one in batch)
            for outcome in dependencies.settle(self.world, batch, facts()):
                self._apply(change, outcome)
                ended += [outcome.job] if outcome.job.state.terminal else []
        for outcome in dependencies.release_singletons(self.world, names, facts()):
            self._apply(change, outcome)
            assert not outcome.job.state.terminal
        self._note()

    def forget(self) -> None:
        """Ended jobs leave the memory."""
        for id_ in [one.id for one in self.world.jobs.values() if one.state.terminal]:
            del self.world.jobs[id_]

    def judged(self) -> tuple[set[JobId], set[JobId]]:
        """Who must have been let go, and who must have been ended for what he waited for; by all that ever was."""
        states = {id_: one.state for id_, one in self.all.items()}
        held = {id_ for id_ in states if self._verdict(id_, states) is dependencies.ConditionState.MET}
        never = {id_ for id_ in states if self._verdict(id_, states) is dependencies.ConditionState.NEVER}
        return held, never

    def _verdict(self, id_, states):
        verdicts = []
        for one in self.asked[id_]:
            of = [states[other] for other in self._named(one, id_)]
            alive = any(not state.terminal for state in of)
            verdicts.append(
                dependencies.condition_state(one.kind, alive=alive, failed=any(state in ENDS[1:] for state in of))
            )
        if dependencies.ConditionState.NEVER in verdicts:
            return dependencies.ConditionState.NEVER
        return (
            dependencies.ConditionState.OPEN
            if dependencies.ConditionState.OPEN in verdicts
            else dependencies.ConditionState.MET
        )

    def _named(self, one: Dependency, id_: JobId) -> list[JobId]:
        me = self.all[id_]
        if one.kind is DependencyKind.SINGLETON:
            mates = next(ids for ids in self.made if id_ in ids)
            return [
                other.id
                for other in self.all.values()
                if other.name == me.name and other.seq < me.seq and other.id not in mates
            ]
        return [other for other in self.all if other == one.job_id or other.startswith(f"{one.job_id}_")]

    def _asked(self, line: Line):
        for kind, which, one_alone in line.waits:
            if kind is DependencyKind.SINGLETON:
                yield Dependency(kind=kind)
            elif self.made:
                ids = self.made[which % len(self.made)]
                place = self.all[ids[0]].array
                yield Dependency(kind=kind, job_id=ids[-1] if one_alone or place is None else place.array_id)

    def _brought(self, named: JobId):
        """What the store would say."""
        return {
            id_: one.state
            for id_, one in self.all.items()
            if id_ == named or (one.array is not None and one.array.array_id == named)
        }

    def _apply(self, change, outcome) -> None:
        change.put(outcome.job)

    def _note(self) -> None:
        self.all.update(self.world.jobs)


@given(st.lists(LINES, min_size=1, max_size=8), st.data())
def test_settling_by_deltas_is_judging_everything_anew(lines, data):
    case = Case()
    left = list(lines)
    while True:
        alive = [id_ for id_, one in case.world.jobs.items() if not one.state.terminal and not one.unmet_dependencies]
        if left and (not alive or data.draw(st.booleans())):
            case.submit(left.pop(0))
        elif alive:
            ends = st.dictionaries(st.sampled_from(alive), st.sampled_from(ENDS), min_size=1, max_size=6)
            case.end(data.draw(ends))
        else:
            break
        if data.draw(st.booleans()):
            case.forget()
        for id_, one in case.all.items():
            held, never = case.judged()
            waits = one.state is JobState.PENDING and bool(one.unmet_dependencies)
            assert not (waits and id_ in held), f"{id_} waits for nothing any more: {one.unmet_dependencies}"
            assert not (waits and id_ in never), f"{id_} waits for what can never hold: {one.unmet_dependencies}"
            assert one.state is not JobState.PENDING or waits or id_ in held, f"{id_} was let go too early"
        assert case.world.relations == recounted(case.world)
    assert all(one.state.terminal for one in case.all.values()), "nobody waits for ever"


@given(st.lists(LINES, min_size=1, max_size=6), st.data())
def test_undone_ends_leave_the_relations_as_they_were(lines, data):
    case = Case()
    for line in lines:
        case.submit(line)
    was = recounted(case.world)
    jobs = dict(case.world.jobs)
    change = WorldChange(world=case.world)
    for id_ in data.draw(st.lists(st.sampled_from(sorted(jobs)), unique=True)):
        change.put(replace(case.world.jobs[id_], state=JobState.FAILED, unmet_dependencies=()))
    change.undo()
    assert case.world.relations == was
    assert case.world.jobs == jobs


def recounted(world: World) -> JobRelations:
    """The relations as a search through all jobs finds them."""
    fresh = JobRelations()
    for one in world.jobs.values():
        if one.state.terminal:
            continue
        name = (one.user, one.name)
        fresh.named.setdefault(name, {})[one.id] = None
        if one.array is not None:
            fresh.elements.setdefault(one.array.array_id, {})[one.id] = None
            if one.state is JobState.RUNNING:
                fresh.running.setdefault(one.array.array_id, {})[one.id] = None
        for condition in one.unmet_dependencies:
            if condition.kind is DependencyKind.SINGLETON:
                fresh.singletons.setdefault(name, {})[one.id] = None
            else:
                fresh.dependents.setdefault(condition, {})[one.id] = None
    return fresh
