"""Decide when the next checkpoint is due. Times are arguments; this module measures nothing.

The interval is Daly's optimum for the measured stall of this job and the mean time between failures of its gang. Two bounds limit it: an
asynchronous write must end before the next begins, and failures that no rate includes (power, operators) must not cost too much work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.recovery.interval import checkpoint_interval_s

_FIRST_S: Final = 2.0
"""Training time before the first checkpoint, which measures the stall that the formula needs."""
_SMOOTHING: Final = 0.5
"""Weight of the newest measurement. The first save of a process is slower, because it allocates the staging buffers."""


@dataclass(slots=True, kw_only=True)
class CheckpointTimer:
    """The measured cost of the checkpoints of a job, and the time of the last one.

    Attributes:
        mtbf_s: mean time between failures of the whole gang.
        last_save_s: when training began or the last save started, on any monotonic clock.
        stall_s, write_s: measured and smoothed; None before the first save. The checkpoint passes them to the next attempt.
    """

    mtbf_s: float
    last_save_s: float
    stall_s: float | None = None
    write_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints."""
        if self.stall_s is None:
            return _FIRST_S
        return checkpoint_interval_s(stall_s=self.stall_s, write_s=self.write_s or 0.0, mtbf_s=self.mtbf_s)

    @property
    def save_s(self) -> float:
        """Seconds from the decision to save until the checkpoint is durable; 0 if unknown."""
        return (self.stall_s or 0.0) + (self.write_s or 0.0)

    def is_due(self, now_s: float) -> bool:
        """Return whether the next checkpoint should start."""
        return now_s - self.last_save_s >= self.interval_s

    def record_stall(self, now_s: float, *, stall_s: float) -> None:
        """Record that a checkpoint was copied from the device and training continues at `now_s`, even if its write fails later."""
        self.last_save_s = now_s
        self.stall_s = _smooth(self.stall_s, stall_s)

    def record_write(self, *, write_s: float) -> None:
        """Record that the files of the checkpoint are durable."""
        self.write_s = _smooth(self.write_s, write_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1.0 - _SMOOTHING) * old + _SMOOTHING * new
