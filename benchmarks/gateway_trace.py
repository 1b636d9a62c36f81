"""Routing alone, in virtual time: how often a prompt meets a cache that has read its beginning, and how evenly the load lies.

Replicas read prompts one after another and answer all of their requests together. Their caches drop the oldest blocks. The trace has
conversations of several turns; each has one of a few system prompts, of which the popular ones are much more common.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, ServiceId, UserId
from phalanx.core.work.services.service import ServiceState
from phalanx.gateway.prefixes import block_bytes, prefix_hashes
from phalanx.gateway.routing import BYTES_PER_TOKEN, RoutedReplica, choose_replica, expected_tokens
from phalanx.gateway.services import RoutedService
from phalanx.wire.api.services import EndpointView, ServiceView

READ_TOKENS_S = 8000.0
STEP_S = 0.02  # between two tokens of an answer
CACHE_BYTES = 3 << 20  # of text that a replica's cache holds

Pick = Callable[["Replica", list[int], int], float]


@dataclass(slots=True, order=True)
class Asked:
    """One request of a trace: its time, prompt and the tokens of its answer."""

    at_s: float
    number: int
    prompt: bytes = field(compare=False)
    answer: int = field(compare=False)


def conversations(seed: int, *, count: int, systems: int, rate_per_s: float) -> list[Asked]:
    """Return the requests of this many conversations of 1 to 8 turns; without `systems`, nothing is shared and each has one turn."""
    chance = random.Random(seed)
    prompts = [chance.randbytes(chance.randint(1500, 12_000)).hex().encode() for _ in range(systems)]
    weights = [1 / (rank + 1) for rank in range(systems)]
    found: list[Asked] = []
    began_s = 0.0
    for _ in range(count):
        began_s += chance.expovariate(rate_per_s)
        text = chance.choices(prompts, weights)[0] if systems else b""
        at_s = began_s
        for _turn in range(chance.randint(1, 8) if systems else 1):
            text += (
                chance.randbytes(chance.randint(100, 1200) if systems else chance.randint(1000, 12_000)).hex().encode()
            )
            answer = chance.randint(20, 300)
            found.append(Asked(at_s, len(found), text, answer))
            text += chance.randbytes(answer * 2).hex().encode()
            at_s += answer * STEP_S + chance.expovariate(1 / 10)
    return sorted(found)


class Replica:
    """One engine: what its cache holds, and until when it reads prompts."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self.cache_bytes = cache_bytes
        self.known: OrderedDict[int, int] = OrderedDict()
        self.size = 0
        self.free_s = 0.0
        self.work = 0.0

    def match(self, hashes: list[int]) -> int:
        """Blocks of a prompt that the cache holds, from its beginning."""
        for number, one in enumerate(hashes):
            if one not in self.known:
                return number
        return len(hashes)

    def read(self, hashes: list[int]) -> int:
        """Read a prompt; returns the blocks that were in the cache."""
        found = self.match(hashes)
        for number, one in enumerate(hashes):
            if one not in self.known:
                self.known[one] = block_bytes(number)
                self.size += self.known[one]
            self.known.move_to_end(one)
        while self.size > self.cache_bytes:
            self.size -= self.known.popitem(last=False)[1]
        return found


@dataclass(slots=True)
class Replayed:
    """What a policy made of a trace."""

    hit_bytes: int
    prompt_bytes: int
    max_over_mean: float
    ttft_s: list[float]

    @property
    def hit_share(self) -> float:
        """Share of all prompts that caches held."""
        return self.hit_bytes / self.prompt_bytes

    @property
    def ttft_p95_s(self) -> float:
        """95th percentile of the time to the first token, in seconds."""
        return statistics.quantiles(self.ttft_s, n=20)[-1]


def service_of(replicas: int, limit: int = 100_000, clock: Callable[[], float] = time.monotonic) -> RoutedService:
    """Return a service with this many replicas. `clock`: monotonic seconds."""
    ends = [
        EndpointView(
            job_id=JobId(str(one)), revision=1, node_id=NodeId("n"), address="127.0.0.1", port=1 + one, ready=True
        )
        for one in range(replicas)
    ]
    view = ServiceView(
        name=ServiceId("chat"),
        state=ServiceState.READY,
        user=UserId("ada"),
        project=ProjectId("p"),
        queue=QueueId("q"),
        created_s=0.0,
        revision=1,
        served_revision=1,
        replicas=f"{replicas}",
        desired=replicas,
        ready=replicas,
        endpoints=ends,
    )
    return RoutedService(view, replica_limit=limit, waiting_max=1, clock=clock)


def replay(trace: list[Asked], count: int, policy: str, cache_bytes: int = CACHE_BYTES) -> Replayed:
    """Play a trace. Policies: `phalanx`; `exact`, the same with what the caches hold; `best`, the best cache whatever the load; `least`, the load."""
    service = service_of(count)
    engines = {str(number): Replica(cache_bytes) for number in range(count)}
    ends: list[tuple[float, int, RoutedReplica, int]] = []
    hit = whole = 0
    ttft: list[float] = []
    for one in trace:
        while ends and ends[0][0] <= one.at_s:
            _, _, replica, tokens = heapq.heappop(ends)
            service.done(replica, tokens)
        hashes = prefix_hashes(one.prompt)
        if policy == "phalanx":
            found = service.choose(one.prompt, one.answer)
            assert found is not None
            replica, tokens = found
        else:
            matches: dict[int, int] = {}
            if policy in ("best", "exact"):
                matches = {each.slot: engines[each.job_id].match(hashes) for each in service.replicas.values()}
            if policy == "best":
                replica = max(service.replicas.values(), key=lambda each: (matches[each.slot], -each.tokens))
            else:
                chosen = choose_replica(
                    service.replicas.values(),
                    matches,
                    len(hashes),
                    0.0,
                    prompt_tokens=len(one.prompt) // BYTES_PER_TOKEN,
                )
                assert chosen is not None
                replica = chosen
            tokens = expected_tokens(len(one.prompt), matches.get(replica.slot, 0) / max(1, len(hashes)), one.answer)
            replica.begin(tokens, one.number)
        engine = engines[replica.job_id]
        cached = engine.read(hashes)
        bytes_ = sum(block_bytes(number) for number in range(cached))
        hit += bytes_
        whole += len(one.prompt)
        left = (len(one.prompt) - bytes_) / BYTES_PER_TOKEN
        engine.free_s = max(engine.free_s, one.at_s) + left / READ_TOKENS_S
        engine.work += left + one.answer
        ttft.append(engine.free_s - one.at_s)
        heapq.heappush(ends, (engine.free_s + one.answer * STEP_S, one.number, replica, tokens))
    work = [one.work for one in engines.values()]
    return Replayed(hit, whole, max(work) / statistics.mean(work), ttft)


def decision_ms(replicas: int, prompts: int, seed: int = 1) -> tuple[list[float], float]:
    """Return the processor time of each choice among this many replicas, for prompts of 100,000 tokens, in ms, and the MiB of a full index.

    The index is filled first with 31,000 blocks for each replica, or as many as it holds.
    """
    chance = random.Random(seed)
    tracemalloc.start()
    service = service_of(replicas)
    for slot in range(replicas):
        service.prefixes.add([chance.getrandbits(64) for _ in range(31_000)], slot)
    memory_mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    shared = [chance.randbytes(200_000).hex().encode() for _ in range(8)]
    taken: list[float] = []
    for number in range(prompts):
        # Most of the prompt was read before, as in the later turns of agents.
        prompt = shared[number % len(shared)][:390_000] + chance.randbytes(5000).hex().encode()
        began_ns = time.thread_time_ns()
        found = service.choose(prompt, 256)
        taken.append((time.thread_time_ns() - began_ns) / 1e6)
        assert found is not None
        service.done(*found)
    return taken, memory_mib
