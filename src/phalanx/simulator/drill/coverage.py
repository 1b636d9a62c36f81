"""The coverage of a drill: state transitions, faults by the state of the hit attempt, and the trace's hash.

Transitions come from the real code: `count_transitions` wraps the attempt machine's table, job transitions come from committed records, and
supervisor members are compared before and after each step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.ids import JobId
from phalanx.core.lifecycle import attempt as machine
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionContext, TransitionResult
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.node.logic.events import CommandReceived, SupervisorEvent
from phalanx.node.logic.local_member import LocalMember

MemberStates = dict[JobId, tuple[Any, ...]]
NO_STATE = "none"  # no member, no attempt


def member_states(members: Iterable[LocalMember]) -> MemberStates:
    """Return the state of each member, without timers and lease."""
    return {
        one.key.job_id: (
            one.phase,
            bool(one.frozen_ns),
            one.key,
            one.ended,
            one.held_exits,
            one.ready,
            one.start,
            one.refusal,
            one.superseded,
            one.forgotten,
            one.stop_requested_ns,
        )
        for one in members
    }


@dataclass(slots=True)
class Coverage:
    """Counts of one seed, or the sum of many.

    Attributes:
        attempts: "state event state" for each use of the attempt machine's table, including unchanged states.
        jobs: "state cause state" of job transitions.
        members: "phase event phase" of supervisors' members; a star marks frozen ones.
        faults: kind -> state of the hit attempt -> count.
    """

    attempts: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    members: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Counter[str]] = field(default_factory=dict)
    _trace: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add_trace_line(self, line: str) -> None:
        """Add a line to the trace."""
        self._trace.update(line.encode())

    @property
    def trace(self) -> str:
        """Hash of all lines so far."""
        return str(self._trace.hexdigest())

    def count_attempt_transition(self, before: str, event: str, after: str) -> None:
        """Count a transition of the attempt machine."""
        self.attempts[f"{before} {event} {after}"] += 1

    def count_job_transition(self, job: Job | None, attempt: Attempt | None, before: Job | None) -> None:
        """Count the transition of a committed job, with the cause of its ended attempt."""
        if job is None or (before is not None and before.state is job.state):
            return
        cause = (
            NO_STATE if attempt is None or attempt.holds_allocation or not attempt.causes else attempt.causes[-1].value
        )
        self.jobs[f"{NO_STATE if before is None else before.state.value} {cause} {job.state.value}"] += 1

    def count_member_transitions(self, before: MemberStates, after: MemberStates, cause: SupervisorEvent | None) -> str:
        """Count the member changes of a supervisor's step; return them as a line."""
        event = event_name(cause)
        changes = []
        for job_id in {**before, **after}:
            was, now = before.get(job_id), after.get(job_id)
            if was == now:
                continue
            edge = f"{_phase(was)} {event} {_phase(now)}"
            if was is not None and now is not None and was[2] != now[2]:
                edge = f"{_phase(was)} {event} next:{_phase(now)}"
            self.members[edge] += 1
            changes.append(f"{job_id} {edge}")
        return "; ".join(changes)

    def count_fault(self, kind: str, states: Iterable[str]) -> None:
        """Count a fault that hit attempts in these states; no states means that nothing ran."""
        counts = self.faults.setdefault(kind, Counter())
        for state in states or (NO_STATE,):
            counts[state] += 1

    def add(self, other: Coverage) -> None:
        """Add another seed's counts."""
        self.attempts.update(other.attempts)
        self.jobs.update(other.jobs)
        self.members.update(other.members)
        for kind, counts in other.faults.items():
            self.faults.setdefault(kind, Counter()).update(counts)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for `--json`."""
        return {
            "attempts": dict(sorted(self.attempts.items())),
            "jobs": dict(sorted(self.jobs.items())),
            "members": dict(sorted(self.members.items())),
            "faults": {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.faults.items())},
        }

    def picklable(self) -> Coverage:
        """Return the counts alone, which can be pickled."""
        return Coverage(attempts=self.attempts, jobs=self.jobs, members=self.members, faults=self.faults, _trace=None)


def event_name(cause: SupervisorEvent | None) -> str:
    """Return the name of a supervisor's event."""
    if cause is None:
        return "time"
    return type(cause.command).__name__ if isinstance(cause, CommandReceived) else type(cause).__name__


def _phase(state: tuple[Any, ...] | None) -> str:
    return NO_STATE if state is None else f"{state[0].value}{'*' if state[1] else ''}"


@contextmanager
def count_transitions(coverage: Coverage) -> Iterator[None]:
    """Wrap the attempt machine's table to count every transition; results are unchanged."""
    table: dict[Any, Any] = machine.TRANSITIONS
    before = dict(table)
    for place, handler in before.items():
        table[place] = _counted(coverage, str(place[0].value), place[1].__name__, handler)
    try:
        yield
    finally:
        table.update(before)


def _counted(coverage: Coverage, state: str, event: str, handler: machine.Handler) -> machine.Handler:
    def asked(case: AttemptCase, attempt: Attempt, happening: Any, facts: TransitionContext) -> TransitionResult:
        outcome = handler(case, attempt, happening, facts)
        after = outcome.attempt
        coverage.count_attempt_transition(state, event, NO_STATE if after is None else after.state.value)
        return outcome

    return asked
