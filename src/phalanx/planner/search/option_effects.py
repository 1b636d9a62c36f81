"""What the options of a request cost and save: the chosen layout beside itself without each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.sequence_lengths import SequenceBatching
from phalanx.planner.cost.training_task import Objective
from phalanx.planner.search.evaluation import evaluate_layout, training_task
from phalanx.planner.search.request import EvaluatedLayout, LayoutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionEffect:
    """One option of the request, and the same layout without it, which may not fit."""

    option: str
    without: EvaluatedLayout


def option_effects(request: LayoutRequest, chosen: EvaluatedLayout) -> tuple[OptionEffect, ...]:
    """Return the effect of each option that is not at its default, for the chosen layout.

    Without its objective, a training computes as many sequences: a pair of DPO has two.
    """
    return tuple(
        OptionEffect(option=option, without=evaluate_layout(plain, _same_sequences(request, plain, chosen.layout)))
        for option, plain in _without(request)
    )


def _same_sequences(request: LayoutRequest, plain: LayoutRequest, layout: Layout) -> Layout:
    if plain.objective is not request.objective:
        return training_task(request).computed(layout)
    if plain.samples is request.samples or request.samples is None or plain.samples is None:
        return layout
    # A pack holds several samples, so that as many of them are more sequences.
    more = request.samples.tokens / plain.samples.tokens
    return replace(layout, micro_batches=max(1, round(layout.micro_batches * more)))


def _without(request: LayoutRequest) -> Iterator[tuple[str, LayoutRequest]]:
    if request.objective is not Objective.CROSS_ENTROPY:
        plain = replace(request, objective=Objective.CROSS_ENTROPY)
        yield f"method {request.objective.value}", plain
    if request.optimizer is not OptimizerKind.ADAMW:
        yield f"optimizer {request.optimizer.value}", replace(request, optimizer=OptimizerKind.ADAMW)
    if request.offload is not Offload.NONE:
        yield f"offload {request.offload.value}", replace(request, offload=Offload.NONE)
    if request.samples is not None and request.samples.batching is not SequenceBatching.PADDED:
        padded = replace(request.samples, batching=SequenceBatching.PADDED)
        yield f"packing {request.samples.batching.value}", replace(request, samples=padded)
