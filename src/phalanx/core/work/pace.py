"""How fast a job's steps ran on one model of device: one measurement of each attempt, kept on the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.core.ids import Epoch

PACE_STEPS_MIN: Final = (
    20  # fewer steps show compilation and warm-up rather than the pace; also what a median is taken over
)
STEP_MAX_S: Final = 86_400.0  # a program may report anything
COUNT_MAX: Final = 1 << 53  # steps and tokens that a float holds exactly
PACES_KEPT: Final = 8  # on a job: the newest attempts


class TimedStep(NamedTuple):
    """One step as rank 0 reported it. `at_s`: Unix time of its end; `seconds`: its length, None if unknown."""

    step: int
    at_s: float
    seconds: float | None
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPace:
    """The pace of a run, as its rank 0 reports it.

    Attributes:
        steps: reported by the present processes so far.
        step_s: median time from the end of one step to that of the next, over the newest steps.
        tokens: in one step of the whole job, median; 0 if not reported.
    """

    steps: int
    step_s: float
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPace:
    """The newest pace of one attempt, and what it ran on.

    Attributes:
        model: of its devices, as the node names it.
        ranks, devices: of the whole gang, which is of one model.
    """

    epoch: Epoch
    model: str
    ranks: int
    devices: int
    pace: StepPace


def with_pace(paces: tuple[MeasuredPace, ...], measured: MeasuredPace) -> tuple[MeasuredPace, ...]:
    """The paces with one more, if it is plausible; it replaces the attempt's earlier one if it is based on twice as many steps; else unchanged.

    So a run writes its pace as often as its steps double, not with every report.
    """
    pace = measured.pace
    plausible = 0.0 < pace.step_s <= STEP_MAX_S and 0 <= pace.tokens <= COUNT_MAX and pace.steps <= COUNT_MAX
    if pace.steps < PACE_STEPS_MIN or not plausible or not measured.devices:
        return paces
    known = next((one for one in paces if one.epoch == measured.epoch), None)
    if known is not None and measured.pace.steps < 2 * known.pace.steps:
        return paces
    return (*[one for one in paces if one.epoch != measured.epoch], measured)[-PACES_KEPT:]
