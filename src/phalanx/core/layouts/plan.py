"""Search all layouts of a model on a machine; return the best of each way to split, and why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.layouts.asked import Answer, Asked, Judged, Smaller
from phalanx.core.layouts.candidates import (
    Split,
    interleavings,
    layout_from,
    micro_batches,
    recomputations,
    shardings,
    splits,
    with_runs,
)
from phalanx.core.layouts.judge import check_asked, checked, costs_of, judge, task_of
from phalanx.core.layouts.why import axes, lost_by, misfit, said, tight
from phalanx.core.performance.memory import Memory, memory_of
from phalanx.core.performance.step import LayerCosts, Method
from phalanx.core.work.layout import Layout, Recompute
from phalanx.core.work.planned import layout_text

AXIS_COST: Final = 0.01
"""Share of the step that is added for each kind of parallelism, so that the simpler of two equally fast layouts wins. Half of the mean
loss of the planner's choices where several layouts were measured (benchmarks.planner)."""
SPARE: Final = 0.04
"""Share of device memory that every layout of the search leaves free: half of the mean error of the memory model (benchmarks.planner).
A layout that the user gives may use all memory."""
GROWTH_MAX: Final = 256  # the search for a number of GPUs that fits ends at this multiple of the request


@dataclass(frozen=True, slots=True)
class _TimedLayout:
    layout: Layout
    seconds: float
    order: float


def plan(request: Asked, *, top: int = 5) -> Answer:
    """Answer a planning request: evaluate the given layout, or search all layouts.

    Raises:
        BadRequest: the request or its layout is invalid.
    """
    check_asked(request)
    if request.layout is not None:
        return _evaluate_given(request, checked(request, request.layout))
    costs = costs_of(request)
    best: dict[tuple[int, ...], _TimedLayout] = {}
    nearest: dict[tuple[int, ...], tuple[float, Layout]] = {}
    count = 0
    for split in splits(request):
        for layout, held in _candidates(request, split):
            count += 1
            way = (split.tensor, split.pipeline, split.context, split.expert, layout.zero, layout.replicate > 1)
            if not _has_room(held):
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
    first = judge(request, ranked[0].layout, costs=costs)
    others = [_evaluate_slower(request, found.layout, first, costs) for found in ranked[1:top]]
    layouts = (replace(first, why="fastest that fits"), *others)
    shown = {_family(one.layout) for one in layouts}
    slower = [found.layout for found in ranked[top:] if _add_if_new(found.layout, shown)][:3]
    losers = [_evaluate_slower(request, layout, first, costs) for layout in slower]
    misfits = sorted((one for way, one in nearest.items() if way not in best), key=lambda one: (one[0], str(one[1])))
    too_large = [layout for _, layout in misfits if _add_if_new(layout, shown)][:3]
    losers += [_evaluate_misfit(request, layout, costs) for layout in too_large]
    return Answer(
        fits=True, reason=said(request, first), layouts=layouts, losers=tuple(losers), smallest=(), judged=count
    )


def _evaluate_given(request: Asked, layout: Layout) -> Answer:
    evaluated = judge(request, layout)
    if evaluated.fits:
        return Answer(
            fits=True,
            reason=said(request, evaluated),
            layouts=(replace(evaluated, why=tight(evaluated) if evaluated.tight else "given layout"),),
            losers=(),
            smallest=(),
            judged=1,
        )
    evaluated = replace(evaluated, why=misfit(evaluated))
    return Answer(
        fits=False,
        reason=f"{layout_text(layout)} does not fit: {evaluated.why}",
        layouts=(),
        losers=(evaluated,),
        smallest=_smaller(request),
        judged=1,
    )


def _candidates(request: Asked, split: Split) -> Iterator[tuple[Layout, Memory]]:
    """Yield, for each micro-batch, the cheapest recomputation and its shardings that fit; if none fits, the smallest ones."""
    task = task_of(request)
    for size in micro_batches(request, split):
        any_fits = False
        for again in recomputations(request):
            fitting = hybrid = False
            for zero, shard, replicate in shardings(request, split):
                if hybrid and zero == 3 and replicate > 1:
                    continue  # the narrowest that fits; wider ones gather over more of the network
                layout = layout_from(
                    split, request=request, zero=zero, shard=shard, replicate=replicate, micro_batch=size
                )
                layout = layout if again is Recompute.NONE else replace(layout, recompute=again)
                held = memory_of(task, layout, request.machine.gpu, request.stack)
                if _has_room(held):
                    fitting = any_fits = True
                    hybrid = zero == 3
                    yield layout, held
                elif again is Recompute.FULL and size == 1:
                    yield layout, held
            if fitting:
                break
        if not any_fits:
            return  # larger micro-batches need more


def _has_room(held: Memory) -> bool:
    return held.room_bytes >= SPARE * held.usable_bytes


def _timed(request: Asked, split: Split, layout: Layout, costs: LayerCosts) -> Iterator[_TimedLayout]:
    task = task_of(request)
    ways = axes(layout)
    for runs in interleavings(request, split, layout.micro_batches):
        run = with_runs(layout, runs)
        if runs > 1 and not _has_room(memory_of(task, run, request.machine.gpu, request.stack)):
            continue
        seconds = costs.step(run).total_s
        yield _TimedLayout(run, seconds, seconds * (1.0 + AXIS_COST * ways))


def _evaluate_slower(request: Asked, layout: Layout, first: Judged, costs: LayerCosts) -> Judged:
    evaluated = judge(request, layout, costs=costs)
    return replace(evaluated, why=lost_by(evaluated, first))


def _evaluate_misfit(request: Asked, layout: Layout, costs: LayerCosts) -> Judged:
    evaluated = judge(request, layout, costs=costs)
    return replace(evaluated, why=misfit(evaluated))


def _family(layout: Layout) -> tuple[bool, ...]:
    return (layout.tensor > 1, layout.pipeline > 1, layout.context > 1, layout.expert > 1, layout.zero == 3)


def _add_if_new(layout: Layout, shown: set[tuple[bool, ...]]) -> bool:
    """Add the kinds of parallelism of a layout to `shown`; return whether they are new."""
    family = _family(layout)
    if family in shown:
        return False
    shown.add(family)
    return True


def _nothing_fits(request: Asked, leanest: list[Layout], count: int) -> Answer:
    costs = costs_of(request)
    losers = tuple(_evaluate_misfit(request, layout, costs) for layout in leanest[:3])
    if losers:
        reason, smallest = misfit(losers[0], request=request), _smaller(request)
    else:  # memory is not the reason, and more GPUs would not divide the batch better
        reason = f"no layout of {request.model.name} divides over {request.machine.gpus} GPUs with a global batch of {request.global_batch}"
        smallest = ()
    return Answer(fits=False, reason=reason, layouts=(), losers=losers, smallest=smallest, judged=count)


def _smaller(request: Asked) -> tuple[Smaller, ...]:
    """Return another layout for the same request, or else adapters on the same GPUs, and the smallest number of GPUs that fits."""
    if request.layout is not None:
        best = plan(replace(request, layout=None), top=1).layouts
        if best:
            return (
                Smaller(what="another layout", method=request.method, gpus=request.machine.gpus, layout=best[0].layout),
            )
    out = []
    for method in (Method.LORA, Method.QLORA):
        if request.method is Method.FULL or (request.method is Method.LORA and method is Method.QLORA):
            layout = _first_fit(replace(request, method=method, layout=None))
            if layout is not None:
                out.append(
                    Smaller(what=f"--method {method.value}", method=method, gpus=request.machine.gpus, layout=layout)
                )
                break
    grown = _more_nodes(request)
    if grown is not None:
        out.append(grown)
    return tuple(out)


def _more_nodes(request: Asked) -> Smaller | None:
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
    batch = _batch_on(request, nodes)
    larger = f" --global-batch {batch}" if batch != request.global_batch else ""
    what = f"{nodes}x{machine.gpu.name}:{machine.gpus_per_node}{larger}"
    return Smaller(what=what, method=request.method, gpus=gpus, layout=layout)


def _batch_on(request: Asked, nodes: int) -> int:
    """Return the global batch rounded up to a multiple of the number of GPUs."""
    gpus = nodes * request.machine.gpus_per_node
    return -(-request.global_batch // gpus) * gpus


def _layout_on(request: Asked, nodes: int) -> Layout | None:
    machine = replace(request.machine, nodes=nodes)
    return _first_fit(replace(request, machine=machine, global_batch=_batch_on(request, nodes), layout=None))


def _first_fit(request: Asked) -> Layout | None:
    for split in splits(request):
        for layout, held in _candidates(request, split):
            if _has_room(held):
                return layout
    return None
