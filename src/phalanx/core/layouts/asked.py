"""What the planner is asked, and what it answers. Records alone; units are in the names."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.performance.coefficients import Physics, Stack
from phalanx.core.performance.machine import Machine
from phalanx.core.performance.memory import Memory
from phalanx.core.performance.model import Model
from phalanx.core.performance.step import Method, StepTime
from phalanx.core.work.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question.

    Attributes:
        seq: positions of one sequence.
        global_batch: sequences per step over all ranks.
        tokens: to train on; None where nobody says.
        layout: judge this one alone.
        adapter_share: of all parameters, how many LoRA's adapters have.
    """

    model: Model
    machine: Machine
    physics: Physics
    stack: Stack
    seq: int
    global_batch: int
    tokens: float | None = None
    method: Method = Method.FULL
    precision: str = "bf16"
    layout: Layout | None = None
    adapter_share: float = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What saving costs. `interval_s` is Daly's optimum; `goodput` the share of time that is kept then, failures included."""

    bytes: float
    write_s: float
    stall_s: float
    interval_s: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One layout.

    Attributes:
        step: its expected time by item; `low_s` and `high_s` are the 80 % interval of the whole.
        mfu: model FLOP/s over the devices' dense 16-bit peak, recomputation not counted.
        train_s, gpu_hours, cost_usd: of all tokens, as (low, expected, high), without failures; None where no tokens, or no price.
        fits: into the memory of the device, as far as the memory model can tell (`core.performance.memory.refused`).
        why: what speaks for it, or what it loses to the best.
    """

    layout: Layout
    memory: Memory
    step: StepTime
    low_s: float
    high_s: float
    tokens_per_s: float
    mfu: float
    checkpoint: Checkpoint
    train_s: tuple[float, float, float] | None = None
    gpu_hours: tuple[float, float, float] | None = None
    cost_usd: tuple[float, float, float] | None = None
    fits: bool = True
    why: str = ""

    @property
    def tight(self) -> bool:
        """Whether it fits only if the memory model errs to the safe side: above the device's memory by less than its usual error."""
        return self.fits and self.memory.room_bytes < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A change of the question after which something fits."""

    what: str
    method: Method
    gpus: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All of it.

    Attributes:
        reason: one sentence: what fits how, or why nothing does.
        layouts: those that fit, best first, one for each way to split.
        losers: ways that fit worse or do not fit, each with its reason.
        smallest: where nothing fits, what would.
        judged: how many layouts were looked at.
    """

    fits: bool
    reason: str
    layouts: tuple[Judged, ...]
    losers: tuple[Judged, ...]
    smallest: tuple[Smaller, ...]
    judged: int
