"""Time in which a model writes the answers that it is trained on, on the GPUs that train it (GRPO), and what surrounds it.

Between two updates each group of GPUs runs an inference engine beside the sleeping training: weights of 16 bits divided by tensor parallel
ranks, and a cache of keys and values in what the training leaves on the device. The prompt of a group of answers is read once. All answers
begin at the same time, and the update waits for the longest of all engines (`sequence_lengths`).
Before, the engine is woken and gets the new weights, one tensor at a time: every rank gathers each of them whole and copies its part
(`full_tensor` in verl and NeMo RL, `gather_if_zero3` in trl). Some stacks also move states and weights of the training to the host meanwhile, and
keep the reference there.
Sources: Z. Shao et al., "DeepSeekMath", 2024, section 4.1; G. Sheng et al., "HybridFlow", 2024, section 5; the engine: `batch_simulation`;
who moves what: `stacks.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.host_memory import copy_s
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.optimizers import optimizer_state_bytes
from phalanx.planner.cost.sequence_lengths import SequenceBatching, SequenceLengths
from phalanx.planner.cost.step_time import RolloutSeconds
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask, rank_parameters, updated_parameters
from phalanx.planner.serving.batch_simulation import BatchSimulation, RequestLoad
from phalanx.planner.serving.iteration_time import IterationTimer, ServingSpeed
from phalanx.planner.serving.replica import ReplicaLayout, ServedModel, cache_room_bytes
from phalanx.planner.serving.sizing import candidate_layouts

SIMULATED_MAX: Final = 1024
"""Answers of one engine that are simulated; more take longer at the rate of a full batch."""
MARGIN_SHARE: Final = 0.05
"""Share of the memory that an engine does not take, beyond what a training does not take."""
SLEEP_S: Final = 1.8
"""To put an engine to sleep and to wake it. Source: github.com/huggingface/trl/issues/4086: 1.3 to 1.6 s and 0.29 s for 52 GiB (vLLM, 2025-09)."""
TENSOR_S: Final = 0.0012
"""To gather one tensor and hand it to the engine, beyond its bytes. Source: as `LOADED_BYTES_PER_S`."""
LOADED_BYTES_PER_S: Final = 19e9
"""At which tensors are handed over. Source: `timing_s/reshard` of verl on 8 H100, 0.31 s for Llama 3.2 1B (146 tensors) and 1.22 s for Qwen2.5 7B
(339): "veRL Benchmark Report: GRPO on GSM8K", wandb.ai/haoyugao-google/verl_grpo_example_gsm8k, 2025. Two figures for two constants."""
PAGEABLE_SHARE: Final = 0.42
"""Of the rate of pinned memory that copies to and from pageable memory reach. Source: M. Harris, "How to Optimize Data Transfers in CUDA C/C++",
NVIDIA Developer Blog, 2012: 5.4 and 5.6 of 12.3 and 13.0 GB/s, 2.3 of 5.8 and 6.0 GB/s; from memory, not re-read."""
LAYER_TENSORS: Final = 9
"""Tensors of a layer: four of attention, three of the MLP, two norms."""
_STEPS: Final = 4.0  # numbers of answers at once that count as different, for each doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What is written for one step.

    Attributes:
        prompt, answer: mean tokens; `longest` is the limit of an answer.
        group: answers that share a prompt.
        updates: optimizer steps in which the answers are used, an equal part of them in each.
        tensor: GPUs of an engine, as a published run had; None for the fastest number.
    """

    prompt: int
    answer: int
    longest: int
    group: int
    speed: ServingSpeed
    updates: int = 1
    tensor: int | None = None

    @property
    def context(self) -> int:
        """Tokens of a prompt and the longest answer."""
        return self.prompt + self.longest

    @property
    def lengths(self) -> SequenceLengths:
        """The lengths of the answers."""
        return SequenceLengths(self.prompt, self.answer, self.longest)


class RolloutTimer:
    """Times the rollouts of one task and machine. Simulations are kept by layout of the engine and number of answers at once."""

    def __init__(
        self,
        task: TrainingTask,
        machine: Machine,
        network: RankNetwork,
        request: RolloutRequest,
        stack: Stack,
    ) -> None:
        wide = "bf16" if "bf16" in machine.gpu.flops else "fp16"
        self.task, self.stack = task, stack
        self.model = ServedModel(shape=task.model, weights=wide, cache=wide)
        self.machine, self.network, self.request = machine, network, request
        self.lengths = request.lengths
        possible = [
            one for one in candidate_layouts(self.model, machine) if one.stages == 1 and machine.gpus % one.tensor == 0
        ]
        self.layouts = [one for one in possible if request.tensor in {None, one.tensor}]
        if not self.layouts:
            raise ValueError(f"no engine on {request.tensor} GPUs divides {task.model.name} and this machine")
        self._batching = SequenceBatching(stack.answers)
        self._timers: dict[int, IterationTimer] = {}
        self._known: dict[tuple[int, int, int, int], float] = {}

    @property
    def least_bytes(self) -> float:
        """Memory that the engine needs on each GPU for a single answer, at its widest."""
        context = self.request.context
        least = min(self._fixed_bytes(one) + self.model.context_bytes(context, one.tensor) for one in self.layouts)
        return least + MARGIN_SHARE * self.machine.gpu.memory_bytes

    def __call__(self, layout: Layout, resident_bytes: float) -> RolloutSeconds:
        """Return the times around the answers of one layout; as if an engine had room where none has."""
        held_bytes = 0.0 if self.stack.sleeps else resident_bytes
        answers = layout.global_batch
        found = [self._rollout(one, answers, held_bytes) for one in self.layouts]
        uneven = self.lengths.unevenness(
            self._batching,
            together=layout.data if layout.zero == 3 else layout.pipeline,
            sequences=layout.micro_batch,
            answers=answers,
        )
        return RolloutSeconds(
            write_s=min(found),
            handover_s=self._handover_s(layout),
            reference_s=self._reference_s(layout),
            linear=uneven.linear,
            square=uneven.square,
            updates=self.request.updates,
        )

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
        longest = round(self.lengths.longest_of(answers))
        key = (engine.tensor, slots, simulated, longest)
        if key not in self._known:
            self._known[key] = self._simulate(engine, slots, simulated, longest)
        more_s = 0.0
        if each > simulated:
            context = self.request.prompt + self.request.answer / 2.0
            tokens = (each - simulated) * self.request.answer
            more_s = tokens / slots * self._timers[engine.tensor].seconds(float(slots), context)
        return self._known[key] + more_s

    def _simulate(self, engine: ReplicaLayout, slots: int, answers: int, longest: int) -> float:
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
            answer_longest=longest,
            again=False,
            read_elsewhere=True,
        )
        cache = float(slots * (request.prompt + request.answer))
        written_s = BatchSimulation(timer, load, cache_tokens=cache).run().span_s
        prompts = math.ceil(answers / request.group)
        return written_s + prompts * timer.seconds(0.0, 0.0, request.prompt, request.prompt**2 / 2.0)

    def _handover_s(self, layout: Layout) -> float:
        """Return the time to wake the engine and give it the new weights, and to move the training to the host and back where it sleeps."""
        shape = self.task.model
        size = self.model.weight_bytes
        tensors = LAYER_TENSORS * shape.layers + 3
        whole = layout.zero < 3 and layout.tensor == layout.pipeline == layout.expert == 1
        gather_s = 0.0 if whole else self.network.group(layout.ranks, 1).all_gather_s(size)
        moved = 0.0
        if self.stack.sleeps:
            states = updated_parameters(self.task, layout) * optimizer_state_bytes(self.stack, self.task.optimizer)
            moved = 2.0 * self._paged_s(states + self._weight_bytes(layout), layout)
        return SLEEP_S + tensors * TENSOR_S + size / LOADED_BYTES_PER_S + gather_s + moved

    def _reference_s(self, layout: Layout) -> float:
        """Return the time to exchange the weights with those of the reference on the host: away, there and back."""
        if not self.stack.reference_on_host or self.task.method is not TrainingMethod.FULL:
            return 0.0
        return 3.0 * self._paged_s(self._weight_bytes(layout), layout)

    def _paged_s(self, size_bytes: float, layout: Layout) -> float:
        return copy_s(size_bytes, layout, self.machine) / PAGEABLE_SHARE

    def _weight_bytes(self, layout: Layout) -> float:
        held = rank_parameters(self.task.model, layout)
        return 2.0 * (held.sharded(layout) if layout.zero == 3 else held.total)

    def _fixed_bytes(self, engine: ReplicaLayout) -> float:
        return self.model.weight_bytes / engine.gpus + self.request.speed.overhead_bytes
