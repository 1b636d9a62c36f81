"""Explanations of the planner: the best layout, why another one is slower, and why one does not fit."""

from __future__ import annotations

from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.memory import exceeds_memory, packed_model_bytes
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.step_time import StepItem
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.planner.search.request import EvaluatedLayout, LayoutRequest

GB = 1e9


def explain_answer(request: LayoutRequest, best: EvaluatedLayout) -> str:
    """Return the answer in one sentence."""
    if best.is_tight:
        return f"{request.model.name} may fit on {request.machine.gpus} x {request.machine.gpu.name} as {layout_text(best.layout)}: {explain_tight(best)}"
    room = best.memory.free_bytes / GB
    return (
        f"{request.model.name} fits on {request.machine.gpus} x {request.machine.gpu.name}: {layout_text(best.layout)}, "
        f"{best.step.total_s:.3g} s a step, {best.mfu:.0%} MFU, {room:.0f} GB of memory to spare on the fullest GPU"
    )


def explain_slower(evaluated: EvaluatedLayout, best: EvaluatedLayout) -> str:
    """Explain why a layout is worse than the best: at most two items that take longer, largest first. A faster one is less simple."""
    slower = evaluated.step.total_s / best.step.total_s - 1.0
    grown = sorted(
        ((evaluated.step.items[item] - best.step.items[item], item) for item in StepItem),
        key=lambda pair: (-pair[0], pair[1].value),
    )
    least_s = 0.1 * abs(evaluated.step.total_s - best.step.total_s)
    parts = [f"{item.value} +{seconds:.2g} s" for seconds, item in grown[:2] if seconds > least_s]
    more = count_axes(evaluated.layout) - count_axes(best.layout)
    pace = f"{abs(slower):.1%} {'slower' if slower > 0.0 else 'faster'}"
    if pace.startswith("0.0%"):
        pace = "as fast"
    but = "but " if slower <= 0.0 else ""
    extra = f", {but}with {more} more kind{'s' * (more > 1)} of parallelism" if more > 0 else ""
    return f"{pace}{extra}" + (f": {', '.join(parts)}" if parts else "")


def explain_tight(evaluated: EvaluatedLayout) -> str:
    """Warn about a layout that exceeds the memory by less than the error of the memory model."""
    held = evaluated.memory
    return (
        f"it needs about {held.total_bytes / GB:.1f} GB on the fullest GPU, which has {held.usable_bytes / GB:.1f} GB usable; "
        f"the estimate may be {held.error - 1.0:.0%} too high, so it may run: try a short run first"
    )


def count_axes(layout: Layout) -> int:
    """Return the number of kinds of parallelism that the layout uses."""
    return (layout.tensor > 1) + (layout.pipeline > 1) + (layout.context > 1) + (layout.expert > 1) + (layout.zero > 0)


def explain_misfit(evaluated: EvaluatedLayout, *, request: LayoutRequest | None = None) -> str:
    """Explain why a layout does not fit: what is too large, and by how much."""
    held = evaluated.memory
    largest = max(held.items, key=lambda part: held.items[part])
    if evaluated.exceeds_host and not exceeds_memory(held):
        host = evaluated.host_limit_bytes or 0.0
        text = f"needs {_gb(evaluated.host_bytes)} in the memory of each host, which has {_gb(host)}"
        if request is None:
            return text
        model, on = request.model.name, f"{request.machine.gpus} x {request.machine.gpu.name}"
        return f"{model} does not fit on {on}: {layout_text(evaluated.layout)} {text}"
    text = (
        f"needs {_gb(held.total_bytes)} on the fullest GPU, which has {_gb(held.usable_bytes)} usable; "
        f"{largest.value} alone take {_gb(held.items[largest])}"
    )
    if request is None:
        return text
    states = training_state_bytes(request)
    have = request.machine.gpus * request.machine.gpu.memory_bytes
    method = {
        TrainingMethod.FULL: "full training with Adam"
        if request.optimizer is OptimizerKind.ADAMW
        else f"full training with {request.optimizer.value}",
        TrainingMethod.LORA: "LoRA",
        TrainingMethod.QLORA: "QLoRA",
    }[request.method]
    devices = f"{request.machine.gpus} x {request.machine.gpu.name}"
    if states > have and request.offload is Offload.NONE and not request.optimizer.is_paged:
        return (
            f"{request.model.name} does not fit: parameters, gradients and states of {method} take {states / GB:,.0f} GB, "
            f"and {devices} have {have / 2**30:,.0f} GiB = {have / GB:,.0f} GB"
        )
    return (
        f"{request.model.name} does not fit on {devices}: the smallest layout, {layout_text(evaluated.layout)}, {text}"
    )


def _gb(count: float) -> str:
    """Format gigabytes with one decimal below 10 GB, so that 2.2 GB of 2.1 GB shows a difference."""
    return f"{count / GB:,.1f} GB" if count < 10 * GB else f"{count / GB:,.0f} GB"


def training_state_bytes(request: LayoutRequest) -> float:
    """Return the bytes of parameters, gradients and optimizer states, each stored once: 16 per parameter with Adam in mixed precision, 10 with
    8-bit moments, 9 with 4-bit ones.

    Source: S. Rajbhandari et al., "ZeRO", 2020, section 3.1.
    """
    count = float(request.model.parameters)
    if request.method is TrainingMethod.FULL:
        moments = request.optimizer.moments_bytes
        return (8.0 + (8.0 if moments is None else moments)) * count
    frozen = (
        2.0 * count
        if request.method is TrainingMethod.LORA
        else packed_model_bytes(request.model, Layout(), request.stack)
    )
    return frozen + count * request.adapter_share * 16.0
