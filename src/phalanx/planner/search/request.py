"""The request to the planner and its answer. Records only; units are in the names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.memory import MemoryEstimate
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.step_time import StepTime
from phalanx.planner.cost.training_task import Objective, TrainingMethod
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.planner.serving.rollout import RolloutRequest


def batch_grain(gpus: int, group: int = 1, updates: int = 1) -> int:
    """Return what a batch must be a multiple of, so that it divides among the GPUs in each update, and into the answers to a prompt."""
    return math.lcm(gpus * updates, group)


def next_batch(least: int, grain: int) -> int:
    """Return the next multiple of `grain` from `least` on."""
    return -(-least // grain) * grain


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """One planning request.

    Attributes:
        seq: positions of one sequence.
        global_batch: sequences per step over all ranks.
        tokens: tokens to train on; None if unknown.
        layout: evaluate only this layout.
        adapter_share: parameters of the LoRA adapters as a share of all parameters.
        optimizer, offload, objective: as in `TrainingTask`. With a rollout, `seq` is the most of one answer with its prompt.
        samples: lengths of the samples and how they are put together; None if every sequence has `seq` positions.
        rollout: answers of a step of GRPO, or for another objective the lengths of those that exist; None if every sequence has `seq` positions.
    """

    model: ModelShape
    machine: Machine
    physics: Physics
    stack: Stack
    seq: int
    global_batch: int
    tokens: float | None = None
    method: TrainingMethod = TrainingMethod.FULL
    precision: str = "bf16"
    layout: Layout | None = None
    adapter_share: float = 0.005
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    offload: Offload = Offload.NONE
    objective: Objective = Objective.CROSS_ENTROPY
    samples: SampleBatches | None = None
    rollout: RolloutRequest | None = None

    @property
    def written(self) -> RolloutRequest | None:
        """The answers that the model writes in every step."""
        return self.rollout if self.objective is Objective.GRPO else None

    @property
    def updates(self) -> int:
        """Optimizer steps in one step, among which its sequences are divided."""
        return 1 if self.written is None else self.written.updates

    @property
    def mean_seq(self) -> int:
        """Mean tokens that count of one sequence: of answers that end before the limit, and of samples without their pads."""
        if self.samples is not None:
            return max(1, round(self.samples.tokens))
        return self.seq if self.rollout is None else self.rollout.prompt + self.rollout.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEstimate:
    """Cost of checkpoints. `interval_s` is Daly's optimum; `goodput` the share of useful time at it, failures included."""

    bytes: float
    write_s: float
    stall_s: float
    interval_s: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedLayout:
    """One evaluated layout.

    Attributes:
        step: expected time by item; `low_s` and `high_s` are the 80 % interval of the whole step.
        mfu: model FLOP/s over the dense 16-bit peak of the devices, without recomputation.
        train_s, gpu_hours, cost_usd: for all tokens, as (low, expected, high), without failures; None without tokens or price.
        host_bytes: in the memory of one host, for all its ranks; `tight_on_host` if it may have no room for the buffers beside them;
            `host_limit_bytes`: that memory, if it is known; `exceeds_host` if it stores more there.
        fits: it is expected to fit into device memory (`core.performance.memory.refused`).
        why: reason to choose it, or why it is worse than the best.
    """

    layout: Layout
    memory: MemoryEstimate
    step: StepTime
    low_s: float
    high_s: float
    tokens_per_s: float
    mfu: float
    checkpoint: CheckpointEstimate
    train_s: tuple[float, float, float] | None = None
    gpu_hours: tuple[float, float, float] | None = None
    cost_usd: tuple[float, float, float] | None = None
    host_bytes: float = 0.0
    tight_on_host: bool = False
    host_limit_bytes: float | None = None
    exceeds_host: bool = False
    fits: bool = True
    why: str = ""

    @property
    def is_tight(self) -> bool:
        """Whether it exceeds the device memory by less than the error of the memory model, so that it may fit."""
        return self.fits and self.memory.free_bytes < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """A change of the request after which a layout fits. `gpu_request`: the GPUs in the grammar of jobs, if there are more."""

    method: TrainingMethod
    gpus: int
    gpu_request: str = ""
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAnswer:
    """The answer to one request.

    Attributes:
        reason: one sentence: the best layout, or why none fits.
        layouts: layouts that fit, best first, one for each way to split.
        rejected: slower layouts and layouts that do not fit, each with its reason.
        fitting_changes: if nothing fits, changes after which a layout fits.
        evaluated: number of layouts that were evaluated.
    """

    fits: bool
    reason: str
    layouts: tuple[EvaluatedLayout, ...]
    rejected: tuple[EvaluatedLayout, ...]
    fitting_changes: tuple[FittingChange, ...]
    evaluated: int
