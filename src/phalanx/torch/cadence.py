"""When the next checkpoint is due. Decides only: times come in as numbers, nothing is measured here.

The interval is Daly's optimum for the stall this job really has and the mean time between failures of its gang. It is kept between
two bounds the formula does not know: an asynchronous write must be over before the next begins, and what no failure rate tells
(power, people) makes an hour of lost work too much even on a good fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.recovery.interval import daly_interval_s

_FIRST_S: Final = 2.0
"""Training time before the first checkpoint: it is worth little by itself, but it measures the stall the formula needs."""
_LONGEST_S: Final = 1800.0
_WRITE_SHARE: Final = 2.0
"""The interval is at least so many times the write: half the time the disk belongs to others."""
_SMOOTHING: Final = 0.5
"""Weight of the newest measurement; the first save of a process also allocates its staging buffers and is slower."""


@dataclass(slots=True, kw_only=True)
class Cadence:
    """The measured costs of one job's checkpoints and when the last one was.

    mtbf_s: of the whole gang. since_s: when training began or the last save started, on any steady clock.
    stall_s, write_s: measured, smoothed; None before the first save. They travel in the checkpoint to the next attempt.
    """

    mtbf_s: float
    since_s: float
    stall_s: float | None = None
    write_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints."""
        if self.stall_s is None:
            return _FIRST_S
        optimum_s = daly_interval_s(stall_s=self.stall_s, mtbf_s=self.mtbf_s)
        return max(_WRITE_SHARE * (self.write_s or 0.0), min(_LONGEST_S, optimum_s))

    @property
    def save_s(self) -> float:
        """Seconds from the decision to save until the checkpoint is durable, as far as known."""
        return (self.stall_s or 0.0) + (self.write_s or 0.0)

    def due(self, now_s: float) -> bool:
        """Whether a checkpoint should be begun."""
        return now_s - self.since_s >= self.interval_s

    def staged(self, now_s: float, *, stall_s: float) -> None:
        """A checkpoint was copied off the device; training goes on from `now_s`. Also counts for one whose write then fails."""
        self.since_s = now_s
        self.stall_s = _smooth(self.stall_s, stall_s)

    def written(self, *, write_s: float) -> None:
        """Its files are durable."""
        self.write_s = _smooth(self.write_s, write_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1.0 - _SMOOTHING) * old + _SMOOTHING * new
