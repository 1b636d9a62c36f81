"""States of jobs in the words that submitit knows from Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from phalanx.core.work.states import JobState

STATES: Final[Mapping[str, str]] = {
    "pending": "PENDING",
    "running": "RUNNING",
    "succeeded": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "timeout": "TIMEOUT",
}


def array_states(elements: Mapping[JobState, str]) -> dict[int, str]:
    """Return the state of each element; `elements` has their numbers by state, as "0-3,7"."""
    found: dict[int, str] = {}
    for state, numbers in elements.items():
        for part in filter(None, numbers.split(",")):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), STATES[state])
    return found
