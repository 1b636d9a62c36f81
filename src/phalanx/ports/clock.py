"""The clocks of the machine."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Two clocks: wall clock time for records, and a monotonic clock for leases and limits."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def boottime_s(self) -> float:
        """Seconds of CLOCK_BOOTTIME: never jumps, and continues during sleep."""
        ...
