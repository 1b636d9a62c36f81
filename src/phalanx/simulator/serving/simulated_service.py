"""One service whose number of replicas follows its load, request by request in virtual time.

Simulated are the requests, the gateway's line, and replicas: each answers a number of streams at once and lets others wait in itself. The decision
is that of the head (`core.lifecycle.load_scaling`), once a second as gateways report.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import Final

from phalanx.core.lifecycle.load_scaling import LoadWindow
from phalanx.core.work.services.log_histogram import class_of
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service_load import ServiceLoad
from phalanx.simulator.serving.load_traces import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """A simulated replica.

    Attributes:
        streams: that it answers at once; `limit`: requests that it takes, the others among them waiting in it.
        prefill_s: from the start of a request to its first token; `answer_s`: mean of the rest, exponentially distributed.
        start_s: from the decision to a replica that serves.
    """

    streams: int = 8
    limit: int = 32
    prefill_s: float = 0.2
    answer_s: float = 5.0
    start_s: float = 20.0


@dataclass(frozen=True, slots=True)
class ScaleMove:
    """A change of the number wanted."""

    at_s: float
    before: int
    after: int
    why: str


@dataclass(slots=True)
class _Stream:
    came_s: float


@dataclass(slots=True, eq=False)
class _Engine:
    running: int = 0
    load: int = 0  # those that run and those in its line
    line: deque[_Stream] = field(default_factory=deque)


_LOAD: Final = attrgetter("load")


class SimulatedTraffic:
    """The requests of one service and its replicas, which others start and end.

    Args:
        terms: targets of the service.
        rate: of its requests.
        engine: how its replicas behave.
        dice: draws arrivals and lengths.

    Attributes:
        kept: streams whose first token came within the target, of those `served`.
        busy_s: seconds of answers, over all replicas; a replica has `engine.streams` of them in a second at most.
    """

    def __init__(self, terms: ScaleTerms, rate: Rate, engine: EngineModel, dice: Random) -> None:
        self.terms, self.rate, self.engine = terms, rate, engine
        self.now_s = 0.0
        self.kept = self.served = 0
        self.busy_s = 0.0
        self.engines: dict[object, _Engine] = {}
        self.unanswered: dict[int, _Stream] = {}
        self.waiting: deque[_Stream] = deque()
        self._leaving: list[_Engine] = []
        self._dice = dice
        self._ends: list[tuple[float, int, _Engine]] = []  # ends of answers
        self._firsts: list[tuple[float, int, _Stream]] = []  # first tokens to come
        self._number = 0
        self._new_firsts: Counter[int] = Counter()

    def add_replica(self, key: object) -> None:
        """A replica is ready."""
        self.engines[key] = _Engine()
        self._hand_out(self.now_s)

    def remove_replica(self, key: object) -> None:
        """A replica gets no more requests, and finishes those that it has."""
        leaving = self.engines.pop(key, None)
        if leaving is not None:
            self._leaving.append(leaving)

    def forget(self) -> None:
        """Count `kept`, `served` and `busy_s` from now on."""
        self.kept = self.served = 0
        self.busy_s = 0.0

    def pass_second(self) -> ServiceLoad:
        """Pass one second; returns the load at its end."""
        end_s, arrived = self.now_s + 1.0, 0
        rate, at_s = self.rate(self.now_s), self.now_s
        while rate > 0:
            at_s += self._dice.expovariate(rate)
            if at_s >= end_s:
                break
            arrived += 1
            self._advance(at_s)
            stream = _Stream(at_s)
            self.unanswered[id(stream)] = stream
            self.waiting.append(stream)
            self._hand_out(at_s)
        self._advance(end_s)
        self.now_s = end_s
        self._leaving = [one for one in self._leaving if one.load]
        running = (*self.engines.values(), *self._leaving)
        self.busy_s += sum(one.running for one in running)
        first_tokens = dict(self._new_firsts)
        self._new_firsts.clear()
        return ServiceLoad(
            in_flight=sum(one.load for one in running),
            waiting=len(self.waiting),
            oldest_wait_s=end_s - self.waiting[0].came_s if self.waiting else 0.0,
            arrived=arrived,
            first_tokens=first_tokens,
            unanswered=dict(Counter(class_of(end_s - one.came_s) for one in self.unanswered.values())),
        )

    def _hand_out(self, now_s: float) -> None:
        while self.waiting:
            chosen = min(self.engines.values(), key=_LOAD, default=None)
            if chosen is None or chosen.load >= self.engine.limit:
                return
            chosen.load += 1
            chosen.line.append(self.waiting.popleft())
            self._begin(chosen, now_s)

    def _begin(self, engine: _Engine, now_s: float) -> None:
        while engine.line and engine.running < self.engine.streams:
            stream = engine.line.popleft()
            engine.running += 1
            self._number += 1
            first_s = now_s + self.engine.prefill_s
            heapq.heappush(self._firsts, (first_s, self._number, stream))
            answer_s = self._dice.expovariate(1 / self.engine.answer_s)
            heapq.heappush(self._ends, (first_s + answer_s, self._number, engine))

    def _advance(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            at_s, _, engine = heapq.heappop(self._ends)
            engine.running -= 1
            engine.load -= 1
            self._begin(engine, at_s)
            self._hand_out(at_s)
        while self._firsts and self._firsts[0][0] <= now_s:
            at_s, _, stream = heapq.heappop(self._firsts)
            took_s = at_s - stream.came_s
            self.unanswered.pop(id(stream), None)
            self._new_firsts[class_of(took_s)] += 1
            self.served += 1
            self.kept += self.terms.ttft_s is None or took_s <= self.terms.ttft_s


class SimulatedService(SimulatedTraffic):
    """A service whose replicas need no GPUs: each starts in `engine.start_s`. `step` is one second.

    Args:
        low, high: range of the number of replicas.
    """

    def __init__(self, terms: ScaleTerms, low: int, high: int, rate: Rate, engine: EngineModel, dice: Random) -> None:
        super().__init__(terms, rate, engine, dice)
        self.low, self.high = low, high
        self.wanted = low
        self.moves: list[ScaleMove] = []
        self.reaction_max_s = 0.0
        self.starting: list[float] = []  # when each will serve
        self._window = LoadWindow()
        self._late_since_s: float | None = None
        self._ready = (low, 0.0)  # replicas that serve, and since when
        for number in range(low):
            self.add_replica(number)
        self._next = low

    def step(self) -> None:
        """Pass one second."""
        for _ in [at_s for at_s in self.starting if at_s <= self.now_s]:
            self.add_replica(self._next)
            self._next += 1
        self.starting = [at_s for at_s in self.starting if at_s > self.now_s]
        while len(self.engines) + len(self.starting) > self.wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.remove_replica(min(self.engines, key=lambda key: self.engines[key].load))
        while len(self.engines) + len(self.starting) < self.wanted:
            self.starting.append(self.now_s + self.engine.start_s)
        self._decide(self.pass_second())

    def _decide(self, load: ServiceLoad) -> None:
        found = self._window.decide(
            self.terms, load, self.now_s, ready=len(self.engines), wanted=self.wanted, may_be_zero=self.low == 0
        )
        after = self.wanted if found is None else max(self.low, min(self.high, found.replicas))
        self._time_reaction(up=after > self.wanted)
        if found is not None and after != self.wanted:
            self.moves.append(ScaleMove(self.now_s, self.wanted, after, found.why))
            self.wanted = after

    def _time_reaction(self, *, up: bool) -> None:
        """Time from the moment at which the requests miss their targets, while no replica is on its way, to the decision.

        They do if 3 of them, and a tenth of those of 5 s, are over the target without a first token. Those that came before the newest replica
        may be in the line of another one, and say nothing.
        """
        ready = len(self.engines)
        if ready != self._ready[0]:
            self._ready = (ready, self.now_s)
        since_s = self._ready[1]
        limit_s = min(one for one in (self.terms.ttft_s, self.terms.queue_s, math.inf) if one is not None)
        counted = list(self.unanswered.values()) if self.terms.ttft_s is not None else list(self.waiting)
        late = sorted(
            late_s for one in counted if one.came_s >= since_s and (late_s := self.now_s - one.came_s - limit_s) > 0
        )
        enough = max(3, math.ceil(0.1 * 5.0 * self.rate(self.now_s)))
        if self.starting or self.wanted == self.high or len(late) < enough:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = self.now_s - late[-enough]
        if self._late_since_s is not None:
            self.reaction_max_s = max(self.reaction_max_s, self.now_s - self._late_since_s)
        if up:
            self._late_since_s = None


def reversals_max(moves: list[ScaleMove], within_s: float = 600.0) -> int:
    """Return the most reversals within any such time: pairs of moves in opposite directions, one after the other, both within it."""
    turns = [
        (one.at_s, after.at_s)
        for one, after in itertools.pairwise(moves)
        if (one.after > one.before) != (after.after > after.before) and after.at_s - one.at_s <= within_s
    ]
    counts = [
        sum(start_s <= first_s and last_s <= start_s + within_s for first_s, last_s in turns) for start_s, _ in turns
    ]
    return max(counts, default=0)
