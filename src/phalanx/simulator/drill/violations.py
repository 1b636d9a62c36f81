"""Violations of the numbered invariants of DESIGN 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CODE_ERROR: Final = 0  # not in the design: the code raised, or committed data that its store refuses
INVARIANTS: Final[dict[int, str]] = {
    CODE_ERROR: "the code never raises and never commits data that its store refuses",
    1: "a device belongs to one live allocation",
    2: "no new allocation on a drained, unknown or reserved node",
    3: "an acknowledged submit survives any crash",
    4: "one live attempt of a job, by epoch",
    5: "a gang is allocated completely or not at all",
    6: "quotas hold at every instant",
    7: "no job starts before its dependencies hold",
    8: "terminal states never change",
    9: "a resumed job starts from its newest valid checkpoint",
    10: "no process outlives its attempt",
    11: "submit, cancel and drain are idempotent",
    12: "after an acknowledged cancel the job never runs again",
    13: "attempts, restarts and preemptions stay within budget",
    14: "after healing, a runnable job that fits starts within a bound",
    15: "clock jumps end no attempt",
    17: "head and nodes agree soon after healing",
    18: "GPU-seconds billed are the attempts' spans, and the ledger sums to wall time",
    19: "events have no gaps",
    21: "retention never deletes the only valid checkpoint",
    23: "secrets appear in no event",
    24: "no request is acknowledged on a full disk",
    25: "same seed, same trace",
    26: "no service loses its last ready replica to its own rollout or scale",
    27: "a pool orders each node once, stays within its maximum, runs no node without a record, and stops none under its jobs",
}
"""The checked invariants. 16 (leaders), 20 (log lines), 22 (access), and logs and argv of 23 need several processes: docs/drill.md."""


class InvariantBroken(AssertionError):
    """An invariant is violated."""

    def __init__(self, invariant: int, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violation of a seed.

    Attributes:
        at_s: virtual seconds since the start of the cluster.
        event: number of state changes before it.
    """

    invariant: int
    text: str
    at_s: float
    event: int


def require(holds: object, invariant: int, text: str) -> None:
    """Raise `InvariantBroken` unless `holds`. Use an explicit `if` where building the text is expensive."""
    if not holds:
        raise InvariantBroken(invariant, text)
