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
END_SLACK: Final = 0.1  # a stated rest is widened by this share of it: medians leave out saves, evaluations and stalls
TRUST_RESTS: Final = 1.5  # no statement of a job counts after so many times the rest that it stated first


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
        steps_left: to the planned total, which may be wrong; None if none was reported.
    """

    steps: int
    step_s: float
    tokens: int = 0
    steps_left: int | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedEnd:
    """When a job ends by its own progress. It is a claim of its user, so it counts for a bounded time: see `rest_s`.

    Times are run times of the job whose work is kept, over all attempts, so that an attempt that goes back to a checkpoint still has to
    run what it lost.

    Attributes:
        epoch, steps: of the attempt that stated it, and how many steps it had reported.
        served_s: when it was stated.
        left_s: what was left then: steps left, times their pace.
        trusted_until_s: from here on no statement of the job counts; set by its first one.
    """

    epoch: Epoch
    steps: int
    served_s: float
    left_s: float
    trusted_until_s: float

    def rest_s(self, served_s: float) -> float | None:
        """What the job still runs, widened; None if the statement does not count: it has passed, or an earlier one was too far off."""
        rest_s = self.served_s + (1.0 + END_SLACK) * self.left_s - served_s
        return rest_s if rest_s > 0.0 and served_s < self.trusted_until_s else None


def with_stated_end(known: StatedEnd | None, pace: StepPace, epoch: Epoch, served_s: float) -> StatedEnd | None:
    """What the job states now; the same object if nothing new: like a pace, it is replaced by one of twice as many steps or a new attempt.

    A later statement refines the end, but never extends the time for which the job is trusted. So a job that always states that it
    ends soon gains once, for no longer than 1.5 times what it stated first.
    """
    left = pace.steps_left
    if left is None or not 0 <= left <= COUNT_MAX or not _is_measured(pace):
        return known
    if known is not None and known.epoch == epoch and pace.steps < 2 * known.steps:
        return known
    left_s = left * pace.step_s
    trusted_until_s = served_s + TRUST_RESTS * left_s if known is None else known.trusted_until_s
    return StatedEnd(epoch=epoch, steps=pace.steps, served_s=served_s, left_s=left_s, trusted_until_s=trusted_until_s)


def _is_measured(pace: StepPace) -> bool:
    """Whether so many steps were reported that their median counts, and both are plausible."""
    return PACE_STEPS_MIN <= pace.steps <= COUNT_MAX and 0.0 < pace.step_s <= STEP_MAX_S


def with_pace(paces: tuple[MeasuredPace, ...], measured: MeasuredPace) -> tuple[MeasuredPace, ...]:
    """The paces with one more, if it is plausible; it replaces the attempt's earlier one if it is based on twice as many steps; else unchanged.

    So a run writes its pace as often as its steps double, not with every report.
    """
    pace = measured.pace
    if not (_is_measured(pace) and 0 <= pace.tokens <= COUNT_MAX and measured.devices):
        return paces
    known = next((one for one in paces if one.epoch == measured.epoch), None)
    if known is not None and measured.pace.steps < 2 * known.pace.steps:
        return paces
    return (*[one for one in paces if one.epoch != measured.epoch], measured)[-PACES_KEPT:]
