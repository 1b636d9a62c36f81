"""The training steps of the demo's job, and which of them ran repeated. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.wire.api.output import StepView


class LossPoint(NamedTuple):
    """A step and its loss."""

    step: int
    loss: float


class RepeatedStep(NamedTuple):
    """A step that a later attempt or generation repeated, with both losses."""

    step: int
    first: float
    second: float


@dataclass(slots=True)
class LossCurve:
    """The steps that the head has reported; duplicates are dropped."""

    steps: list[StepView] = field(default_factory=list)
    _known: set[tuple[int, int, int]] = field(default_factory=set)

    def add(self, steps: Iterable[StepView]) -> None:
        """Append steps in the reported order."""
        for step in steps:
            key = (step.epoch, step.generation, step.step)
            if step.rank == 0 and key not in self._known:
                self._known.add(key)
                self.steps.append(step)

    @property
    def newest(self) -> StepView | None:
        """The latest step."""
        return max(self.steps, key=lambda step: (step.epoch, step.generation, step.step), default=None)

    def newest_of(self, epoch: int) -> StepView | None:
        """Return the latest step of an attempt."""
        return max(
            (step for step in self.steps if step.epoch == epoch),
            key=lambda step: (step.generation, step.step),
            default=None,
        )

    def first_after(self, epoch: int) -> StepView | None:
        """Return the first step of any later attempt."""
        later = [step for step in self.steps if step.epoch > epoch]
        return min(later, key=lambda step: (step.epoch, step.generation, step.step), default=None)

    def kept_and_lost(self) -> tuple[list[LossPoint], list[LossPoint]]:
        """Return kept and lost points. A point is lost if a newer attempt or generation started at or before its step."""
        kept: list[LossPoint] = []
        lost: list[LossPoint] = []
        limit: int | None = None
        for run in sorted({(step.epoch, step.generation) for step in self.steps}, reverse=True):
            own = [step for step in self.steps if (step.epoch, step.generation) == run]
            for step in own:
                if step.loss is not None:
                    (kept if limit is None or step.step < limit else lost).append(LossPoint(step.step, step.loss))
            begin = min(step.step for step in own)
            limit = begin if limit is None else min(limit, begin)
        return sorted(kept), sorted(lost)

    def repeated_steps(self) -> list[RepeatedStep]:
        """Return repeated steps with their first and last loss, by step."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        repeated: set[int] = set()
        for step in sorted(self.steps, key=lambda step: (step.epoch, step.generation)):
            if step.loss is not None:
                repeated.update({step.step} & first.keys())
                first.setdefault(step.step, step.loss)
                last[step.step] = step.loss
        return [RepeatedStep(step, first[step], last[step]) for step in sorted(repeated)]

    def largest_difference(self) -> float | None:
        """Return the largest difference between first and repeated losses; None if no step was repeated."""
        return max((abs(each.second - each.first) for each in self.repeated_steps()), default=None)
