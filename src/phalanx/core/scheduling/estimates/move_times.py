"""When a running job may be moved: a move costs it its restart and the work since its last save.

The scheduler moves jobs so that a waiting job fits, to faster or cheaper nodes, and to shrink and grow elastic ones. A job whose queue, or the
head, sets a least time between two moves has that one. Without it the time follows from what a move costs the job:

- A job that saves when it is asked to stop loses its restart only. It may be moved as soon as it has run for as long as that takes, so that a
  waiting job need not wait for it; after a move it stays `STAYS_PER_RESTART` times as long, so that it loses at most a sixth of its time.
- Any other job stays that long after its start too.

To make room, and to faster GPUs, no job is moved while it would lose more than `LOSS_MAX_S` of work: then only what weighs the loss displaces it, a
stop by value or the way home from rented nodes, or a right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.scheduling.board_records import JobEntry

STAYS_PER_RESTART: Final = 5.0
GROW_PER_MOVE: Final = 2.0  # of an elastic job: one that shrank does not grow back at once
LOSS_MAX_S: Final = 1800.0  # as long as the guaranteed run of the default policy, whose loss a stop may cost too
_INFINITE: Final = float("inf")


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """The times of one policy on one board, in seconds.

    Attributes:
        restart_s: work that a restart costs a job.
        min_stay_s: least time between two moves of a job whose queue sets none; None: it follows from the cost.
        stays: False: as if all stays were over, to see what they prevent.
    """

    restart_s: float
    min_stay_s: float | None = None
    stays: bool = True

    def least_stay_s(self, entry: JobEntry) -> float:
        """How long the job stays where it is after its start or last move."""
        if not self.stays:
            return 0.0
        own = entry.job_class.min_stay_s
        if own is None:
            own = self.min_stay_s
        if own is not None:
            return own
        return self.restart_s * (1.0 if entry.saved_s < 0.0 and not entry.moves else STAYS_PER_RESTART)

    def from_s(self, entry: JobEntry) -> float:
        """The time from which the job may be moved."""
        return entry.placed_s + self.least_stay_s(entry)

    def until_s(self, entry: JobEntry) -> float:
        """The time after which a move would lose too much work, unless it saves again; infinite for a job that saves when it is stopped."""
        if entry.saved_s < 0.0 or entry.started_s < 0.0:
            return _INFINITE
        return max(entry.started_s, entry.saved_s) + LOSS_MAX_S

    def may_move(self, entry: JobEntry, now_s: float) -> bool:
        """Whether the job may be moved now."""
        return self.from_s(entry) <= now_s <= self.until_s(entry)
