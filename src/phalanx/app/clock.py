"""The clocks of this machine."""

from __future__ import annotations

import time


class SystemClock:
    """Unix time for records, CLOCK_BOOTTIME for leases."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def boottime_s(self) -> float:
        """Seconds since boot, sleep included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
