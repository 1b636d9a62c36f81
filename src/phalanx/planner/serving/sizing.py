"""How many replicas, of which layout, answer a number of users in time.

For each layout the fewest replicas are found whose 95th percentiles of the time to the first token and of the time per output token are in
bound, by bisection over simulations of one replica (`batch_simulation`): replicas share the users evenly. Both percentiles shrink with fewer
users per replica. The number of replicas has an interval: the fewest where the bounds are met even if the replica is as much slower (or
faster) than predicted as four of five published rows of sources that no coefficient was fitted to.
A split reads prompts in replicas of their own. Its decoding replicas are sized for the time per token; those that read, with random
arrivals at the rate of the former, for what the transfer of keys and values leaves of the time to the first token.
Source of the split: Y. Zhong et al., "DistServe", OSDI 2024, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.core.work.services.model_memory import FLOOR_TOKENS
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.uncertainty import Z_80
from phalanx.planner.serving.batch_simulation import BatchSimulation, RequestLoad, ServingOutcome
from phalanx.planner.serving.iteration_time import IterationTimer, ServingSpeed
from phalanx.planner.serving.replica import ReplicaLayout, ServedModel, cache_room_bytes, cache_tokens

ANSWER_SPREAD = 0.5
"""Answers are between half and one and a half times as long as stated, so that replicas do not beat in step."""
USERS_PER_REPLICA_MAX = 1024  # more are more replicas: vLLM runs 1,024 requests at once at most (--max-num-seqs)
_ROUNDS = 4  # answers per user in a simulation; the first is not counted
_REQUESTS_MIN, _REQUESTS_MAX = 60, 3000
_READS_MAX = 20_000  # iterations that read prompts, in one simulation: of very long prompts fewer are simulated
_READERS_REQUESTS = 400  # in a simulation of reading
_READERS_MORE = 32  # replicas that read, beyond the fewest that keep up
_BUSY_MAX = 0.95  # share of its time that a replica reads


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTarget:
    """What is asked of a service.

    Attributes:
        users: requests at the same time, and users who think.
        prompt, answer: mean tokens.
        ttft_s, tpot_s: bounds of the 95th percentiles; infinite for none.
        think_s: mean pause of a user between an answer and the next question.
    """

    users: int
    prompt: int
    answer: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """Figures of one replica with its share of the users; times in seconds."""

    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tokens_per_s: float
    running: float

    def meets(self, target: ServingTarget, *, factor_ttft: float = 1.0, factor_tpot: float = 1.0) -> bool:
        """Whether the 95th percentiles, times a factor, are in bound."""
        return self.ttft_p95_s * factor_ttft <= target.ttft_s and self.tpot_p95_s * factor_tpot <= target.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedService:
    """One layout with as many replicas as it needs.

    Attributes:
        replicas: with `replicas_low` and `replicas_high`, the 80 % interval; `replicas_high` None if no number is sure to meet the bounds.
        figures: of one replica at that number.
        batch_max: requests of full length that fit into one replica.
        readers: replicas that only read prompts; 0 without a split.
        why_not: why no number of replicas meets the bounds; "" if one does.
    """

    model: ServedModel
    machine: Machine
    layout: ReplicaLayout
    replicas: int = 0
    replicas_low: int = 0
    replicas_high: int | None = None
    figures: ReplicaFigures | None = None
    batch_max: int = 0
    readers: int = 0
    why_not: str = ""

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return (self.replicas + self.readers) * self.layout.gpus

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all replicas."""
        return 0.0 if self.figures is None else self.figures.tokens_per_s * self.replicas

    @property
    def usd_per_million(self) -> float | None:
        """Dollars for a million output tokens, their prompts included; None without a price."""
        price = self.machine.price
        if price is None or not self.tokens_per_s:
            return None
        return self.gpus * price.usd_per_gpu_hour / 3600.0 / self.tokens_per_s * 1e6


def candidate_layouts(model: ServedModel, machine: Machine) -> list[ReplicaLayout]:
    """Return the layouts that an engine can start: tensor parallel inside a node, and pipelines of whole nodes."""
    heads = model.shape.heads
    degrees = [ranks for ranks in (1, 2, 4, 8, 16) if ranks <= machine.gpus_per_node and heads % ranks == 0]
    layouts = [ReplicaLayout(tensor=ranks) for ranks in degrees]
    if degrees and degrees[-1] == machine.gpus_per_node:
        layouts += [ReplicaLayout(tensor=degrees[-1], stages=stages) for stages in (2, 4)]
    return layouts


class ServiceSizer:
    """Sizes one layout on one kind of machine. Simulations are kept by number of users."""

    def __init__(
        self, model: ServedModel, machine: Machine, layout: ReplicaLayout, speed: ServingSpeed, target: ServingTarget
    ) -> None:
        self.model, self.machine, self.layout, self.target = model, machine, layout, target
        self.speed = replace(speed, requests_max=min(speed.requests_max, float(USERS_PER_REPLICA_MAX)))
        self.room_bytes = cache_room_bytes(
            model,
            layout,
            machine.gpu.memory_bytes,
            share=speed.memory_taken,
            overhead_bytes=speed.overhead_bytes,
        )
        length = target.prompt + round(target.answer * (1.0 + ANSWER_SPREAD))
        self.tokens = cache_tokens(model, layout, self.room_bytes, length)
        self.batch_max = int(self.tokens // length)
        self.timer = IterationTimer(
            model, machine.gpu, layout, self.speed, network_bytes_per_s=machine.network_bytes_per_s or 1e9
        )
        self._known: dict[tuple[int, bool], ReplicaFigures] = {}

    def size(self) -> SizedService:
        """Return the fewest replicas that meet the target."""
        target = self.target
        none = SizedService(model=self.model, machine=self.machine, layout=self.layout, batch_max=self.batch_max)
        if self.batch_max < 1 or self.tokens < FLOOR_TOKENS:
            return replace(none, why_not=self._too_large())
        alone = self.figures(1)
        if not alone.meets(target):
            return replace(none, figures=alone, why_not=_too_slow(alone, target))
        count = self._fewest(1.0, 1.0)
        assert count is not None  # one replica for each user does
        wide = [math.exp(Z_80 * self.speed.spreads.get(name, 0.0)) for name in ("ttft", "tpot")]
        low = self._fewest(1.0 / wide[0], 1.0 / wide[1])
        return replace(
            none,
            replicas=count,
            replicas_low=count if low is None else low,
            replicas_high=self._fewest(wide[0], wide[1]),
            figures=self.figures(self._share(count)),
        )

    def size_split(self) -> SizedService | None:
        """Return the fewest replicas if prompts are read elsewhere; None if no number meets the target, or nothing is decoded."""
        if self.batch_max < 1 or self.target.answer == 1 or not self.figures(1, split=True).meets(self.target):
            return None
        decoding = self._fewest(1.0, 1.0, split=True)
        if decoding is None:
            return None
        figures = self.figures(self._share(decoding), split=True)
        rate = figures.tokens_per_s * decoding / self.target.answer
        moved = self.model.context_bytes(self.target.prompt) / self.layout.gpus
        transfer = moved / (self.machine.network_bytes_per_s or self.machine.gpu.pcie_bytes_per_s)
        left = self.target.ttft_s - transfer - figures.ttft_p95_s
        least = max(1, math.ceil(rate * self._reading_s() / _BUSY_MAX))
        for readers in range(least, least + _READERS_MORE):
            read = self._reading(rate / readers)
            if read is None or read[1] > left:
                continue
            whole = replace(
                figures,
                ttft_p50_s=figures.ttft_p50_s + transfer + read[0],
                ttft_p95_s=figures.ttft_p95_s + transfer + read[1],
            )
            return SizedService(
                model=self.model,
                machine=self.machine,
                layout=self.layout,
                replicas=decoding,
                replicas_low=decoding,
                readers=readers,
                figures=whole,
                batch_max=self.batch_max,
            )
        return None

    def figures(self, users: int, *, split: bool = False) -> ReplicaFigures:
        """Return the figures of one replica with so many users."""
        if (users, split) not in self._known:
            self._known[users, split] = _figures(self._simulate(users, split=split))
        return self._known[users, split]

    def _simulate(self, users: int, *, split: bool) -> ServingOutcome:
        target = self.target
        running = min(users, self.batch_max)
        cycle = target.answer * self.timer.seconds(running, target.prompt + target.answer / 2.0) + target.think_s
        load = RequestLoad(
            users=users,
            prompt=target.prompt,
            answer=target.answer,
            requests=self._requests(min(_ROUNDS * users, _REQUESTS_MAX)),
            answer_spread=ANSWER_SPREAD,
            think_s=target.think_s,
            start_s=cycle,
            read_elsewhere=split,
        )
        return BatchSimulation(self.timer, load, cache_tokens=self.tokens).run()

    def _requests(self, wanted: int) -> int:
        """Return how many requests to simulate: as wanted, but fewer of prompts that take many iterations."""
        most = int(_READS_MAX // math.ceil(self.target.prompt / self.speed.chunk))
        return max(_REQUESTS_MIN, min(wanted, most))

    def _share(self, replicas: int) -> int:
        return -(-self.target.users // replicas)

    def _fewest(self, factor_ttft: float, factor_tpot: float, *, split: bool = False) -> int | None:
        """Return the fewest replicas whose percentiles, times the factors, are in bound; None if one for each user is not."""

        def meets(replicas: int) -> bool:
            found = self.figures(self._share(replicas), split=split)
            return found.meets(self.target, factor_ttft=factor_ttft, factor_tpot=factor_tpot)

        high = self.target.users
        if not meets(high):
            return None
        crowd = USERS_PER_REPLICA_MAX if self.target.think_s else min(USERS_PER_REPLICA_MAX, self.batch_max)
        low = min(high, self._share(crowd)) - 1  # so many have no room for all, or are too few by definition
        while high - low > 1:
            middle = (low + high) // 2 if high <= 2 * max(1, low) + 2 else 2 * max(1, low)
            if meets(middle):
                high = middle
            else:
                low = middle
        return high

    def _reading(self, rate: float) -> tuple[float, float] | None:
        """Return the 50th and 95th percentile of reading a prompt at this rate of random arrivals; None if it cannot keep up."""
        if rate * self._reading_s() > _BUSY_MAX:
            return None
        requests = self._requests(_READERS_REQUESTS)
        load = RequestLoad(
            users=requests,
            prompt=self.target.prompt,
            answer=1,
            requests=requests,
            start_s=requests / rate,
            again=False,
        )
        times = sorted(BatchSimulation(self.timer, load, cache_tokens=math.inf).run().ttft_s)
        return percentile(times, 0.5), percentile(times, 0.95)

    def _reading_s(self) -> float:
        return self.timer.seconds(0.0, 0.0, self.target.prompt, self.target.prompt**2 / 2.0)

    def _too_large(self) -> str:
        gpus = self.layout.gpus
        whole = self.machine.gpu.memory_bytes * self.speed.memory_taken * gpus / 1e9
        needed = (self.model.weight_bytes + self.speed.overhead_bytes * gpus) / 1e9
        if self.room_bytes <= 0:
            return f"{needed:,.0f} GB of weights and buffers do not fit in {whole:,.0f} GB"
        return f"no room for {FLOOR_TOKENS:,} tokens beside the weights, which a service of this model asks for"


def _too_slow(alone: ReplicaFigures, target: ServingTarget) -> str:
    if alone.ttft_p95_s > target.ttft_s:
        return f"one request alone takes {alone.ttft_p95_s * 1e3:,.0f} ms to its first token"
    return f"one request alone takes {alone.tpot_p95_s * 1e3:,.1f} ms per token"


def _figures(outcome: ServingOutcome) -> ReplicaFigures:
    first, each = sorted(outcome.ttft_s), sorted(outcome.tpot_s)
    return ReplicaFigures(
        ttft_p50_s=percentile(first, 0.5),
        ttft_p95_s=percentile(first, 0.95),
        tpot_p50_s=percentile(each, 0.5),
        tpot_p95_s=percentile(each, 0.95),
        tokens_per_s=outcome.tokens_per_s,
        running=outcome.running,
    )


def percentile(ordered: list[float], share: float) -> float:
    """Return the value at this share of an ordered list (nearest rank); infinity for an empty one."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf
