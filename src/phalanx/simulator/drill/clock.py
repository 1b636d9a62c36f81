"""Virtual time: a queue of timers and two clocks. `next_call` advances the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from phalanx.controller.step_result import ControllerTime

BEGIN_UNIX_S: Final = 1_700_000_000.0  # Unix seconds at which every run starts; arbitrary
BEGIN_BOOT_S: Final = 1000.0  # CLOCK_BOOTTIME at the start: not 0, so that confusing the clocks becomes visible


class VirtualClock:
    """One time for all nodes; the wall clock can be set, CLOCK_BOOTTIME only advances."""

    def __init__(self) -> None:
        self.boot_s = BEGIN_BOOT_S
        self.wall_offset_s = BEGIN_UNIX_S - BEGIN_BOOT_S
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    @property
    def now(self) -> ControllerTime:
        """Both clocks."""
        return ControllerTime(wall_s=self.boot_s + self.wall_offset_s, boot_s=self.boot_s)

    @property
    def ns(self) -> int:
        """CLOCK_BOOTTIME in nanoseconds, as a supervisor reads it."""
        return round(self.boot_s * 1e9)

    def call_after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule a call; calls due at the same instant run in the order of scheduling."""
        self._order += 1
        heapq.heappush(self._due, (self.boot_s + max(0.0, delay_s), self._order, what))

    def next_call_s(self) -> float | None:
        """Return the time of the next call; None without one."""
        return self._due[0][0] if self._due else None

    def next_call(self) -> Callable[[], None]:
        """Advance to the next call and return it."""
        at_s, _, what = heapq.heappop(self._due)
        self.boot_s = max(self.boot_s, at_s)
        return what
