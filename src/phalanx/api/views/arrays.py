"""Views of job arrays: all elements as one job, waiting and ended elements folded in a list, and the state of the parents of a submitted job.

Elements have consecutive submit numbers and the first number names the array, so the store finds a whole array by range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from phalanx.api.auth.authenticator import first_element
from phalanx.api.services import HeadServices
from phalanx.api.views.live import live_job_view, live_job_views
from phalanx.core.access.caller import Caller, may
from phalanx.core.errors import NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.array import format_indices
from phalanx.core.work.dependency import Dependency
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
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
    waiting = replace(first, state=JobState.PENDING, held=False, epoch=Epoch(0), unmet_dependencies=())
    view = live_job_view(services, caller, waiting, ())
    return msgspec.structs.replace(
        view,
        id=first.array.array_id,
        state=state,
        reason="",
        detail=states_summary(states),
        array_index=None,
        elements=format_indices(_index(id_) for id_ in states),
        states=dict(counts),
        state_elements={
            state: format_indices(_index(id_) for id_, one in states.items() if one is state) for state in counts
        },
        output_dir="",
        unmet=[],
        checkpoints=[],
        started_s=None,
        ended_s=None,
        exit_code=0 if state is JobState.SUCCEEDED else None,
    )


def collapsed_page(services: HeadServices, caller: Caller, wanted: JobFilter) -> tuple[list[JobView], int | None]:
    """Return a page of jobs, newest first, and where the next page begins.

    The elements of an array that wait are one entry, and so are those of each end state. An entry shows its newest element, and has the numbers
    of all if there are several. Running elements stay apart.
    """
    found: list[tuple[Job, str]] = []
    arrays: dict[JobId, _ArrayEntries] = {}
    before: int | None = wanted.before_seq
    full = False
    while not full:
        page = services.store.jobs(replace(wanted, before_seq=before))
        if not page:
            before = None
            break
        for job in page:
            if before is not None and job.seq >= before:
                continue  # an element of an entry that is listed already
            before = job.seq
            if job.array is None:
                found.append((job, ""))
            else:
                array_id = job.array.array_id
                if array_id not in arrays:
                    states = services.store.states(int(array_id), job.array.size)
                    arrays[array_id] = _ArrayEntries(int(array_id), states, wanted)
                entries = arrays[array_id]
                if job.state is JobState.RUNNING or entries.take(job.state):
                    found.append((job, entries.numbers(job.state)))
                before = entries.next_before(job.seq)
            full = len(found) >= wanted.limit
            if full:
                break
    views = live_job_views(services, caller, [job for job, _ in found])
    rows = [
        msgspec.structs.replace(view, elements=numbers) if numbers else view
        for view, (_, numbers) in zip(views, found, strict=True)
    ]
    return rows, before


class _ArrayEntries:
    """The entries of one array in a list: which of its states are listed already, and where the list continues."""

    def __init__(self, first_seq: int, states: Sequence[tuple[JobId, JobState]], wanted: JobFilter) -> None:
        self._first_seq = first_seq
        self._states = states
        self._wanted = wanted.states or frozenset(JobState)
        start = None if wanted.before_seq is None else max(0, wanted.before_seq - first_seq)
        listed = [] if start is None else states[start:]  # on the pages before
        self._taken: set[JobState] = {state for _, state in listed if state is not JobState.RUNNING}

    def take(self, state: JobState) -> bool:
        """Whether the entry of a state is not listed yet; it is from now on."""
        new = state not in self._taken
        self._taken.add(state)
        return new

    def numbers(self, state: JobState) -> str:
        """The numbers of the elements in an entry; empty for a single one, which is listed as itself unless it waits."""
        found = [] if state is JobState.RUNNING else [_index(id_) for id_, one in self._states if one is state]
        return format_indices(found) if len(found) > 1 or state is JobState.PENDING else ""

    def next_before(self, seq: int) -> int:
        """The seq at which the list continues below an element: elements of entries that are listed already are skipped."""
        place = seq - self._first_seq
        while place > 0 and self._is_listed(self._states[place - 1][1]):
            place -= 1
        return self._first_seq + place

    def _is_listed(self, state: JobState) -> bool:
        return state in self._taken or state not in self._wanted


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


def states_summary(states: Mapping[JobId, JobState]) -> str:
    """Return how many elements are in each state, and which have ended unsuccessfully."""
    counts = Counter(states.values())
    failed = [_index(id_) for id_, one in states.items() if one.terminal and one is not JobState.SUCCEEDED]
    text = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts.get(state))
    if not failed:
        return text
    more = "" if len(failed) <= _NAMED_MAX else ", ..."
    return f"{text}; unsuccessful: {format_indices(failed[:_NAMED_MAX])}{more}"


def _index(element: JobId) -> int:
    return int(element.rpartition("_")[2])
