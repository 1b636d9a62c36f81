"""An answer of the planner as plain figures: what the page, `--json` and the picture show alike. Records alone.

Units are in the names; a `Range` is the middle and the two ends of the 80 % interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.core.work.layout import Layout, layout_to_json
from phalanx.core.work.planned import layout_text

Named = tuple[tuple[str, float], ...]  # items of a whole, in the planner's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An estimate and its 80 % interval."""

    mid: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """The same of so many."""
        return Range(mid=self.mid * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Checkpoints of one layout's training. `interval_s` loses least; `goodput` is then the share of time that is kept."""

    bytes: float
    write_s: float
    interval_s: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One layout judged.

    Attributes:
        memory_bytes: items on the fullest GPU; `used_bytes` is their sum, `usable_bytes` what the GPU gives to a program.
        step_items_s: what one step is spent on; `step_s` is the whole.
        train_s, gpu_hours, usd: of all tokens; None where no number of tokens, or no price, was given.
        why: what speaks for or against it beside the best, in words.
    """

    layout: Layout
    memory_bytes: Named
    used_bytes: float
    usable_bytes: float
    step_items_s: Named
    step_s: Range
    tokens_per_s: float
    mfu: float
    train_s: Range | None = None
    gpu_hours: Range | None = None
    usd: Range | None = None
    saving: Saving | None = None
    why: str = ""

    @property
    def room_bytes(self) -> float:
        """Left over; negative where it does not fit."""
        return self.usable_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One line of `--explain`: what is computed, the formula in symbols, with this plan's numbers, and where it is from."""

    name: str
    symbols: str
    numbers: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The whole answer.

    Attributes:
        asked: what was planned, in one line: model, method, GPUs, batch.
        model: its name; `layers` of it are what the picture cuts.
        price: what a GPU-hour costs and as of when, in words; "" where nobody knows.
        layouts: best first, all of them fit; `losers` did not win or do not fit, with the reason.
        smallest: what would fit, where this does not.
        judged_alone: one layout was given, and nothing searched.
        formulas: of the best layout, or of the one that was judged.
        next: what to type now.
    """

    asked: str
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
    layouts: tuple[Figures, ...] = ()
    losers: tuple[Figures, ...] = ()
    smallest: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judged_alone: bool = False
    formulas: tuple[Formula, ...] = ()
    next: str = ""

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus_per_node


def as_json(told: Told) -> dict[str, Any]:
    """What `--json` prints and `--save` keeps: `fits`, `reason` and `layouts` first."""
    return {
        "fits": told.fits,
        "reason": told.reason,
        "layouts": [_layout(one) for one in told.layouts],
        "losers": [_layout(one) for one in told.losers],
        "smallest": list(told.smallest),
        "notes": list(told.notes),
        "model": {"name": told.model, "layers": told.layers},
        "machine": {"nodes": told.nodes, "gpus_per_node": told.gpus_per_node, "gpus": told.gpus, "gpu": told.gpu},
        "asked": {
            "seq": told.seq,
            "global_batch": told.global_batch,
            "tokens": told.tokens,
            "method": told.method,
            "stack": told.stack,
            "price": told.price,
            "text": told.asked,
        },
        "formulas": [
            {"name": one.name, "formula": one.symbols, "numbers": one.numbers, "source": one.source}
            for one in told.formulas
        ],
    }


def _layout(one: Figures) -> dict[str, Any]:
    return {
        "layout": layout_to_json(one.layout),
        "text": layout_text(one.layout),
        "ranks": one.layout.ranks,
        "memory": {
            "total_bytes": one.used_bytes,
            "usable_bytes": one.usable_bytes,
            "room_bytes": one.room_bytes,
            "items": dict(one.memory_bytes),
        },
        "step": {**_range(one.step_s, "_s"), "items": dict(one.step_items_s)},
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "train": None if one.train_s is None else _range(one.train_s, "_s"),
        "gpu_hours": None if one.gpu_hours is None else _range(one.gpu_hours, ""),
        "usd": None if one.usd is None else _range(one.usd, ""),
        "checkpoint": None if one.saving is None else _saving(one.saving),
        "why": one.why,
    }


def _range(one: Range, unit: str) -> Mapping[str, float]:
    return {f"mid{unit}": one.mid, f"low{unit}": one.low, f"high{unit}": one.high}


def _saving(one: Saving) -> Mapping[str, float]:
    return {"bytes": one.bytes, "write_s": one.write_s, "interval_s": one.interval_s, "goodput": one.goodput}
