"""The edges that a drill should meet: those of the attempt machine's table, of jobs' ends, and of a supervisor's members.

The table's keys are read from the code, so that a new one is missing until a drill meets it. Where each leads was found by drilling, and
is kept in `met`: an edge that is met and not listed there is as much news as one that is listed and not met.
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
    "placed MemberFroze": "a supervisor tells of a freeze only of ranks that begin or run, and those of this generation do so past the barrier"
}
"""Pairs of the attempt machine's table that no drill meets, and why they stand there: reports of older releases and of odd timing end safely."""
RARE_PAIRS: Final = frozenset(
    {
        "placed CheckpointFailed",
        "placed CheckpointSaved",
        "starting CheckpointFailed",
        "stopping Withdrawn",
        "starting MemberFroze",
    }
)
"""Pairs that take a late report in the few milliseconds of a state; a short campaign may miss them."""


def table_pairs() -> set[str]:
    """Every (state, event) of the attempt machine's table."""
    return {f"{state.value} {event.__name__}" for state, event in TABLE}


def fault_pairs() -> set[str]:
    """Every kind of fault with every state of an attempt that it can befall."""
    return {f"{kind} {state.value}" for kind, states in KINDS.items() for state in states}


def missing(coverage: Coverage, *, rare: bool = True) -> dict[str, tuple[int, list[str]]]:
    """For each table: how many of its entries were met, and the names of those that were not; with `rare`, also of those seldom met."""

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
    """Edges that were met and that nobody knew of."""
    news = {
        "edges of attempts": set(coverage.attempts) - met.ATTEMPTS - met.RARE_ATTEMPTS,
        "edges of jobs": set(coverage.jobs) - met.JOBS - met.RARE_JOBS,
        "edges of members": set(coverage.members) - met.MEMBERS - met.RARE_MEMBERS,
    }
    return {name: sorted(edges) for name, edges in news.items() if edges}


def table_of_faults(coverage: Coverage) -> list[str]:
    """Kinds down, states across; a dash where the kind cannot befall that state."""
    width = max(map(len, KINDS))
    lines = [f"{'fault':{width}} {'none':>8}" + "".join(f" {state.value:>9}" for state in _STATES)]
    for kind, can in KINDS.items():
        counts = coverage.faults.get(kind, Counter())
        cells = "".join(f" {counts.get(state.value, 0) if state in can else '-':>9}" for state in _STATES)
        lines.append(f"{kind:{width}} {counts.get('none', 0):>8}{cells}")
    return lines
