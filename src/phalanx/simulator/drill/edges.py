"""The state transitions that a drill should cover: those of the attempt machine, of jobs, and of a supervisor's members.

The attempt machine's (state, event) pairs come from the code, so a new pair counts as missing until a drill covers it. The target states
were recorded from drills in `met`. Covered but unlisted transitions are reported, as well as listed but uncovered ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from phalanx.core.lifecycle.attempt import TABLE
from phalanx.core.work.attempt import AttemptState
from phalanx.simulator.drill import met
from phalanx.simulator.drill.coverage import Coverage
from phalanx.simulator.drill.faults import KINDS

_STATES: Final = (AttemptState.PLACED, AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)


UNREACHED: Final[dict[str, str]] = {
    "placed MemberFroze": "a supervisor reports a freeze only for ranks that start or run, which this generation does only after the barrier"
}
"""Pairs that no drill covers, and why; the table has them to handle reports of older releases and unusual timing safely."""
RARE_PAIRS: Final = frozenset(
    {
        "placed CheckpointFailed",
        "placed CheckpointSaved",
        "starting CheckpointFailed",
        "stopping Withdrawn",
        "starting MemberFroze",
    }
)
"""Pairs that need a late report within a few milliseconds; a short campaign may miss them."""


def table_pairs() -> set[str]:
    """Return every (state, event) pair of the attempt machine's table."""
    return {f"{state.value} {event.__name__}" for state, event in TABLE}


def fault_pairs() -> set[str]:
    """Return every kind of fault with every attempt state that it can hit."""
    return {f"{kind} {state.value}" for kind, states in KINDS.items() for state in states}


def missing(coverage: Coverage, *, rare: bool = True) -> dict[str, tuple[int, list[str]]]:
    """Return for each table the number of covered entries and the names of uncovered ones; `rare` includes rare entries."""

    def _rare(edges: frozenset[str]) -> frozenset[str]:
        return edges if rare else frozenset()

    faults = {f"{kind} {state}" for kind, counts in coverage.faults.items() for state in counts}
    asked = {" ".join(edge.split()[:2]) for edge in coverage.attempts}
    wanted: dict[str, tuple[set[str] | frozenset[str], set[str]]] = {
        "states and events of attempts": (table_pairs() - UNREACHED.keys() - (set() if rare else RARE_PAIRS), asked),
        "edges of attempts": (met.ATTEMPTS | _rare(met.RARE_ATTEMPTS), set(coverage.attempts)),
        "edges of jobs": (met.JOBS | _rare(met.RARE_JOBS), set(coverage.jobs)),
        "edges of members": (met.MEMBERS | _rare(met.RARE_MEMBERS), set(coverage.members)),
        "faults in states of attempts": (fault_pairs(), faults),
    }
    return {name: (len(want & found), sorted(want - found)) for name, (want, found) in wanted.items()}


def unlisted(coverage: Coverage) -> dict[str, list[str]]:
    """Return covered transitions that are not listed."""
    unknown = {
        "edges of attempts": set(coverage.attempts) - met.ATTEMPTS - met.RARE_ATTEMPTS,
        "edges of jobs": set(coverage.jobs) - met.JOBS - met.RARE_JOBS,
        "edges of members": set(coverage.members) - met.MEMBERS - met.RARE_MEMBERS,
    }
    return {name: sorted(edges) for name, edges in unknown.items() if edges}


def table_of_faults(coverage: Coverage) -> list[str]:
    """Return a table of kinds by states; a dash marks impossible combinations."""
    width = max(map(len, KINDS))
    lines = [f"{'fault':{width}} {'none':>8}" + "".join(f" {state.value:>9}" for state in _STATES)]
    for kind, can in KINDS.items():
        counts = coverage.faults.get(kind, Counter())
        cells = "".join(f" {counts.get(state.value, 0) if state in can else '-':>9}" for state in _STATES)
        lines.append(f"{kind:{width}} {counts.get('none', 0):>8}{cells}")
    return lines
