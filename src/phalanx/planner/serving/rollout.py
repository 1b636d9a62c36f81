"""Time in which a model writes the answers that it is trained on, on the GPUs that train it (GRPO).

Between two updates each group of GPUs runs an inference engine beside the sleeping training: weights of 16 bits divided by tensor parallel
ranks, and a cache of keys and values in what the states of the training leave free. The prompt of a group of answers is read once. All answers
begin at the same time, so the longest decides when the update can start (`RequestLoad.answer_max`).
Before, the engine gets the new weights: ranks that hold a part of them gather the rest.
Sources: Z. Shao et al., "DeepSeekMath", 2024, section 4.1; G. Sheng et al., "HybridFlow", 2024, section 5; the engine: `batch_simulation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.serving.batch_simulation import BatchSimulation, RequestLoad
from phalanx.planner.serving.iteration_time import IterationTimer, ServingSpeed
from phalanx.planner.serving.replica import ReplicaLayout, ServedModel, cache_room_bytes
from phalanx.planner.serving.sizing import candidate_layouts

SIMULATED_MAX: Final = 1024
"""Answers of one engine that are simulated; more take proportionally longer."""
MARGIN_SHARE: Final = 0.05
"""Share of the memory that an engine does not take, beyond what a training does not take."""
_STEPS: Final = 4.0  # numbers of answers at once that count as different, for each doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What is written for one step. `group` answers share a prompt; `prompt` and `answer` are mean tokens, `longest` is the limit of an answer."""

    prompt: int
    answer: int
    longest: int
    group: int
    speed: ServingSpeed

    @property
    def context(self) -> int:
        """Tokens of a prompt and the longest answer."""
        return self.prompt + self.longest


class RolloutTimer:
    """Times the rollouts of one machine. Simulations are kept by layout of the engine and number of answers at once."""

    def __init__(self, shape: ModelShape, machine: Machine, network: RankNetwork, request: RolloutRequest) -> None:
        wide = "bf16" if "bf16" in machine.gpu.flops else "fp16"
        self.model = ServedModel(shape=shape, weights=wide, cache=wide)
        self.machine, self.network, self.request = machine, network, request
        self.layouts = [
            one for one in candidate_layouts(self.model, machine) if one.stages == 1 and machine.gpus % one.tensor == 0
        ]
        self._timers: dict[int, IterationTimer] = {}
        self._known: dict[tuple[int, int, int], float] = {}

    @property
    def least_bytes(self) -> float:
        """Memory that the engine needs on each GPU for a single answer, at its widest."""
        context = self.request.context
        least = min(self._fixed_bytes(one) + self.model.context_bytes(context, one.tensor) for one in self.layouts)
        return least + MARGIN_SHARE * self.machine.gpu.memory_bytes

    def __call__(self, layout: Layout, resident_bytes: float) -> tuple[float, float]:
        """Return the seconds of the rollout, and of the weights before it; as if one had room where none has."""
        answers = layout.micro_batch * layout.micro_batches * layout.data
        found = [self._rollout(one, answers, resident_bytes) for one in self.layouts]
        seconds, chosen = min(zip(found, self.layouts, strict=True), key=lambda pair: (pair[0], pair[1].tensor))
        return seconds, self._weights_s(layout, chosen)

    def slots(self, engine: ReplicaLayout, resident_bytes: float) -> int:
        """Return how many answers of mean length have room in one engine."""
        speed = self.request.speed
        room = cache_room_bytes(
            self.model,
            engine,
            self.machine.gpu.memory_bytes - resident_bytes / speed.memory_taken,
            share=speed.memory_taken,
            overhead_bytes=speed.overhead_bytes,
        )
        return int(max(0.0, room) // self.model.context_bytes(self.request.prompt + self.request.answer, engine.tensor))

    def _rollout(self, engine: ReplicaLayout, answers: int, resident_bytes: float) -> float:
        each = -(-answers // (self.machine.gpus // engine.tensor))
        simulated = min(each, SIMULATED_MAX)
        slots = min(self.slots(engine, resident_bytes), simulated)
        if slots < 1:
            if engine is not self.layouts[-1]:
                return math.inf
            slots = 1  # the memory estimate refuses a layout that leaves no room for an answer
        if slots < simulated:
            slots = max(1, int(2.0 ** (math.floor(math.log2(slots) * _STEPS) / _STEPS)))
        key = (engine.tensor, slots, simulated)
        if key not in self._known:
            self._known[key] = self._simulate(engine, slots, simulated)
        return self._known[key] * each / simulated

    def _simulate(self, engine: ReplicaLayout, slots: int, answers: int) -> float:
        request = self.request
        if engine.tensor not in self._timers:
            self._timers[engine.tensor] = IterationTimer(
                self.model,
                self.machine.gpu,
                engine,
                request.speed,
                network_bytes_per_s=self.machine.network_bytes_per_s or 1e9,
            )
        timer = self._timers[engine.tensor]
        load = RequestLoad(
            users=answers,
            prompt=request.prompt,
            answer=request.answer,
            requests=answers,
            answer_max=request.longest,
            again=False,
            read_elsewhere=True,
        )
        cache = float(slots * (request.prompt + request.answer))
        written_s = BatchSimulation(timer, load, cache_tokens=cache).run().span_s
        prompts = math.ceil(answers / request.group)
        return written_s + prompts * timer.seconds(0.0, 0.0, request.prompt, request.prompt**2 / 2.0)

    def _weights_s(self, layout: Layout, engine: ReplicaLayout) -> float:
        if layout.zero < 3 and layout.tensor == layout.pipeline == 1:
            return 0.0
        size = self.model.weight_bytes / engine.tensor
        return self.network.group(layout.ranks, 1).all_gather_s(size)

    def _fixed_bytes(self, engine: ReplicaLayout) -> float:
        return self.model.weight_bytes / engine.gpus + self.request.speed.overhead_bytes
