"""Arrays as a caller sees them: all elements as one job, waiting ones folded in a list, and what a submit needs to know of its parents.

Elements carry submit numbers one after the other and the first of these names the array, so that the store finds a whole array by range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from phalanx.api.gate import first_element
from phalanx.api.parts import HeadParts
from phalanx.api.readings import seen
from phalanx.core.access.roles import Caller, may
from phalanx.core.errors import NotFound, NotPermitted
from phalanx.core.ids import JobId
from phalanx.core.work.array import ranges
from phalanx.core.work.dependency import Dependency
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Action
from phalanx.ports.store import JobFilter, Store
from phalanx.wire.api.jobs import JobView

States = dict[JobId, JobState]
_NAMED_MAX: Final = 8  # elements without success that are named in a sentence
# Of a whole array that is over: the first of these that any element ended in.
_WORST_FIRST: Final = (JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED, JobState.SUCCEEDED)


def states_of(store: Store, first: Job) -> States:
    """How each element of the array stands, in order of the index. Some milliseconds for ten thousand."""
    assert first.array is not None  # only first elements are asked for
    return dict(store.states(first.seq, first.array.size))


def whole_array(parts: HeadParts, caller: Caller, first: Job) -> JobView:
    """All elements as one job: it runs while any runs, is over when all are, and succeeded if all did."""
    assert first.array is not None  # as above
    states = states_of(parts.store, first)
    counts = Counter(states.values())
    state = _of_all(counts)
    bad = [_index(id_) for id_, one in states.items() if one.terminal and one is not JobState.SUCCEEDED]
    view = seen(parts, caller, replace(first, state=JobState.PENDING, held=False, epoch=0, unmet=()), ())  # type: ignore[arg-type]  # 0 is an epoch
    return msgspec.structs.replace(
        view,
        id=first.array.array_id,
        state=state,
        reason="",
        detail=_sentence(counts, bad),
        array_index=None,
        elements=ranges(_index(id_) for id_ in states),
        states=dict(counts),
        output_dir="",
        unmet=[],
        checkpoints=[],
        started_s=None,
        ended_s=None,
        exit_code=0 if state is JobState.SUCCEEDED else None,
    )


def folded(parts: HeadParts, caller: Caller, wanted: JobFilter) -> tuple[list[JobView], int | None]:
    """A page of jobs, newest first, in which the waiting elements of an array are one view; and where the next page begins."""
    rows: list[JobView] = []
    arrays: dict[JobId, list[tuple[JobId, JobState]]] = {}
    before = wanted.before_seq
    while len(rows) < wanted.limit:
        page = parts.store.jobs(replace(wanted, before_seq=before))
        if not page:
            return rows, None
        for job in page:
            if before is not None and job.seq >= before:
                continue  # of an array that is folded already
            before = job.seq
            if job.array is None or job.state is not JobState.PENDING:
                rows.append(seen(parts, caller, job))
            else:
                array_id = job.array.array_id
                if array_id not in arrays:
                    arrays[array_id] = parts.store.states(int(array_id), job.array.size)
                    waiting = [id_ for id_, state in arrays[array_id] if state is JobState.PENDING]
                    view = seen(parts, caller, job)
                    rows.append(msgspec.structs.replace(view, elements=ranges(map(_index, waiting))))
                before = _after_waiting(job, arrays[array_id])
            if len(rows) >= wanted.limit:
                return rows, before
    return rows, before


def parents_of(store: Store, caller: Caller, asked: Iterable[Dependency]) -> dict[JobId, Mapping[JobId, JobState]]:
    """What the store knows of the jobs that are depended on, by the name used.

    Raises:
        NotFound: there is none of the name.
        NotPermitted: it is another's, and the caller may not see others' jobs.
    """
    found: dict[JobId, Mapping[JobId, JobState]] = {}
    for named in {one.job_id: None for one in asked if one.job_id}:
        job = store.job(named)
        first = job or first_element(store, named)
        if first is None:
            raise NotFound(f"depends_on: there is no job {named}", hint="phalanx ps -a lists them")
        if first.user != caller.user and not may(caller, Action.SEE):
            raise NotPermitted(
                f"depends_on: job {named} is another's, and this token may not see jobs",
                hint="ask for a token that may",
            )
        found[named] = {named: first.state} if job is not None else states_of(store, first)
    return found


def _of_all(counts: Mapping[JobState, int]) -> JobState:
    for alive in (JobState.RUNNING, JobState.PENDING):
        if counts.get(alive):
            return alive
    return next(state for state in _WORST_FIRST if counts.get(state))


def _sentence(counts: Mapping[JobState, int], bad: list[int]) -> str:
    told = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts.get(state))
    if not bad:
        return told
    more = "" if len(bad) <= _NAMED_MAX else ", ..."
    return f"{told}; without success: {ranges(bad[:_NAMED_MAX])}{more}"


def _after_waiting(job: Job, states: list[tuple[JobId, JobState]]) -> int:
    """Where a list goes on below a waiting element: past all that wait before it, down to one that does not, or past the array."""
    assert job.array is not None  # asked of elements alone
    first_seq = int(job.array.array_id)
    place = job.seq - first_seq
    while place > 0 and states[place - 1][1] is JobState.PENDING:
        place -= 1
    return first_seq + place


def _index(element: JobId) -> int:
    return int(element.rpartition("_")[2])
