"""The planner's reasons in words: what the best layout is, what another loses to it, and what does not fit."""

from __future__ import annotations

from phalanx.core.layouts.asked import Asked, Judged
from phalanx.core.performance.step import Item, Method

GB = 1e9


def said(asked: Asked, best: Judged) -> str:
    """The answer in one sentence."""
    room = best.memory.room_bytes / GB
    return (
        f"{asked.model.name} fits on {asked.machine.gpus} x {asked.machine.gpu.name}: {best.layout}, "
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
    return f"{slower:.1%} slower" + (f": {', '.join(parts)}" if parts else "")


def misfit(judged: Judged, *, asked: Asked | None = None) -> str:
    """What is too large, and by how much."""
    held = judged.memory
    largest = max(held.items, key=lambda part: held.items[part])
    text = (
        f"needs {held.total_bytes / GB:.0f} GB on the fullest GPU, which gives {held.usable_bytes / GB:.0f} GB; "
        f"{largest.value} alone take {held.items[largest] / GB:.0f} GB"
    )
    if asked is None:
        return text
    states = states_bytes(asked)
    have = asked.machine.gpus * asked.machine.gpu.memory_bytes
    method = {Method.FULL: "full training with Adam", Method.LORA: "LoRA", Method.QLORA: "QLoRA"}[asked.method]
    where = f"{asked.machine.gpus} x {asked.machine.gpu.name} have {have / GB:,.0f} GB"
    if states > have:
        return (
            f"{asked.model.name} does not fit: parameters, gradients and states of {method} take {states / GB:,.0f} GB, "
            f"and {where}"
        )
    return f"{asked.model.name} does not fit on {where}: the leanest layout, {judged.layout}, {text}"


def states_bytes(asked: Asked) -> float:
    """Parameters, gradients and optimizer states of all ranks together, each kept once: 16 bytes a parameter with Adam in mixed precision.

    Source: S. Rajbhandari et al., "ZeRO", 2020, section 3.1.
    """
    count = float(asked.model.parameters)
    if asked.method is Method.FULL:
        return 16.0 * count
    base = 2.0 if asked.method is Method.LORA else 0.52
    return count * base + count * asked.adapter_share * 16.0
