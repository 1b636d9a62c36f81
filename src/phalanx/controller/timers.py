"""What falls due by itself: time limits, limits for getting ready, reminders. A step asks what is due, and looks at nothing else.

One heap of deadlines. An entry is only a hint to look: whoever takes one from the heap judges it by the newest state, so that entries need
not be removed when what they were made for changes. Kept in memory alone; a starting head arms it anew from the loaded world.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.core.ids import Epoch, Generation, JobId

SWEPT_FROM: Final = 1000  # entries; fewer are not worth a look


class Due(enum.IntEnum):
    """What falls due. The order decides between what is due at one instant: the limit ends what would only be late."""

    LIMIT = 0  # the job's time limit
    START = 1  # the barrier should have been passed
    REMIND = 2  # a command has been unanswered for a while


class Deadline(NamedTuple):
    """One entry: when, on CLOCK_BOOTTIME, and of which life of the job."""

    at_s: float
    due: Due
    order: int
    job_id: JobId
    epoch: Epoch
    generation: Generation


@dataclass(slots=True)
class Timers:
    """All deadlines.

    Attributes:
        fired: taken in the present step; put back by `undo`, forgotten by `settle`.
    """

    fired: list[Deadline] = field(default_factory=list)
    _heap: list[Deadline] = field(default_factory=list)
    _orders: int = 0
    _sweep_at: int = SWEPT_FROM  # entries at which those that do not stand are thrown out

    def arm(self, at_s: float, due: Due, job_id: JobId, epoch: Epoch, generation: Generation) -> None:
        """Look at the job again at `at_s`."""
        self._orders += 1
        heapq.heappush(self._heap, Deadline(at_s, due, self._orders, job_id, epoch, generation))

    def take(self, now_s: float) -> list[Deadline]:
        """Everything due by now, earliest first. Held until `settle` or `undo`."""
        taken: list[Deadline] = []
        while self._heap and self._heap[0].at_s <= now_s:
            taken.append(heapq.heappop(self._heap))
        self.fired += taken
        return taken

    def settle(self) -> list[Deadline]:
        """The step is committed: what fired has done its work. Hands it over."""
        fired, self.fired = self.fired, []
        return fired

    def sweep(self, stands: Callable[[Deadline], bool]) -> None:
        """Throw out what does not stand, when there are twice as many entries as stood the last time; call it on a durable state.

        Else a job of ten seconds with a limit of a week would leave its deadline here for the week.
        """
        if len(self._heap) >= self._sweep_at:
            self._heap = [deadline for deadline in self._heap if stands(deadline)]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEPT_FROM, 2 * len(self._heap))

    def undo(self) -> None:
        """The step never happened: what fired is due again."""
        for deadline in self.fired:
            heapq.heappush(self._heap, deadline)
        self.fired.clear()

    def next_s(self, stands: Callable[[Deadline], bool]) -> float:
        """When the first deadline that still `stands` is due; infinite when none. Those before it that do not are dropped."""
        heap = self._heap
        while heap:
            if stands(heap[0]):
                return heap[0].at_s
            heapq.heappop(heap)
        return math.inf
