"""How many replicas the load of a service needs. Pure: figures and their times in, a number and its reason out.

**Up** at once, when a target is missed. Requests in flight and KV use are proportional to the load, so they give the number directly. A wait or
a time to the first token is not: the number then grows by the excess, at most to twice the replicas that are *ready*, so that figures which
stay bad while new replicas start do not add up. Only requests that came since the number of ready replicas last changed count as evidence, and
none do while there are more in flight for each replica than the target for these allows: that explains the wait, and its number ends it.

**Down** to the largest number that was needed within `WINDOW_S`. Hence two moves in opposite directions lie within 10 minutes only if load
rises after a quiet 10 minutes. What a replica can take is learnt where it last missed a target for waits; a fifth of that is kept free. Where none
was ever missed, the targets for requests in flight and KV use give the number, and without these one replica fewer is tried.

**To zero** after `idle_s` without any request.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.units import format_duration, format_latency
from phalanx.core.work.services.log_histogram import LogHistogram, class_of, merged, quantile
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service_load import ServiceLoad

WINDOW_S: Final = 600.0
ANSWERS_S: Final = 5.0  # answers of so many seconds are judged together
SLOW_SHARE: Final = 0.9  # quantile of times to the first token
SLOW_MIN: Final = 3  # slow streams without which the quantile is noise
HEADROOM: Final = 0.8  # of what a replica took when it last missed a target for waits
GROWTH: Final = 2.0  # most of one decision, relative to the ready replicas
DOWN_EVERY_S: Final = 60.0  # between two decisions for fewer
_GAP_S: Final = 30.0  # figures that are missing for longer begin the window again


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """The number of replicas that the load needs, and why, for operators."""

    replicas: int
    why: str


@dataclass(slots=True)
class LoadWindow:
    """What is remembered of one service's load. Bounded: a few seconds of figures, and one entry for each number of replicas.

    All times are seconds of one monotonic clock.
    """

    began_s: float = math.inf
    seen_s: float = -math.inf
    active_s: float = -math.inf  # when there was a request last
    ready: int = -1
    ready_s: float = -math.inf  # since when so many are ready
    capacity: float = 0.0  # requests that a replica worked on when a target for waits was last missed; 0: never
    down_s: float = -math.inf  # the last decision for fewer
    ttft_s: float = 0.0  # of the newest figures, SLOW_SHARE of the streams
    _answers: deque[tuple[float, LogHistogram]] = field(default_factory=deque)
    _needs: deque[tuple[float, int]] = field(default_factory=deque)  # falling numbers: the maximum of a sliding window

    def decide(
        self, terms: ScaleTerms, load: ServiceLoad, now_s: float, *, ready: int, wanted: int, may_be_zero: bool
    ) -> ScaleDecision | None:
        """Take over new figures; returns the number needed if it is not the one wanted now, without regard to the upper end of the range.

        Args:
            terms: the targets.
            load: the newest figures of all gateways.
            now_s: their time.
            ready: replicas that serve now.
            wanted: replicas that are wanted now.
            may_be_zero: no replica is needed without requests.
        """
        self._observe(load, now_s, ready)
        need, why, late = self._missed_target(terms, load, now_s)
        if late and load.answering:
            self.capacity = load.answering / ready
        enough = self._enough(terms, load, late=late)
        self._record_need(max(need, enough), now_s)
        if need > wanted:
            return ScaleDecision(need, why)
        silent_s = now_s - max(self.active_s, self.began_s)
        if may_be_zero and wanted > 0 and silent_s >= terms.idle_s:
            return ScaleDecision(0, f"no request for {format_duration(terms.idle_s)}")
        most = max(1, self._needs[0][1])
        if most < wanted and now_s - self.began_s >= WINDOW_S and now_s - self.down_s >= DOWN_EVERY_S:
            self.down_s = now_s
            return ScaleDecision(most, f"at most {most} needed within {format_duration(WINDOW_S)}")
        return None

    def _observe(self, load: ServiceLoad, now_s: float, ready: int) -> None:
        if now_s - self.seen_s > _GAP_S:
            self.began_s = now_s
            self._needs.clear()
            self._answers.clear()
        self.seen_s = now_s
        if ready != self.ready:
            self.ready, self.ready_s = ready, now_s
            self._answers.clear()
        if load.total or load.arrived:
            self.active_s = now_s
        since = class_of(now_s - self.ready_s)  # slower ones came before
        self._answers.append((now_s, {number: n for number, n in load.first_tokens.items() if number <= since}))
        while self._answers[0][0] <= now_s - ANSWERS_S:
            self._answers.popleft()

    def _missed_target(self, terms: ScaleTerms, load: ServiceLoad, now_s: float) -> tuple[int, str, bool]:
        """The number of replicas that the targets need now, which target is missed ("" for none), and whether requests wait too long."""
        needs: list[tuple[int, str]] = []
        ready, since_s = self.ready, now_s - self.ready_s
        at = f"at {ready} {'replica' if ready == 1 else 'replicas'}"
        if ready == 0 and load.total:
            count = "a request waits" if load.total == 1 else f"{load.total} requests wait"
            needs.append((1, f"{count} for the first replica"))
        if terms.in_flight is not None and load.total:
            needs.append(
                (math.ceil(load.total / terms.in_flight), f"{load.total} requests, {terms.in_flight} for each replica")
            )
        if terms.kv is not None and ready and load.kv > terms.kv:
            needs.append((math.ceil(ready * load.kv / terms.kv), f"{load.kv:.0%} of the KV cache in use {at}"))
        by_number = len(needs)
        wait_s = min(load.oldest_wait_s, since_s)
        explained = terms.in_flight is not None and load.total > terms.in_flight * ready
        if terms.queue_s is not None and ready and load.waiting and wait_s >= terms.queue_s and not explained:
            needs.append((self._grown(wait_s / terms.queue_s), f"{format_duration(wait_s)} queue wait {at}"))
        self.ttft_s = self._slowness(terms, load, since_s)
        if terms.ttft_s is not None and ready and self.ttft_s > terms.ttft_s and not explained:
            text = f"{format_latency(self.ttft_s)} to the first token {at}"
            needs.append((self._grown(self.ttft_s / terms.ttft_s), text))
        return *max(needs, default=(0, "")), len(needs) > by_number

    def _slowness(self, terms: ScaleTerms, load: ServiceLoad, since_s: float) -> float:
        """The time to the first token of 9 of 10 streams; those count as well that have waited longer than the target already."""
        least, since = class_of(terms.ttft_s or 0.0), class_of(since_s)
        late = {number: n for number, n in load.unanswered.items() if least < number <= since}
        known = merged([late, *(one for _, one in self._answers)])
        found = quantile(known, SLOW_SHARE)
        slow = sum(n for number, n in known.items() if number > least)
        return found if terms.ttft_s is None or slow >= SLOW_MIN else min(found, terms.ttft_s)

    def _grown(self, excess: float) -> int:
        return max(self.ready + 1, math.ceil(self.ready * min(GROWTH, excess)))

    def _enough(self, terms: ScaleTerms, load: ServiceLoad, *, late: bool) -> int:
        """The number of replicas that would do for this load. `late`: requests wait longer than a target for waits allows."""
        if not load.total and not load.arrived:
            return 0
        needs = [1]
        if terms.in_flight is not None:
            needs.append(math.ceil(load.total / terms.in_flight))
        if terms.kv is not None:
            needs.append(math.ceil(self.ready * load.kv / (0.9 * terms.kv)))
        if terms.queue_s is not None or terms.ttft_s is not None:
            if self.capacity:
                needs.append(math.ceil(load.total / (HEADROOM * self.capacity)))
            elif late or (terms.in_flight is None and terms.kv is None):
                needs.append(self.ready if late else self.ready - 1)
        return max(needs)

    def _record_need(self, need: int, now_s: float) -> None:
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now_s, need))
        while self._needs[0][0] <= now_s - WINDOW_S:
            self._needs.popleft()
