"""The layout that everyone knows: samples and states sharded over all devices (`fsdp=N`), to stand beside the best one.

A program without ZeRO 3 shards what it can: Megatron's distributed optimizer only the states.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.work.layouts.layout import Recompute
from phalanx.planner.search.candidates import (
    ParallelDegrees,
    build_layout,
    enumerate_micro_batches,
    enumerate_recomputations,
)
from phalanx.planner.search.evaluation import evaluate_layout, step_time_calculator
from phalanx.planner.search.explanations import explain_misfit, explain_slower
from phalanx.planner.search.request import EvaluatedLayout, LayoutRequest


def simple_layout(request: LayoutRequest, best: EvaluatedLayout | None) -> EvaluatedLayout | None:
    """Return `fsdp=N` over all devices with the micro-batch and recomputation that make it fastest, or if none fits, smallest.

    `why` compares it with `best`, or says why it does not fit. None for one device, or if the global batch
    cannot be divided among the devices.
    """
    gpus = request.machine.gpus
    if gpus == 1 or request.global_batch % (gpus * request.updates):
        return None
    zero = max(request.stack.zeros)
    split = ParallelDegrees(tensor=1, pipeline=1, context=1, expert=1, data=gpus)
    costs = step_time_calculator(request)
    fitting: list[EvaluatedLayout] = []
    large: list[EvaluatedLayout] = []
    for size in enumerate_micro_batches(request, split):
        for again in enumerate_recomputations(request):
            layout = build_layout(
                split,
                request=request,
                zero=zero,
                shard=gpus if zero else 1,
                replicate=1 if zero else gpus,
                micro_batch=size,
            )
            layout = layout if again is Recompute.NONE else replace(layout, recompute=again)
            found = evaluate_layout(request, layout, costs=costs)
            (fitting if found.memory.free_bytes >= 0.0 and not found.exceeds_host else large).append(found)
    if not fitting:
        least = min(large, key=lambda one: (one.memory.total_bytes, str(one.layout)))
        return replace(least, fits=False, why=explain_misfit(least))
    fastest = min(fitting, key=lambda one: (one.step.total_s, str(one.layout)))
    if best is None or fastest.layout == best.layout:
        return fastest
    return replace(fastest, why=explain_slower(fastest, best))
