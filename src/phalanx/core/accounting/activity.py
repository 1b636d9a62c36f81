"""Activity of a device over its newest samples: a level that does not flap, and since when it holds. Pure; time is an argument."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0  # a level is that of the mean over so long: pauses between two steps are no idleness
WINDOW_SAMPLES: Final = 3  # at least, where samples come more rarely than that
SAMPLES_MAX: Final = 30  # in the window
IDLE_BELOW: Final = 0.02
"""Utilization below which a device is not active: a process that only waits uses some milliseconds of CPU a second on a virtual device, and no
kernel at all on a GPU."""
LOW_BELOW: Final = 0.10
"""Utilization below which an active device is under-used. Source: default `gpu_threshold` of rule CPUBottleneck of Amazon SageMaker Debugger,
10 % (rdrr.io/github/DyfanJones/sagemaker-r-debugger/man/CPUBottleneck.html, read 2026-11-25)."""


class ActivityLevel(enum.IntEnum):
    """How busy a device is."""

    NONE = 0
    LOW = 1
    ACTIVE = 2


_LOWEST: Final = {ActivityLevel.LOW: IDLE_BELOW, ActivityLevel.ACTIVE: LOW_BELOW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the newest samples of a device show.

    Attributes:
        empty: no process is on it.
        began: it was active in some samples since its job's processes began; the start of a program alone is shorter.
        since_ms: when the level began.
    """

    level: ActivityLevel
    empty: bool = False
    began: bool = True
    since_ms: int = 0


class ActivityWindow:
    """The newest samples of one device, for the job that holds it."""

    __slots__ = ("_before_ms", "_began", "_empty", "_level", "_samples", "_since_ms")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)  # time, and utilization up to it
        self._level = ActivityLevel.NONE
        self._before_ms: int | None = None  # time of the sample before them
        self._since_ms = 0
        self._empty = False
        self._began = False

    def add(self, at_ms: int, utilization: float, *, empty: bool) -> Activity:
        """Add a sample, which covers the time since the one before, and return the activity."""
        samples = self._samples
        first = not samples
        samples.append((at_ms, utilization))
        while len(samples) > WINDOW_SAMPLES and at_ms - samples[0][0] >= WINDOW_S * 1000:
            self._before_ms = samples.popleft()[0]
        level = level_of(sum(value for _, value in samples) / len(samples))
        begins = not self._began and sum(value >= IDLE_BELOW for _, value in samples) >= WINDOW_SAMPLES
        self._began = self._began or begins
        if first:  # also the first after a restart, whose level says nothing about this one
            self._since_ms = at_ms if self._before_ms is None else self._before_ms
        elif level is not self._level or begins:
            self._since_ms = self._run_start_ms(level, up=begins or level > self._level)
        elif empty is not self._empty:
            self._since_ms = samples[-2][0]
        self._level, self._empty = level, empty
        return Activity(level=level, empty=empty, began=self._began, since_ms=self._since_ms)

    def restart(self) -> None:
        """Drop the samples: they were taken while the job stood still for a known cause."""
        if self._samples:
            self._before_ms = self._samples[-1][0]
            self._samples.clear()

    def _run_start_ms(self, level: ActivityLevel, *, up: bool) -> int:
        """When the newest samples began to point to the new level: those that are beyond the limit between the levels by the largest sum.

        A sample counts at most as much as one of zero: a short burst does not outweigh a pause, and a pause between two bursts is part of the run.
        """
        limit = _LOWEST[max(level, ActivityLevel.LOW) if up else ActivityLevel(level + 1)]
        ends_ms = [at_ms for at_ms, _ in self._samples]
        begins_ms = [ends_ms[0] if self._before_ms is None else self._before_ms, *ends_ms[:-1]]
        total, largest, found_ms = 0.0, -math.inf, begins_ms[-1]
        for begin_ms, (_, value) in zip(reversed(begins_ms), reversed(self._samples), strict=True):
            beyond = min(value, 2 * limit) - limit
            total += beyond if up else -beyond
            if total >= largest:
                largest, found_ms = total, begin_ms
        return found_ms


def level_of(utilization: float) -> ActivityLevel:
    """The level of one utilization, 0 to 1."""
    if utilization < IDLE_BELOW:
        return ActivityLevel.NONE
    return ActivityLevel.LOW if utilization < LOW_BELOW else ActivityLevel.ACTIVE
