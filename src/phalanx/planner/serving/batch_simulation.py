"""Continuous batching in virtual time: users ask, prompts wait and are read in chunks, answers grow by one token per iteration.

Each user asks, waits for the answer, thinks, and asks again, so that at most `users` requests are in the replica. An iteration reads up to
`chunk` tokens: one for every running request, the rest of waiting prompts in order of arrival. A request enters when its whole context has
room in the cache (engines that admit earlier must stop requests later), and if fewer than `requests_max` run. Between two events the
batch does not change, so that many iterations are one step of the simulation.
Sources: G. Yu et al., "Orca", OSDI 2022; A. Agrawal et al., "Sarathi-Serve", OSDI 2024; closed queueing networks: E. Lazowska et al.,
"Quantitative System Performance", 1984, chapter 6.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from random import Random

from phalanx.planner.cost.sequence_lengths import untruncated_mean
from phalanx.planner.serving.iteration_time import IterationTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """What arrives at one replica.

    Attributes:
        users: that ask at the same time.
        prompt, answer: tokens of each; `answer_spread` draws answers between 1 - spread and 1 + spread times that.
        answer_max: with it, answers end at every token with the same probability (a geometric length), at the latest at this one, and with
            that mean (`sequence_lengths`).
        answer_longest: with it, one of the answers, in the middle of the queue, has this length.
        think_s: mean between an answer and the next question of a user, exponentially distributed.
        requests: how many are simulated; the first ask of each user is within `start_s`.
        again: a user asks again after the answer.
        read_elsewhere: prompts come with their keys and values, so that they take no time here.
        seed: of the draws.
    """

    users: int
    prompt: int
    answer: int
    requests: int
    answer_spread: float = 0.0
    answer_max: int = 0
    answer_longest: int = 0
    think_s: float = 0.0
    start_s: float = 0.0
    again: bool = True
    read_elsewhere: bool = False
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOutcome:
    """What the requests met. Times in seconds; `running` is the mean number of running requests, weighted by time."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    output_tokens: float
    span_s: float
    running: float
    running_max: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.span_s if self.span_s > 0 else 0.0


@dataclass(slots=True)
class _Request:
    came_s: float
    answer: int
    left: int
    first_s: float = 0.0


@dataclass(slots=True)
class _Books:
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    tokens: float = 0.0
    busy: float = 0.0
    peak: int = 0


class BatchSimulation:
    """One replica under a load."""

    def __init__(self, timer: IterationTimer, load: RequestLoad, *, cache_tokens: float) -> None:
        self._timer, self._load, self._speed = timer, load, timer.speed
        self._slots = min(timer.speed.requests_max, cache_tokens // (load.prompt + load.answer))
        self._random = Random(load.seed)
        self._scale = 0.0 if not load.answer_max else untruncated_mean(load.answer, load.answer_max)
        self._now = 0.0
        self._iteration = 0
        self._context = 0.0  # tokens of all running requests
        self._waiting: deque[_Request] = deque()
        self._reading: deque[_Request] = deque()
        self._running: list[tuple[int, int, _Request]] = []  # the iteration in which it ends, a number, the request
        self._arrivals: list[tuple[float, int]] = []
        self._numbers = 0
        self._asked = 0
        self._drawn = 0
        self._books = _Books()

    def run(self) -> ServingOutcome:
        """Simulate all requests; `ServingOutcome` leaves out the first of each user if there are more than two per user."""
        load = self._load
        if self._slots < 1:
            return ServingOutcome(ttft_s=(), tpot_s=(), output_tokens=0.0, span_s=0.0, running=0.0, running_max=0)
        first = min(load.users, load.requests)
        for _ in range(first):
            self._ask(self._random.uniform(0.0, load.start_s) if load.start_s else 0.0)
        warm = load.users if load.requests >= 3 * load.users and load.again and load.start_s else 0
        books, begun = self._books, 0.0
        while self._waiting or self._reading or self._running or self._arrivals:
            self._admit()
            before = len(books.tpot)
            self._step()
            if before < warm <= len(books.tpot):
                begun, books.tokens, books.busy = self._now, 0.0, 0.0
            if load.again and len(books.tpot) >= load.requests:
                break
        span = self._now - begun
        return ServingOutcome(
            ttft_s=tuple(books.ttft[warm:]),
            tpot_s=tuple(books.tpot[warm:]),
            output_tokens=books.tokens,
            span_s=span,
            running=books.busy / span if span > 0 else 0.0,
            running_max=books.peak,
        )

    def _ask(self, at: float) -> None:
        self._asked += 1
        heapq.heappush(self._arrivals, (at, self._asked))

    def _admit(self) -> None:
        """Take the requests that have arrived, and those that have room."""
        if not (self._waiting or self._reading or self._running) and self._arrivals:
            self._now = max(self._now, self._arrivals[0][0])
        while self._arrivals and self._arrivals[0][0] <= self._now:
            at, _ = heapq.heappop(self._arrivals)
            self._waiting.append(_Request(came_s=at, answer=self._draw(), left=self._load.prompt))
        while self._waiting and len(self._running) + len(self._reading) < self._slots:
            self._reading.append(self._waiting.popleft())

    def _draw(self) -> int:
        spread, mean = self._load.answer_spread, self._load.answer
        if self._load.answer_max:
            self._drawn += 1
            if self._load.answer_longest and self._drawn == self._load.requests // 2 + 1:
                return self._load.answer_longest
            drawn = self._random.expovariate(1.0 / self._scale)
            return max(1, min(self._load.answer_longest or self._load.answer_max, round(drawn)))
        return mean if not spread else max(1, round(mean * self._random.uniform(1.0 - spread, 1.0 + spread)))

    def _step(self) -> None:
        if self._reading and self._load.read_elsewhere:
            while self._reading:
                self._first_token(self._reading.popleft())
        elif self._reading:
            self._read()
        else:
            self._decode()

    def _read(self) -> None:
        """One iteration with prompts."""
        running, whole = len(self._running), self._load.prompt
        budget = max(1.0, self._speed.chunk - running)
        tokens, pairs, done = 0.0, 0.0, 0
        for one in self._reading:
            part = min(float(one.left), budget - tokens)
            if part <= 0:
                break
            before = whole - one.left
            pairs += part * (before + part / 2.0)
            tokens += part
            one.left -= math.ceil(part)
            done += one.left <= 0
        self._advance(1, tokens, pairs)
        for _ in range(done):
            self._first_token(self._reading.popleft())

    def _decode(self) -> None:
        """All iterations until the batch changes."""
        count = max(1, self._running[0][0] - self._iteration) if self._running else 1
        if self._arrivals and len(self._running) < self._slots:
            each = self._timer.seconds(len(self._running), self._mean_context(count))
            count = min(count, max(1, math.ceil((self._arrivals[0][0] - self._now) / each)))
        self._advance(count, 0.0, 0.0)

    def _mean_context(self, iterations: int) -> float:
        running = len(self._running)
        return self._context / running + iterations / 2.0 if running else 0.0

    def _advance(self, count: int, tokens: float, pairs: float) -> None:
        running = len(self._running)
        seconds = count * self._timer.seconds(running, self._mean_context(count), tokens, pairs)
        books = self._books
        self._now += seconds
        self._iteration += count
        self._context += running * count
        books.tokens += running * count
        books.busy += running * seconds
        books.peak = max(books.peak, running)
        while self._running and self._running[0][0] <= self._iteration:
            self._end(heapq.heappop(self._running)[2])

    def _first_token(self, one: _Request) -> None:
        one.first_s = self._now
        self._books.ttft.append(self._now - one.came_s + self._speed.request_s)
        self._books.tokens += 1
        if one.answer <= 1:
            self._finish(one)
            return
        self._numbers += 1
        self._context += self._load.prompt + 1
        heapq.heappush(self._running, (self._iteration + one.answer - 1, self._numbers, one))
        self._books.peak = max(self._books.peak, len(self._running))

    def _end(self, one: _Request) -> None:
        self._context -= self._load.prompt + one.answer
        self._finish(one)

    def _finish(self, one: _Request) -> None:
        self._books.tpot.append((self._now - one.first_s) / max(1, one.answer - 1))
        if self._load.again and self._asked < self._load.requests + self._load.users:
            think = self._random.expovariate(1.0 / self._load.think_s) if self._load.think_s else 0.0
            self._ask(self._now + think)
        elif not self._load.again and self._asked < self._load.requests:
            self._ask(self._now)
