"""Search all layouts of a model on a machine; return the best of each way to split, and why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import Layout, Recompute
from phalanx.planner.cost.host_memory import exceeds_host
from phalanx.planner.cost.memory import MemoryEstimate, estimate_memory
from phalanx.planner.cost.step_time import StepTimeCalculator
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.planner.search.candidates import (
    ParallelDegrees,
    build_layout,
    enumerate_degrees,
    enumerate_interleavings,
    enumerate_micro_batches,
    enumerate_recomputations,
    enumerate_shardings,
    with_interleaving,
)
from phalanx.planner.search.evaluation import (
    complete_layout,
    evaluate_layout,
    step_time_calculator,
    training_task,
    validate_request,
)
from phalanx.planner.search.explanations import (
    count_axes,
    explain_answer,
    explain_misfit,
    explain_slower,
    explain_tight,
)
from phalanx.planner.search.request import (
    EvaluatedLayout,
    FittingChange,
    LayoutAnswer,
    LayoutRequest,
    batch_grain,
    next_batch,
)

AXIS_COST: Final = 0.01
"""Share of the step that is added for each kind of parallelism, so that the simpler of two equally fast layouts wins. Half of the mean
loss of the planner's choices where several layouts were measured (benchmarks.planner)."""
SPARE_SHARE: Final = 0.04
"""Share of device memory that every layout of the search leaves free: half of the mean error of the memory model (benchmarks.planner).
A layout that the user gives may use all memory."""
GROWTH_MAX: Final = 256  # the search for a number of GPUs that fits ends at this multiple of the request


@dataclass(frozen=True, slots=True)
class _TimedLayout:
    layout: Layout
    seconds: float
    order: float


def plan_layouts(request: LayoutRequest, *, top: int = 5) -> LayoutAnswer:
    """Answer a planning request: evaluate the given layout, or search all layouts.

    Raises:
        BadRequest: the request or its layout is invalid.
    """
    validate_request(request)
    if request.layout is not None:
        return _evaluate_given(request, complete_layout(request, request.layout))
    costs = step_time_calculator(request)
    best: dict[tuple[int, ...], _TimedLayout] = {}
    nearest: dict[tuple[int, ...], tuple[float, Layout]] = {}
    count = 0
    for split in enumerate_degrees(request):
        for layout, held in _candidates(request, split):
            count += 1
            way = (split.tensor, split.pipeline, split.context, split.expert, layout.zero, layout.replicate > 1)
            if not _has_room(request, layout, held):
                over = held.total_bytes
                if way not in nearest or over < nearest[way][0]:
                    nearest[way] = (over, layout)
                continue
            for found in _timed(request, split, layout, costs):
                if way not in best or found.order < best[way].order:
                    best[way] = found
    ranked = sorted(best.values(), key=lambda found: (found.order, str(found.layout)))
    if not ranked:
        return _nothing_fits(
            request, [layout for _, layout in sorted(nearest.values(), key=lambda one: (one[0], str(one[1])))], count
        )
    first = evaluate_layout(request, ranked[0].layout, costs=costs)
    others = [_evaluate_slower(request, found.layout, first, costs) for found in ranked[1:top]]
    layouts = (replace(first, why="fastest that fits"), *others)
    shown = {_family(one.layout) for one in layouts}
    slower = [found.layout for found in ranked[top:] if _add_if_new(found.layout, shown)][:3]
    losers = [_evaluate_slower(request, layout, first, costs) for layout in slower]
    misfits = sorted((one for way, one in nearest.items() if way not in best), key=lambda one: (one[0], str(one[1])))
    too_large = [layout for _, layout in misfits if _add_if_new(layout, shown)][:3]
    losers += [_evaluate_misfit(request, layout, costs) for layout in too_large]
    return LayoutAnswer(
        fits=True,
        reason=explain_answer(request, first),
        layouts=layouts,
        rejected=tuple(losers),
        fitting_changes=(),
        evaluated=count,
    )


def _evaluate_given(request: LayoutRequest, layout: Layout) -> LayoutAnswer:
    evaluated = evaluate_layout(request, layout)
    if evaluated.fits:
        return LayoutAnswer(
            fits=True,
            reason=explain_answer(request, evaluated),
            layouts=(replace(evaluated, why=explain_tight(evaluated) if evaluated.is_tight else "given layout"),),
            rejected=(),
            fitting_changes=(),
            evaluated=1,
        )
    evaluated = replace(evaluated, why=explain_misfit(evaluated))
    return LayoutAnswer(
        fits=False,
        reason=f"{layout_text(layout)} does not fit: {evaluated.why}",
        layouts=(),
        rejected=(evaluated,),
        fitting_changes=_smaller(request),
        evaluated=1,
    )


def _candidates(request: LayoutRequest, split: ParallelDegrees) -> Iterator[tuple[Layout, MemoryEstimate]]:
    """Yield, for each micro-batch, the cheapest recomputation and its shardings that fit; if none fits, the smallest ones."""
    task = training_task(request)
    for size in enumerate_micro_batches(request, split):
        any_fits = False
        for again in enumerate_recomputations(request):
            fitting = hybrid = paged = False
            for zero, shard, replicate in enumerate_shardings(request, split):
                if hybrid and zero == 3 and replicate > 1:
                    continue  # the narrowest that fits; wider ones gather over more of the network
                layout = build_layout(
                    split, request=request, zero=zero, shard=shard, replicate=replicate, micro_batch=size
                )
                layout = layout if again is Recompute.NONE else replace(layout, recompute=again)
                held = estimate_memory(task, layout, request.machine.gpu, request.stack)
                if _has_room(request, layout, held):
                    fitting = any_fits = True
                    paged = paged or held.paged_bytes > 0.0
                    hybrid = zero == 3
                    yield layout, held
                elif again is Recompute.FULL and size == 1:
                    yield layout, held
            if fitting and not paged:  # recomputation may cost less than pages that move
                break
        if not any_fits:
            return  # larger micro-batches need more


def _has_room(request: LayoutRequest, layout: Layout, held: MemoryEstimate) -> bool:
    """Return whether device and host have room."""
    on_device = held.free_bytes >= SPARE_SHARE * held.usable_bytes
    return on_device and not exceeds_host(held.host_bytes, layout, request.machine)


def _timed(
    request: LayoutRequest, split: ParallelDegrees, layout: Layout, costs: StepTimeCalculator
) -> Iterator[_TimedLayout]:
    task = training_task(request)
    ways = count_axes(layout)
    for runs in enumerate_interleavings(request, split, layout.micro_batches // request.updates):
        run = with_interleaving(layout, runs)
        if runs > 1 and not _has_room(request, run, estimate_memory(task, run, request.machine.gpu, request.stack)):
            continue
        seconds = costs.step_time(run).total_s
        yield _TimedLayout(run, seconds, seconds * (1.0 + AXIS_COST * ways))


def _evaluate_slower(
    request: LayoutRequest, layout: Layout, first: EvaluatedLayout, costs: StepTimeCalculator
) -> EvaluatedLayout:
    evaluated = evaluate_layout(request, layout, costs=costs)
    return replace(evaluated, why=explain_slower(evaluated, first))


def _evaluate_misfit(request: LayoutRequest, layout: Layout, costs: StepTimeCalculator) -> EvaluatedLayout:
    evaluated = evaluate_layout(request, layout, costs=costs)
    return replace(evaluated, why=explain_misfit(evaluated))


def _family(layout: Layout) -> tuple[bool, ...]:
    return (layout.tensor > 1, layout.pipeline > 1, layout.context > 1, layout.expert > 1, layout.zero == 3)


def _add_if_new(layout: Layout, shown: set[tuple[bool, ...]]) -> bool:
    """Add the kinds of parallelism of a layout to `shown`; return whether they are new."""
    family = _family(layout)
    if family in shown:
        return False
    shown.add(family)
    return True


def _nothing_fits(request: LayoutRequest, leanest: list[Layout], count: int) -> LayoutAnswer:
    costs = step_time_calculator(request)
    losers = tuple(_evaluate_misfit(request, layout, costs) for layout in leanest[:3])
    if losers:
        reason, smallest = explain_misfit(losers[0], request=request), _smaller(request)
    else:  # memory is not the reason, and more GPUs would not divide the batch better
        reason = f"no layout of {request.model.name} divides over {request.machine.gpus} GPUs with a global batch of {request.global_batch}"
        smallest = ()
    return LayoutAnswer(
        fits=False, reason=reason, layouts=(), rejected=losers, fitting_changes=smallest, evaluated=count
    )


def _smaller(request: LayoutRequest) -> tuple[FittingChange, ...]:
    """Return another layout for the same request, or else adapters on the same GPUs, and the smallest number of GPUs that fits."""
    if request.layout is not None:
        best = plan_layouts(replace(request, layout=None), top=1).layouts
        if best:
            return (
                FittingChange(
                    method=request.method,
                    gpus=request.machine.gpus,
                    layout=best[0].layout,
                ),
            )
    out = []
    for method in (TrainingMethod.LORA, TrainingMethod.QLORA):
        if request.method is TrainingMethod.FULL or (
            request.method is TrainingMethod.LORA and method is TrainingMethod.QLORA
        ):
            layout = _first_fit(replace(request, method=method, layout=None))
            if layout is not None:
                out.append(FittingChange(method=method, gpus=request.machine.gpus, layout=layout))
                break
    grown = _more_nodes(request)
    if grown is not None:
        out.append(grown)
    return tuple(out)


def _more_nodes(request: LayoutRequest) -> FittingChange | None:
    machine = request.machine
    low, nodes = machine.nodes, machine.nodes
    layout = None
    while layout is None and nodes < machine.nodes * GROWTH_MAX:
        low, nodes = nodes, nodes * 2
        layout = _layout_on(request, nodes)
    grain = max(1, low // 4)  # round numbers: from 256 nodes on in steps of 64
    while layout is not None and nodes - low > grain:
        middle = low + max(1, (nodes - low) // (2 * grain)) * grain
        fitting = _layout_on(request, middle)
        if fitting is None:
            low = middle
        else:
            nodes, layout = middle, fitting
    if layout is None:
        return None
    gpus = nodes * machine.gpus_per_node
    wanted = f"{nodes}x{machine.gpu.name}:{machine.gpus_per_node}"
    return FittingChange(method=request.method, gpus=gpus, gpu_request=wanted, layout=layout)


def _batch_on(request: LayoutRequest, nodes: int) -> int:
    """Return the global batch, rounded up so that it divides among so many nodes."""
    gpus, written = nodes * request.machine.gpus_per_node, request.written
    grain = batch_grain(gpus) if written is None else batch_grain(gpus, written.group, written.updates)
    return next_batch(request.global_batch, grain)


def _layout_on(request: LayoutRequest, nodes: int) -> Layout | None:
    machine = replace(request.machine, nodes=nodes)
    return _first_fit(replace(request, machine=machine, global_batch=_batch_on(request, nodes), layout=None))


def _first_fit(request: LayoutRequest) -> Layout | None:
    for split in enumerate_degrees(request):
        for layout, held in _candidates(request, split):
            if _has_room(request, layout, held):
                return layout
    return None
