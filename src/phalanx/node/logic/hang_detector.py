"""Detect hangs of a member's ranks from the gaps between their step reports. Time is an argument.

A gap runs from one step report to the next, so it includes saves, evaluations and slow batches. Ranks hang when no report came for longer
than `limit_s`: many times the usual gap, longer than any gap seen, and never shorter than a floor. The gaps of the first steps (compiling,
autotuning, filling caches) are recorded, but no hang is reported yet. A rank may announce that no step will come for a while.

The node's loop calls this; the supervisor reports the hangs. Nothing here kills.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from phalanx.node.logic.lease import NS_PER_S

GAPS_KEPT: Final = 512  # the newest gaps: enough for a p99, few enough to follow a change of pace
GAPS_MIN: Final = 10  # no hang is reported before that: the first steps include compilation and first saves
P99_FACTOR: Final = 10.0
LONGEST_GAP_FACTOR: Final = 3.0  # times the longest gap seen: evaluations grow, and a save may meet a busy disk
FLOOR_SHARE: Final = 0.5
"""Share of the collective timeout below which a gap is never a hang. The other half is for the supervisor: after the whole timeout the
ranks' own watchdogs end them, and their stacks are lost. As for a freeze (`lease.may_thaw`)."""
BUSY_LIMIT_S: Final = (
    3600.0  # shortest limit for a rank that reported that it saves or evaluates; covers a background write
)
CHECK_GAP_MAX_S: Final = 5.0  # a longer gap between two checks means that this host itself was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang. `step`: the newest that any rank reported."""

    silent_s: float
    limit_s: float
    step: int | None


class HangDetector:
    """The hang detector of one generation on one node. Not thread-safe.

    Args:
        collective_timeout_s: of the job.
        restarts: number of generations that a hang ended; each doubles the limit, so that a false alarm does not repeat.
    """

    def __init__(self, collective_timeout_s: float, *, restarts: int = 0) -> None:
        self._floor_s = FLOOR_SHARE * collective_timeout_s
        self._factor = 2.0**restarts
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._longest_s = 0.0
        self._seen = 0
        self._last: dict[int, int] = {}  # by rank: when its newest step was reported
        self._steps: dict[int, int] = {}
        self._silent_ns: int | None = None  # time of the newest report, or of the end of a pause that does not count
        self._busy = False
        self._looked_ns: int | None = None
        self._paused = False
        self._reported = False

    @property
    def steps(self) -> dict[int, int]:
        """The newest step of each rank that reported."""
        return dict(self._steps)

    def record_step(self, rank: int, step: int, now_ns: int) -> None:
        """Record that a rank reported the end of a step."""
        before = self._last.get(rank)
        self._last[rank], self._steps[rank] = now_ns, step
        if before is not None and not self._paused and rank == min(self._last):  # one rank's gaps: they are all alike
            gap_s = max(0.0, (now_ns - before) / NS_PER_S)
            self._gaps.append(gap_s)
            self._longest_s = max(self._longest_s, gap_s)
            self._seen += 1
        self._silent_ns, self._busy, self._reported = now_ns, False, False

    def mark_busy(self) -> None:
        """Record that a rank makes no step for a while because it saves or evaluates."""
        self._busy = True

    def pause(self) -> None:
        """Pause while the ranks are frozen."""
        self._paused = True

    def resume(self, now_ns: int) -> None:
        """Resume after a freeze, which counts neither as a gap nor as silence."""
        self._paused = False
        self._last = dict.fromkeys(self._last, now_ns)
        if self._silent_ns is not None:
            self._silent_ns = now_ns

    @property
    def limit_s(self) -> float:
        """Longest silence that is no hang; infinite while too few gaps are known."""
        if self._seen < GAPS_MIN:
            return math.inf
        ordered = sorted(self._gaps)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]  # rounded down, so that it is not the longest of few gaps
        limit_s = self._factor * max(self._floor_s, P99_FACTOR * p99, LONGEST_GAP_FACTOR * self._longest_s)
        return max(limit_s, BUSY_LIMIT_S) if self._busy else limit_s

    def check(self, now_ns: int) -> Hang | None:
        """Return a hang once, when it is detected. Call this at least every LOOK_GAP_S."""
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        if self._silent_ns is None or self._paused:
            return None
        if looked_ns is None or now_ns - looked_ns > CHECK_GAP_MAX_S * NS_PER_S:
            self._silent_ns = max(self._silent_ns, now_ns)
            return None
        silent_s = (now_ns - self._silent_ns) / NS_PER_S
        if self._reported or silent_s <= self._floor_s or silent_s <= self.limit_s:
            return None
        self._reported = True
        return Hang(silent_s=silent_s, limit_s=self.limit_s, step=max(self._steps.values(), default=None))
