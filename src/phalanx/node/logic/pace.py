"""How fast a member's ranks make steps, and when their silence is a hang. Learned from the reports of this node's ranks; time is given.

What is learned is the time from one step report to the next, so that saves, evaluations and slow batches, which lie between reports, are in
it. A hang is a silence past `limit_s`: many times the usual gap, longer than any gap seen, and never shorter than a floor. The first steps
(compiling, autotuning, filling caches) are learned from but judge nothing, and a rank may say that no step will come for a while.

The loop feeds it and asks it; the supervisor reports what it says. Nothing here kills.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from phalanx.node.logic.lease import NS_PER_S

GAPS_KEPT: Final = 512  # the newest: long enough for a p99, short enough to follow a change of pace
GAPS_MIN: Final = 10  # before that nothing is a hang: compilation and first saves come in the first steps
TIMES_P99: Final = 10.0
TIMES_LONGEST: Final = 3.0  # than the longest gap ever seen: an evaluation grows, a save meets a busy disk
FLOOR_SHARE: Final = 0.5
"""Of the collective timeout, below which no silence is a hang. The other half is left to the supervisor: past all of it the ranks' own
watchdogs end them, and where each stood is lost. As for a freeze (`lease.may_thaw`)."""
BUSY_LIMIT_S: Final = (
    3600.0  # a rank that says it is saving or evaluating is believed for so long; what a background write may take
)
LOOK_GAP_S: Final = (
    5.0  # between two looks; past it we stood still ourselves (a stopped host), and the silence is no rank's
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A hang. `step`: the last one that any rank reported."""

    silent_s: float
    limit_s: float
    step: int | None


class Pace:
    """Of one generation on one node. Not thread-safe.

    Args:
        collective_timeout_s: of the job.
        restarts: generations so far that a hang ended: each doubles the limit, so that what was no hang goes through the second time.
    """

    def __init__(self, collective_timeout_s: float, *, restarts: int = 0) -> None:
        self._floor_s = FLOOR_SHARE * collective_timeout_s
        self._times = 2.0**restarts
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._longest_s = 0.0
        self._seen = 0
        self._last: dict[int, int] = {}  # by rank: when its newest step was reported
        self._steps: dict[int, int] = {}
        self._silent_ns: int | None = None  # since when no rank has reported, as far as it counts
        self._busy = False
        self._looked_ns: int | None = None
        self._held = False
        self._told = False

    @property
    def steps(self) -> dict[int, int]:
        """The newest step of each rank that reported."""
        return dict(self._steps)

    def stepped(self, rank: int, step: int, now_ns: int) -> None:
        """A rank reported the end of a step."""
        before = self._last.get(rank)
        self._last[rank], self._steps[rank] = now_ns, step
        if before is not None and not self._held and rank == min(self._last):  # one rank's gaps: they are all alike
            gap_s = max(0.0, (now_ns - before) / NS_PER_S)
            self._gaps.append(gap_s)
            self._longest_s = max(self._longest_s, gap_s)
            self._seen += 1
        self._silent_ns, self._busy, self._told = now_ns, False, False

    def busy(self) -> None:
        """A rank said that it makes no step for a while: it saves, or evaluates."""
        self._busy = True

    def hold(self) -> None:
        """The ranks are frozen: silence is our doing."""
        self._held = True

    def go_on(self, now_ns: int) -> None:
        """They run again; what lay before does not count, as gap or as silence."""
        self._held = False
        self._last = dict.fromkeys(self._last, now_ns)
        if self._silent_ns is not None:
            self._silent_ns = now_ns

    @property
    def limit_s(self) -> float:
        """Past this a silence is a hang; infinite while too little is known."""
        if self._seen < GAPS_MIN:
            return math.inf
        ordered = sorted(self._gaps)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]  # rounded down: of few gaps not the longest, which counts below
        limit_s = self._times * max(self._floor_s, TIMES_P99 * p99, TIMES_LONGEST * self._longest_s)
        return max(limit_s, BUSY_LIMIT_S) if self._busy else limit_s

    def look(self, now_ns: int) -> Silence | None:
        """The hang there is now, told once. Call it at least every few seconds."""
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        if self._silent_ns is None or self._held:
            return None
        if looked_ns is None or now_ns - looked_ns > LOOK_GAP_S * NS_PER_S:
            self._silent_ns = max(self._silent_ns, now_ns)
            return None
        silent_s = (now_ns - self._silent_ns) / NS_PER_S
        if self._told or silent_s <= self._floor_s or silent_s <= self.limit_s:
            return None
        self._told = True
        return Silence(silent_s=silent_s, limit_s=self.limit_s, step=max(self._steps.values(), default=None))
