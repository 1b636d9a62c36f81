"""Routing by the engines' own figures, in virtual time: engines with caches of different sizes, behind gateways that see only their own load.

An engine starts a request when the KV cache has room for its prompt and answer, in the order of arrival. Each gateway reads the use of each
cache every two seconds, as the real one does.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Sequence

from benchmarks.gateway_trace import READ_TOKENS_S, STEP_S, Asked, Replayed, Replica, conversations, service_of
from phalanx.gateway.engine_metrics import READ_EVERY_S
from phalanx.gateway.prefixes import block_bytes, prefix_hashes
from phalanx.gateway.routing import BYTES_PER_TOKEN, RoutedReplica
from phalanx.gateway.services import RoutedService


class BoundedReplica(Replica):
    """An engine whose running requests must fit into `room` tokens of KV cache."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.spans: list[tuple[float, float, int]] = []  # requests: start, end, tokens
        self._running: list[tuple[float, int]] = []
        self._used = 0
        self._last_s = 0.0

    def use_at(self, now_s: float) -> float:
        """Return the share of the cache that running requests hold."""
        self.spans = [one for one in self.spans if one[1] > now_s]
        return min(1.0, sum(tokens for start_s, _, tokens in self.spans if start_s <= now_s) / self.room)

    def start(self, now_s: float, tokens: int, reading_s: float, answering_s: float) -> tuple[float, float]:
        """Run a request as soon as it fits; returns when its first token and its last one come."""
        start_s = max(now_s, self._last_s)
        while self._running and (self._running[0][0] <= start_s or self._used + tokens > self.room):
            end_s, ended = heapq.heappop(self._running)
            start_s = max(start_s, end_s)
            self._used -= ended
        self._last_s = start_s
        self.free_s = max(self.free_s, start_s) + reading_s
        end_s = self.free_s + answering_s
        heapq.heappush(self._running, (end_s, tokens))
        self._used += tokens
        self.spans.append((start_s, end_s, tokens))
        return self.free_s, end_s


def replay_caches(trace: list[Asked], rooms: Sequence[int], gateways: int, *, reads: bool, seed: int = 1) -> Replayed:
    """Play a trace on engines with this much room each, dealt to gateways by chance. `reads`: whether gateways read the use of caches."""
    chance, now_s = random.Random(seed), 0.0
    tables: list[RoutedService] = [service_of(len(rooms), clock=lambda: now_s) for _ in range(gateways)]
    engines = [BoundedReplica(room) for room in rooms]
    ends: list[tuple[float, int, RoutedService, RoutedReplica, int]] = []
    hit = whole = 0
    ttft: list[float] = []
    next_read_s, numbers = 0.0, itertools.count()
    for one in trace:
        while reads and next_read_s <= one.at_s:
            for table in tables:
                for replica in table.replicas.values():
                    engine = engines[int(replica.job_id)]
                    replica.read_cache(engine.use_at(next_read_s), engine.room, next_read_s)
            next_read_s += READ_EVERY_S
        now_s = one.at_s
        while ends and ends[0][0] <= now_s:
            _, _, table, replica, tokens = heapq.heappop(ends)
            table.done(replica, tokens)
        table = chance.choice(tables)
        found = table.choose(one.prompt, one.answer)
        assert found is not None
        replica, tokens = found
        engine, hashes = engines[int(replica.job_id)], prefix_hashes(one.prompt)
        bytes_ = sum(block_bytes(number) for number in range(engine.read(hashes)))
        hit += bytes_
        whole += len(one.prompt)
        left = (len(one.prompt) - bytes_) / BYTES_PER_TOKEN
        held = int(left) + one.answer  # running requests share the blocks of what they have in common
        first_s, end_s = engine.start(now_s, held, left / READ_TOKENS_S, one.answer * STEP_S)
        engine.work += left + one.answer
        ttft.append(first_s - now_s)
        heapq.heappush(ends, (end_s, next(numbers), table, replica, tokens))
    work = [one.work for one in engines]
    return Replayed(hit, whole, max(work) / statistics.mean(work), ttft)


CASES: dict[str, tuple[list[int], int, int, float]] = {
    # room of each engine in tokens, gateways, system prompts, conversations a second
    "8 equal engines": ([40_000] * 8, 1, 12, 6.0),
    "8 equal engines, nearly full": ([10_000] * 8, 1, 12, 6.0),
    "8 equal engines, nearly full, nothing shared": ([20_000] * 8, 1, 0, 9.0),
    "2 of 8 engines small": ([40_000] * 6 + [6_000] * 2, 1, 12, 6.0),
    "2 of 8 engines small, nothing shared": ([80_000] * 6 + [12_000] * 2, 1, 0, 9.0),
    "3 gateways, 8 equal engines, nearly full": ([10_000] * 8, 3, 12, 6.0),
    "3 gateways, 2 of 8 engines small": ([40_000] * 6 + [6_000] * 2, 3, 12, 6.0),
    "3 gateways, 2 of 8 engines small, nothing shared": ([80_000] * 6 + [12_000] * 2, 3, 0, 9.0),
}


def compare_reads(seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return for each case the time to the first token when gateways read the use of caches, over that when they do not: of all seeds together."""
    found = {}
    for name, (rooms, gateways, systems, rate_per_s) in CASES.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        hits = {False: 0, True: 0}
        for seed in seeds:
            trace = conversations(seed, count=300 if systems else 900, systems=systems, rate_per_s=rate_per_s)
            for reads in (False, True):
                replayed = replay_caches(trace, rooms, gateways, reads=reads, seed=seed)
                times[reads] += replayed.ttft_s
                hits[reads] += replayed.hit_bytes
        before_s, after_s = (statistics.quantiles(times[reads], n=20)[-1] for reads in (False, True))
        found[name] = {
            "ttft_p95_s": round(after_s, 3),
            "blind_ttft_p95_s": round(before_s, 3),
            "p95_ratio": round(after_s / before_s, 3),
            "mean_ratio": round(statistics.mean(times[True]) / statistics.mean(times[False]), 3),
            "hits_ratio": round(hits[True] / hits[False], 3) if systems else 1.0,
        }
    return found
