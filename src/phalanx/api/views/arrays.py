"""Views of job arrays: all elements as one job, waiting elements folded in a list, and the state of the parents of a submitted job.

Elements have consecutive submit numbers and the first number names the array, so the store finds a whole array by range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from phalanx.api.auth.authenticator import first_element
from phalanx.api.services import HeadServices
from phalanx.api.views.live import live_job_view
from phalanx.core.access.caller import Caller, may
from phalanx.core.errors import NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.array import format_indices
from phalanx.core.work.dependency import Dependency
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.users import Action
from phalanx.ports.store import JobFilter, Store
from phalanx.wire.api.jobs import JobView

ElementStates = dict[JobId, JobState]
_NAMED_MAX: Final = 8  # unsuccessful elements named in a sentence
# The state of a finished array is the first of these that any element ended in.
_WORST_FIRST: Final = (JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED, JobState.SUCCEEDED)


def element_states(store: Store, first: Job) -> ElementStates:
    """Return the state of each element, in order of the index. Some milliseconds for ten thousand elements."""
    assert first.array is not None  # callers pass first elements only
    return dict(store.states(first.seq, first.array.size))


def whole_array_view(services: HeadServices, caller: Caller, first: Job) -> JobView:
    """Return all elements as one job: running while any element runs, ended when all have, succeeded if all have."""
    assert first.array is not None  # as above
    states = element_states(services.store, first)
    counts = Counter(states.values())
    state = _overall_state(counts)
    failed = [_index(id_) for id_, one in states.items() if one.terminal and one is not JobState.SUCCEEDED]
    waiting = replace(first, state=JobState.PENDING, held=False, epoch=Epoch(0), unmet_dependencies=())
    view = live_job_view(services, caller, waiting, ())
    return msgspec.structs.replace(
        view,
        id=first.array.array_id,
        state=state,
        reason="",
        detail=_summary(counts, failed),
        array_index=None,
        elements=format_indices(_index(id_) for id_ in states),
        states=dict(counts),
        output_dir="",
        unmet=[],
        checkpoints=[],
        started_s=None,
        ended_s=None,
        exit_code=0 if state is JobState.SUCCEEDED else None,
    )


def collapsed_page(services: HeadServices, caller: Caller, wanted: JobFilter) -> tuple[list[JobView], int | None]:
    """Return a page of jobs, newest first, with the waiting elements of an array as one view, and where the next page begins."""
    rows: list[JobView] = []
    arrays: dict[JobId, list[tuple[JobId, JobState]]] = {}
    before = wanted.before_seq
    while len(rows) < wanted.limit:
        page = services.store.jobs(replace(wanted, before_seq=before))
        if not page:
            return rows, None
        for job in page:
            if before is not None and job.seq >= before:
                continue  # an element of an array that is already folded
            before = job.seq
            if job.array is None or job.state is not JobState.PENDING:
                rows.append(live_job_view(services, caller, job))
            else:
                array_id = job.array.array_id
                if array_id not in arrays:
                    arrays[array_id] = services.store.states(int(array_id), job.array.size)
                    waiting = [id_ for id_, state in arrays[array_id] if state is JobState.PENDING]
                    view = live_job_view(services, caller, job)
                    rows.append(msgspec.structs.replace(view, elements=format_indices(map(_index, waiting))))
                before = _after_waiting(job, arrays[array_id])
            if len(rows) >= wanted.limit:
                return rows, before
    return rows, before


def dependency_states(
    store: Store, caller: Caller, asked: Iterable[Dependency]
) -> dict[JobId, Mapping[JobId, JobState]]:
    """Return the states of the jobs that a job depends on, by the id given.

    Raises:
        NotFound: a job does not exist.
        NotPermitted: a job belongs to another user, and the caller may not see other users' jobs.
    """
    found: dict[JobId, Mapping[JobId, JobState]] = {}
    for named in {one.job_id: None for one in asked if one.job_id}:
        job = store.job(named)
        first = job or first_element(store, named)
        if first is None:
            raise NotFound(f"depends_on: job {named} does not exist", hint=Hint(HintCode.LIST_JOBS))
        if first.user != caller.user and not may(caller, Action.VIEW):
            raise NotPermitted(
                f"depends_on: job {named} belongs to another user, and this token may not see jobs",
                hint="ask for a token with that permission",
            )
        found[named] = {named: first.state} if job is not None else element_states(store, first)
    return found


def _overall_state(counts: Mapping[JobState, int]) -> JobState:
    for alive in (JobState.RUNNING, JobState.PENDING):
        if counts.get(alive):
            return alive
    return next(state for state in _WORST_FIRST if counts.get(state))


def _summary(counts: Mapping[JobState, int], failed: list[int]) -> str:
    text = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts.get(state))
    if not failed:
        return text
    more = "" if len(failed) <= _NAMED_MAX else ", ..."
    return f"{text}; unsuccessful: {format_indices(failed[:_NAMED_MAX])}{more}"


def _after_waiting(job: Job, states: list[tuple[JobId, JobState]]) -> int:
    """Return the seq at which a list continues below a waiting element: past all waiting elements before it."""
    assert job.array is not None  # callers pass elements only
    first_seq = int(job.array.array_id)
    place = job.seq - first_seq
    while place > 0 and states[place - 1][1] is JobState.PENDING:
        place -= 1
    return first_seq + place


def _index(element: JobId) -> int:
    return int(element.rpartition("_")[2])
