"""Time, as the shells pass it in."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Two readings: one for people and records, one that no one sets."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def boottime_s(self) -> float:
        """Seconds of CLOCK_BOOTTIME: never jumps, and goes on through sleep."""
        ...
