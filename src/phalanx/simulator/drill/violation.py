"""A broken invariant of DESIGN 3, by its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OURS: Final = 0  # none of the design: the code broke off, or made what its store refuses; it must never do either
INVARIANTS: Final[dict[int, str]] = {
    OURS: "the code neither raises nor makes what its store refuses",
    1: "a device belongs to one live allocation",
    2: "nothing new on a drained, unknown or reserved node",
    3: "an acknowledged submit survives any crash",
    4: "one live attempt of a job, by epoch",
    5: "a gang holds all or nothing",
    6: "quotas hold at every instant",
    7: "no job starts before its dependencies hold",
    8: "terminal states never change",
    9: "a resumed job starts from its newest valid checkpoint",
    10: "no process outlives its attempt",
    11: "submit, cancel and drain are idempotent",
    12: "after an acknowledged cancel the job never runs again",
    13: "attempts, restarts and preemptions stay within budget",
    14: "healed, a runnable job that fits starts within a bound",
    15: "clock jumps kill nothing",
    17: "head and nodes agree soon after heal",
    18: "GPU-seconds billed are the attempts' spans, and the ledger sums to wall time",
    19: "events have no gaps",
    21: "retention never deletes the only valid checkpoint",
    23: "secrets appear in no event",
    24: "a full disk acknowledges nothing",
    25: "same seed, same trace",
}
"""What a drill checks. 16 (leaders), 20 (log lines), 22 (access), and the logs and argv of 23 need more than one process sees: docs/drill.md."""


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: int, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken invariant of a seed.

    Attributes:
        at_s: virtual seconds since the cluster began.
        event: how many events had been counted.
    """

    invariant: int
    text: str
    at_s: float
    event: int


def demand(holds: object, invariant: int, text: str) -> None:
    """Raise `Broken` unless it holds. Not where the text is dear to make: write the `if` there."""
    if not holds:
        raise Broken(invariant, text)
