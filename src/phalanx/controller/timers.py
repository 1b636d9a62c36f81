"""Deadlines of attempts: time limits, start limits, reminders, in one heap.

The caller checks each due entry against the newest state, so entries are not removed when their attempt changes. In memory only; a
starting head arms the deadlines again from the loaded world.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.core.ids import Epoch, Generation, JobId

SWEEP_LEAST: Final = 1000  # entries; fewer are not worth a sweep


class DeadlineKind(enum.IntEnum):
    """Kind of a deadline. The order breaks ties: at the same instant, a time limit goes before a late start."""

    LIMIT = 0  # the job's time limit
    START = 1  # the gang should have passed the barrier
    REMIND = 2  # a command has been unanswered for REMIND_EVERY_S


class Deadline(NamedTuple):
    """One entry: when (CLOCK_BOOTTIME), and for which epoch and generation of the job."""

    at_s: float
    kind: DeadlineKind
    order: int
    job_id: JobId
    epoch: Epoch
    generation: Generation


@dataclass(slots=True)
class Timers:
    """All deadlines.

    Attributes:
        fired: taken in the current step; put back by `undo`, dropped by `settle`.
    """

    fired: list[Deadline] = field(default_factory=list)
    _heap: list[Deadline] = field(default_factory=list)
    _orders: int = 0
    _sweep_at: int = SWEEP_LEAST  # number of entries at which stale ones are removed

    def arm(self, at_s: float, due: DeadlineKind, job_id: JobId, epoch: Epoch, generation: Generation) -> None:
        """Add a deadline at `at_s`."""
        self._orders += 1
        heapq.heappush(self._heap, Deadline(at_s, due, self._orders, job_id, epoch, generation))

    def take(self, now_s: float) -> list[Deadline]:
        """Take all due deadlines, earliest first. They stay in `fired` until `settle` or `undo`."""
        taken: list[Deadline] = []
        while self._heap and self._heap[0].at_s <= now_s:
            taken.append(heapq.heappop(self._heap))
        self.fired += taken
        return taken

    def settle(self) -> list[Deadline]:
        """Clear and return what fired: the step is committed."""
        fired, self.fired = self.fired, []
        return fired

    def sweep(self, stands: Callable[[Deadline], bool]) -> None:
        """Remove stale entries once the heap has doubled since the last sweep; only for a durable state.

        Otherwise a job of ten seconds with a limit of a week would leave its deadline here for the week.
        """
        if len(self._heap) >= self._sweep_at:
            self._heap = [deadline for deadline in self._heap if stands(deadline)]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEEP_LEAST, 2 * len(self._heap))

    def undo(self) -> None:
        """Put back what fired: the step was undone."""
        for deadline in self.fired:
            heapq.heappush(self._heap, deadline)
        self.fired.clear()

    def next_s(self, stands: Callable[[Deadline], bool]) -> float:
        """When the first deadline is due for which `stands` holds; infinite for none. Stale entries before it are removed."""
        heap = self._heap
        while heap:
            if stands(heap[0]):
                return heap[0].at_s
            heapq.heappop(heap)
        return math.inf
