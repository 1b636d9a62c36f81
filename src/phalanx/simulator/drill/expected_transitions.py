"""The state transitions that a drill should cover: those of the attempt machine, of jobs, and of a supervisor's members.

The attempt machine's (state, event) pairs come from the code, so a new pair counts as missing until a drill covers it. The target states
were recorded from drills in `recorded_transitions`. Covered but unlisted transitions are reported, as well as listed but uncovered ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from phalanx.core.lifecycle.attempt import TRANSITIONS
from phalanx.core.work.states import AttemptState
from phalanx.simulator.drill import recorded_transitions
from phalanx.simulator.drill.coverage import Coverage
from phalanx.simulator.drill.faults import FAULT_KINDS

_STATES: Final = (AttemptState.PLACED, AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)


UNREACHABLE_PAIRS: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "starting ReadinessChanged",
            "running ReadinessChanged",
            "running SleepRequested",
            "running SleepHookEnded",
            "running WakeRequested",
            "running WakeDelayed",
            "running DevicesRegained",
        ),
        "drills without --services have none",
    ),
    **dict.fromkeys(
        ("placed AttemptQueued", "starting AttemptReclaimed", "running AttemptReclaimed", "stopping AttemptReclaimed"),
        "the clusters of drills have no queue of their own",
    ),
    "placed MemberFrozen": "a supervisor reports a freeze only for ranks that start or run, which this generation does only after the barrier",
}
"""Pairs that no drill covers, and why; the table has them to handle reports of older releases and unusual timing safely."""
RARE_PAIRS: Final = frozenset(
    {
        "placed CheckpointFailed",
        "placed CheckpointSaved",
        "starting CheckpointFailed",
        "stopping AttemptWithdrawn",
        "starting MemberFrozen",
    }
)
"""Pairs that need a late report within a few milliseconds; a short campaign may miss them."""


def table_pairs() -> set[str]:
    """Return every (state, event) pair of the attempt machine's table."""
    return {f"{state.value} {event.__name__}" for state, event in TRANSITIONS}


def fault_pairs() -> set[str]:
    """Return every kind of fault with every attempt state that it can hit."""
    return {f"{kind} {state.value}" for kind, states in FAULT_KINDS.items() for state in states}


def uncovered(coverage: Coverage, *, rare: bool = True) -> dict[str, tuple[int, list[str]]]:
    """Return for each table the number of covered entries and the names of uncovered ones; `rare` includes rare entries."""

    def _rare(edges: frozenset[str]) -> frozenset[str]:
        return edges if rare else frozenset()

    faults = {f"{kind} {state}" for kind, counts in coverage.faults.items() for state in counts}
    asked = {" ".join(edge.split()[:2]) for edge in coverage.attempts}
    wanted: dict[str, tuple[set[str] | frozenset[str], set[str]]] = {
        "states and events of attempts": (
            table_pairs() - UNREACHABLE_PAIRS.keys() - (set() if rare else RARE_PAIRS),
            asked,
        ),
        "edges of attempts": (
            recorded_transitions.ATTEMPT_TRANSITIONS | _rare(recorded_transitions.RARE_ATTEMPT_TRANSITIONS),
            set(coverage.attempts),
        ),
        "edges of jobs": (
            recorded_transitions.JOB_TRANSITIONS | _rare(recorded_transitions.RARE_JOB_TRANSITIONS),
            set(coverage.jobs),
        ),
        "edges of members": (
            recorded_transitions.MEMBER_TRANSITIONS | _rare(recorded_transitions.RARE_MEMBER_TRANSITIONS),
            set(coverage.members),
        ),
        "faults in states of attempts": (fault_pairs(), faults),
    }
    return {name: (len(want & found), sorted(want - found)) for name, (want, found) in wanted.items()}


def unlisted_transitions(coverage: Coverage) -> dict[str, list[str]]:
    """Return covered transitions that are not listed."""
    unknown = {
        "edges of attempts": set(coverage.attempts)
        - recorded_transitions.ATTEMPT_TRANSITIONS
        - recorded_transitions.RARE_ATTEMPT_TRANSITIONS,
        "edges of jobs": set(coverage.jobs)
        - recorded_transitions.JOB_TRANSITIONS
        - recorded_transitions.RARE_JOB_TRANSITIONS,
        "edges of members": set(coverage.members)
        - recorded_transitions.MEMBER_TRANSITIONS
        - recorded_transitions.RARE_MEMBER_TRANSITIONS,
    }
    return {name: sorted(edges) for name, edges in unknown.items() if edges}


def fault_table(coverage: Coverage) -> list[str]:
    """Return a table of kinds by states; a dash marks impossible combinations."""
    width = max(map(len, FAULT_KINDS))
    lines = [f"{'fault':{width}} {'none':>8}" + "".join(f" {state.value:>9}" for state in _STATES)]
    for kind, can in FAULT_KINDS.items():
        counts = coverage.faults.get(kind, Counter())
        cells = "".join(f" {counts.get(state.value, 0) if state in can else '-':>9}" for state in _STATES)
        lines.append(f"{kind:{width}} {counts.get('none', 0):>8}{cells}")
    others = sorted(coverage.faults.keys() - FAULT_KINDS.keys())  # of a pool's provider: they hit no attempt
    dashes = f" {'-':>9}" * len(_STATES)
    return [*lines, *(f"{kind:{width}} {coverage.faults[kind].get('none', 0):>8}{dashes}" for kind in others)]
