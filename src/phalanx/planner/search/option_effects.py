"""What the options of a request cost and save: the chosen layout beside itself without each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.search.evaluation import evaluate_layout
from phalanx.planner.search.request import EvaluatedLayout, LayoutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionEffect:
    """One option of the request, and the same layout without it, which may not fit."""

    option: str
    without: EvaluatedLayout


def option_effects(request: LayoutRequest, chosen: EvaluatedLayout) -> tuple[OptionEffect, ...]:
    """Return the effect of each option that is not at its default, for the chosen layout."""
    return tuple(
        OptionEffect(option=option, without=evaluate_layout(plain, chosen.layout))
        for option, plain in _without(request)
    )


def _without(request: LayoutRequest) -> Iterator[tuple[str, LayoutRequest]]:
    if request.optimizer is not OptimizerKind.ADAMW:
        yield f"optimizer {request.optimizer.value}", replace(request, optimizer=OptimizerKind.ADAMW)
    if request.offload is not Offload.NONE:
        yield f"offload {request.offload.value}", replace(request, offload=Offload.NONE)
