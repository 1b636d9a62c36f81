"""The requests of one service that wait for a replica, in a fair order. Pure: times are arguments, in monotonic seconds.

Projects take turns by start-time fair queueing (Goyal, Vin, Cheng 1996): each gets replicas in proportion to its weight, counted in tokens, and an
idle one saves nothing up. A project that waits alone gets everything. Within a project requests go by age; a priority counts as so many seconds of
waiting, at most `PRIORITY_MAX`, so that a low one is overtaken only by requests that came at most twice that later.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

PRIORITY_MAX: Final = 60  # seconds
_COMPACT: Final = 256  # requests that have left and are still in the heaps


class WaitingRoomFull(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """What decides the place of a request. `tokens`: that it is expected to use. `priority`: as in vLLM, lower ones go first."""

    project: str = ""
    weight: float = 1.0
    tokens: int = 1
    priority: int = 0


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One request that waits. `called` is set once a replica can take it; `coming`: and it has not left since. `number`: in its project; -1 for one that goes first."""

    terms: QueueTerms
    number: int
    called: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = True
    coming: bool = False


@dataclass(slots=True)
class _ProjectLine:
    weight: float
    heap: list[tuple[float, int, WaitingRequest]] = field(default_factory=list)
    entered: int = 0
    gone: int = 0  # called, or left
    start: float = 0.0  # virtual start time of its next request


class FairQueue:
    """See the module. `coming`: requests that were called and have not left yet, each on its way to a replica."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.coming = 0
        self._lines: dict[str, _ProjectLine] = {}
        self._finished: dict[str, float] = {}  # virtual time at which the last request of a project ends
        self._first: deque[WaitingRequest] = deque()  # those that were called before
        self._now = 0.0  # virtual: tokens for each weight of 1
        self._waiting = self._stale = 0

    def __len__(self) -> int:
        return self._waiting

    def enter(self, terms: QueueTerms, now_s: float, *, first: bool = False) -> WaitingRequest:
        """Wait for a turn, or as the `first`.

        Raises:
            WaitingRoomFull: there is no place.
        """
        if self._waiting >= self.size_max and not first:
            raise WaitingRoomFull
        line = self._lines.get(terms.project)
        if line is None:
            line = _ProjectLine(terms.weight, start=max(self._now, self._finished.get(terms.project, 0.0)))
            if not first:
                self._lines[terms.project] = line
        line.weight = terms.weight
        request = WaitingRequest(terms, -1 if first else line.entered)
        self._waiting += 1
        if first:
            self._first.appendleft(request)
        else:
            line.entered += 1
            counted = max(-PRIORITY_MAX, min(PRIORITY_MAX, terms.priority))
            heapq.heappush(line.heap, (now_s + counted, line.entered, request))
        return request

    def before(self, request: WaitingRequest) -> int:
        """Return about how many requests are before this one: those of its project, and as many of others as their weights give."""
        line = self._lines.get(request.terms.project)
        if line is None:
            return 0
        own = max(0, request.number - line.gone) if request.number >= 0 else 0
        weights = sum(one.weight for one in self._lines.values())
        return max(0, min(self._waiting - 1, round(own * weights / line.weight)))

    def leave(self, request: WaitingRequest) -> None:
        """Forget a request that does not wait any longer, or that was called and has come. Idempotent."""
        if request.coming:
            request.coming = False
            self.coming -= 1
        if not request.waits:
            return
        request.waits = False
        self._waiting -= 1
        self._stale += 1
        line = self._lines.get(request.terms.project)
        if line is not None and request.number >= 0:
            line.gone += 1
        if self._stale > _COMPACT + self._waiting:
            self._compact()

    def call(self, count: int) -> None:
        """Call the next ones: the replicas can take this many."""
        for _ in range(count):
            request = self._next()
            if request is None:
                return
            request.waits, request.coming = False, True
            self._waiting -= 1
            self.coming += 1
            request.called.set()

    def _next(self) -> WaitingRequest | None:
        while self._first:
            request = self._first.popleft()
            if request.waits:
                return request
            self._stale -= 1
        self._drop_left()
        if not self._lines:
            self._finished.clear()
            self._now = 0.0
            return None
        project = min(self._lines, key=lambda name: (self._lines[name].start, name))
        line = self._lines[project]
        _, _, request = heapq.heappop(line.heap)
        line.gone += 1
        self._now = line.start
        line.start += max(1, request.terms.tokens) / line.weight
        self._finished[project] = line.start
        return request

    def _drop_left(self) -> None:
        """Make each project's next request one that waits; projects without any leave."""
        for project, line in list(self._lines.items()):
            while line.heap and not line.heap[0][2].waits:
                heapq.heappop(line.heap)
                self._stale -= 1
            if not line.heap:
                del self._lines[project]

    def _compact(self) -> None:
        self._first = deque(one for one in self._first if one.waits)
        for line in self._lines.values():
            line.heap = [one for one in line.heap if one[2].waits]
            heapq.heapify(line.heap)
        self._stale = 0
        self._drop_left()
