"""The planner's reasons in words: what the best layout is, what another loses to it, and what does not fit."""

from __future__ import annotations

from phalanx.core.layouts.asked import Asked, Judged
from phalanx.core.performance.layer import PACKED_BYTES
from phalanx.core.performance.memory import REFUSED
from phalanx.core.performance.step import Item, Method
from phalanx.core.work.layout import Layout
from phalanx.core.work.planned import layout_text

GB = 1e9


def said(asked: Asked, best: Judged) -> str:
    """The answer in one sentence."""
    if best.tight:
        return f"{asked.model.name} may fit on {asked.machine.gpus} x {asked.machine.gpu.name} as {layout_text(best.layout)}: {tight(best)}"
    room = best.memory.room_bytes / GB
    return (
        f"{asked.model.name} fits on {asked.machine.gpus} x {asked.machine.gpu.name}: {layout_text(best.layout)}, "
        f"{best.step.total_s:.3g} s a step, {best.mfu:.0%} MFU, {room:.0f} GB of memory to spare on the fullest GPU"
    )


def lost_by(judged: Judged, best: Judged) -> str:
    """What costs it most beside the best: the items that grew, largest first, at most two."""
    slower = judged.step.total_s / best.step.total_s - 1.0
    grown = sorted(
        ((judged.step.items[item] - best.step.items[item], item) for item in Item),
        key=lambda pair: (-pair[0], pair[1].value),
    )
    parts = [
        f"{item.value} +{seconds:.2g} s"
        for seconds, item in grown[:2]
        if seconds > 0.1 * abs(judged.step.total_s - best.step.total_s) and seconds > 0
    ]
    more = axes(judged.layout) - axes(best.layout)
    simpler = f", and split in {more} more way{'s' * (more > 1)}" if more > 0 else ""
    return f"{slower:.1%} slower{simpler}" + (f": {', '.join(parts)}" if parts else "")


def tight(judged: Judged) -> str:
    """What to mind where it fits only by the memory model's error."""
    held = judged.memory
    return (
        f"it is expected to need {held.total_bytes / GB:.1f} GB on the fullest GPU, which gives {held.usable_bytes / GB:.1f} GB: "
        f"less over than the estimate may err by ({REFUSED - 1.0:.0%}), so it may run; try it before you count on it"
    )


def axes(layout: Layout) -> int:
    """Kinds of parallelism that the layout uses."""
    return (layout.tensor > 1) + (layout.pipeline > 1) + (layout.context > 1) + (layout.expert > 1) + (layout.zero > 0)


def misfit(judged: Judged, *, asked: Asked | None = None) -> str:
    """What is too large, and by how much."""
    held = judged.memory
    largest = max(held.items, key=lambda part: held.items[part])
    text = (
        f"needs {_gb(held.total_bytes)} on the fullest GPU, which gives {_gb(held.usable_bytes)}; "
        f"{largest.value} alone take {_gb(held.items[largest])}"
    )
    if asked is None:
        return text
    states = states_bytes(asked)
    have = asked.machine.gpus * asked.machine.gpu.memory_bytes
    method = {Method.FULL: "full training with Adam", Method.LORA: "LoRA", Method.QLORA: "QLoRA"}[asked.method]
    devices = f"{asked.machine.gpus} x {asked.machine.gpu.name}"
    if states > have:
        return (
            f"{asked.model.name} does not fit: parameters, gradients and states of {method} take {states / GB:,.0f} GB, "
            f"and {devices} have {have / 2**30:,.0f} GiB = {have / GB:,.0f} GB"
        )
    return f"{asked.model.name} does not fit on {devices}: the leanest layout, {layout_text(judged.layout)}, {text}"


def _gb(count: float) -> str:
    """One decimal where whole gigabytes would hide what is lacking: 2.2 GB of 2.1 GB."""
    return f"{count / GB:,.1f} GB" if count < 10 * GB else f"{count / GB:,.0f} GB"


def states_bytes(asked: Asked) -> float:
    """Parameters, gradients and optimizer states of all ranks together, each kept once: 16 bytes a parameter with Adam in mixed precision.

    Source: S. Rajbhandari et al., "ZeRO", 2020, section 3.1.
    """
    count = float(asked.model.parameters)
    if asked.method is Method.FULL:
        return 16.0 * count
    base = 2.0 if asked.method is Method.LORA else PACKED_BYTES
    return count * base + count * asked.adapter_share * 16.0
