"""The steps of the demo's job as they were made, and which of them were made twice. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.wire.api.output import StepView


class Point(NamedTuple):
    """One step with its loss."""

    step: int
    loss: float


class Redone(NamedTuple):
    """A step that a later life of the gang made again."""

    step: int
    first: float
    again: float


@dataclass(slots=True)
class Curve:
    """Grows by what the head tells; a step told twice counts once."""

    steps: list[StepView] = field(default_factory=list)
    _known: set[tuple[int, int, int]] = field(default_factory=set)

    def add(self, steps: Iterable[StepView]) -> None:
        """Append steps in the order reported."""
        for step in steps:
            key = (step.epoch, step.generation, step.step)
            if step.rank == 0 and key not in self._known:
                self._known.add(key)
                self.steps.append(step)

    @property
    def newest(self) -> StepView | None:
        """The step made last."""
        return max(self.steps, key=lambda step: (step.epoch, step.generation, step.step), default=None)

    def newest_of(self, epoch: int) -> StepView | None:
        """The last step that an attempt made."""
        return max(
            (step for step in self.steps if step.epoch == epoch),
            key=lambda step: (step.generation, step.step),
            default=None,
        )

    def first_after(self, epoch: int) -> StepView | None:
        """The first step that a later attempt made."""
        later = [step for step in self.steps if step.epoch > epoch]
        return min(later, key=lambda step: (step.epoch, step.generation, step.step), default=None)

    def split(self) -> tuple[list[Point], list[Point]]:
        """Kept and lost points. Lost is what an older life made from where a newer one began."""
        kept: list[Point] = []
        lost: list[Point] = []
        limit: int | None = None
        for life in sorted({(step.epoch, step.generation) for step in self.steps}, reverse=True):
            own = [step for step in self.steps if (step.epoch, step.generation) == life]
            for step in own:
                if step.loss is not None:
                    (kept if limit is None or step.step < limit else lost).append(Point(step.step, step.loss))
            begin = min(step.step for step in own)
            limit = begin if limit is None else min(limit, begin)
        return sorted(kept), sorted(lost)

    def redone(self) -> list[Redone]:
        """Steps made twice, with the losses of the first and the last time, by step."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        twice: set[int] = set()
        for step in sorted(self.steps, key=lambda step: (step.epoch, step.generation)):
            if step.loss is not None:
                twice.update({step.step} & first.keys())
                first.setdefault(step.step, step.loss)
                last[step.step] = step.loss
        return [Redone(step, first[step], last[step]) for step in sorted(twice)]

    def largest_difference(self) -> float | None:
        """Between first and redone losses; 0 means that the run repeated itself exactly. None when nothing was redone."""
        return max((abs(each.again - each.first) for each in self.redone()), default=None)
