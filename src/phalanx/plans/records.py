"""The planner's answer as plain records, for page, `--json` and picture.

Names contain units; a `Estimate` is an estimate with its 80 % interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import Layout, layout_to_json

NamedAmounts = tuple[tuple[str, float], ...]  # parts of a total, in the planner's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate and its 80 % interval."""

    mid: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """Checkpoint cost of a layout. `interval_s` is the optimal interval; `goodput` is the remaining share of time."""

    bytes: float
    write_s: float
    interval_s: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """One evaluated layout.

    Attributes:
        memory_bytes: items on the fullest GPU; `used_bytes` is their sum, `usable_bytes` the limit for a program; `used_low_bytes` and
            `used_high_bytes` are the 80 % interval.
        step_items_s: parts of one step; `step_s` is the total.
        train_s, gpu_hours, usd: for all tokens; None without a number of tokens or a price.
        host_bytes: in the memory of each host: what was put there, or has no room on the GPU. `host_limit_bytes`: that memory; None if it is not
            known. `is_tight_on_host`: buffers beside them may have no room there.
        why: comparison with the best layout, as text.
    """

    layout: Layout
    memory_bytes: NamedAmounts
    used_bytes: float
    usable_bytes: float
    step_items_s: NamedAmounts
    step_s: Estimate
    tokens_per_s: float
    mfu: float
    train_s: Estimate | None = None
    gpu_hours: Estimate | None = None
    usd: Estimate | None = None
    checkpoint_cost: CheckpointCost | None = None
    why: str = ""
    used_low_bytes: float = 0.0
    used_high_bytes: float = 0.0
    host_bytes: float = 0.0
    host_limit_bytes: float | None = None
    is_tight_on_host: bool = False

    @property
    def free_bytes(self) -> float:
        """Free memory; negative if the layout does not fit."""
        return self.usable_bytes - self.used_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the memory of the GPU is inside the 80 % interval of what is used: it may fit or not."""
        return self.used_low_bytes <= self.usable_bytes < self.used_high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One entry of `--explain`: name, symbolic formula, numbers of this plan, and source."""

    name: str
    symbols: str
    numbers: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """What the model writes for one step: `group` answers of `answer` tokens (mean) for each prompt of `prompt` tokens."""

    prompt: int
    answer: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSamples:
    """Samples of `mean` tokens, at most `longest`, put together by `packing`, under the first layout.

    Attributes:
        positions: computed for one sequence, on average; `tokens` of them count.
        wasted: share of the computed positions that are no tokens.
        packed_speed: tokens per second with packing, relative to this; None if they are packed.
    """

    mean: int
    longest: int
    packing: str
    positions: float
    tokens: float
    wasted: float
    packed_speed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEffect:
    """What an option of the request does to the best layout: the same layout without it.

    Attributes:
        saved_bytes: of the fullest GPU; negative where the option needs more.
        added_s: to a step; negative where the option makes it faster.
    """

    option: str
    without: LayoutFigures
    without_fits: bool
    saved_bytes: float
    added_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The planner's whole answer.

    Attributes:
        request: the request in one line: model, method, GPUs, batch.
        model: its name; the picture divides its `layers`.
        price: price of a GPU-hour with its date, as text; "" if unknown.
        layouts: layouts that fit, best first; `losers` are worse or do not fit, with the reason.
        simple: `fsdp=N` over all GPUs, to compare with the best; None if it does not exist, or one layout was given. `simple_fits`: it has room.
        step_tokens: trained in one step.
        effects: of the options that are not at their defaults, on the first layout.
        alternatives: alternatives that fit, if nothing fits.
        single_layout: only the given layout was evaluated.
        formulas: those of the best or the given layout.
        next_command: the suggested next command.
    """

    request: str
    model: str
    layers: int
    nodes: int
    gpus_per_node: int
    gpu: str
    seq: int
    global_batch: int
    tokens: float | None
    method: str
    stack: str
    price: str
    fits: bool
    reason: str
    layouts: tuple[LayoutFigures, ...] = ()
    losers: tuple[LayoutFigures, ...] = ()
    simple: LayoutFigures | None = None
    simple_fits: bool = False
    effects: tuple[ShownEffect, ...] = ()
    step_tokens: int = 0
    rollout: ShownRollout | None = None
    samples: ShownSamples | None = None
    optimizer: str = "adamw"
    offload: str = "none"
    alternatives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    single_layout: bool = False
    formulas: tuple[Formula, ...] = ()
    next_command: str = ""

    @property
    def gpus(self) -> int:
        """Total number of devices."""
        return self.nodes * self.gpus_per_node


def as_json(answer: PlanAnswer) -> dict[str, Any]:
    """Build the document of `--json` and `--save`: `fits`, `reason` and `layouts` first."""
    return {
        "fits": answer.fits,
        "reason": answer.reason,
        "layouts": [_layout(one) for one in answer.layouts],
        "losers": [_layout(one) for one in answer.losers],
        "simple": None if answer.simple is None else {**_layout(answer.simple), "fits": answer.simple_fits},
        "effects": [_effect(one) for one in answer.effects],
        "smallest": list(answer.alternatives),
        "notes": list(answer.notes),
        "model": {"name": answer.model, "layers": answer.layers},
        "machine": {
            "nodes": answer.nodes,
            "gpus_per_node": answer.gpus_per_node,
            "gpus": answer.gpus,
            "gpu": answer.gpu,
        },
        "asked": {
            "seq": answer.seq,
            "global_batch": answer.global_batch,
            "tokens": answer.tokens,
            "method": answer.method,
            "step_tokens": answer.step_tokens,
            "rollout": None
            if answer.rollout is None
            else {"prompt": answer.rollout.prompt, "answer": answer.rollout.answer, "group": answer.rollout.group},
            "samples": None if answer.samples is None else _samples(answer.samples),
            "optimizer": answer.optimizer,
            "offload": answer.offload,
            "stack": answer.stack,
            "price": answer.price,
            "text": answer.request,
        },
        "formulas": [
            {"name": one.name, "formula": one.symbols, "numbers": one.numbers, "source": one.source}
            for one in answer.formulas
        ],
    }


def _samples(one: ShownSamples) -> dict[str, Any]:
    return {
        "mean_length": one.mean,
        "longest": one.longest,
        "packing": one.packing,
        "positions": one.positions,
        "tokens": one.tokens,
        "wasted": one.wasted,
        "packed_speed": one.packed_speed,
    }


def _layout(one: LayoutFigures) -> dict[str, Any]:
    return {
        "layout": layout_to_json(one.layout),
        "text": layout_text(one.layout),
        "ranks": one.layout.ranks,
        "memory": {
            "total_bytes": one.used_bytes,
            "usable_bytes": one.usable_bytes,
            "room_bytes": one.free_bytes,
            "low_bytes": one.used_low_bytes,
            "high_bytes": one.used_high_bytes,
            "tight": one.is_tight,
            "host_bytes": one.host_bytes,
            "host_limit_bytes": one.host_limit_bytes if one.host_bytes else None,
            "tight_on_host": one.is_tight_on_host,
            "items": dict(one.memory_bytes),
        },
        "step": {**_range(one.step_s, "_s"), "items": dict(one.step_items_s)},
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "train": None if one.train_s is None else _range(one.train_s, "_s"),
        "gpu_hours": None if one.gpu_hours is None else _range(one.gpu_hours, ""),
        "usd": None if one.usd is None else _range(one.usd, ""),
        "checkpoint": None if one.checkpoint_cost is None else _saving(one.checkpoint_cost),
        "why": one.why,
    }


def _effect(one: ShownEffect) -> dict[str, Any]:
    return {
        "option": one.option,
        "saved_bytes": one.saved_bytes,
        "added_s": one.added_s,
        "without": {**_layout(one.without), "fits": one.without_fits},
    }


def _range(one: Estimate, unit: str) -> Mapping[str, float]:
    return {f"mid{unit}": one.mid, f"low{unit}": one.low, f"high{unit}": one.high}


def _saving(one: CheckpointCost) -> Mapping[str, float]:
    return {"bytes": one.bytes, "write_s": one.write_s, "interval_s": one.interval_s, "goodput": one.goodput}
