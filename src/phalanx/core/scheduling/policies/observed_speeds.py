"""What a policy has learned of the speed of jobs on models of devices, from the steps that their attempts reported.

Only equal work is compared: runs of one job, or of jobs with the same command; of other jobs of the same name only each one's own runs
on several models, as a ratio. The unit is work per device and second: tokens if all runs report them, else steps, which are equal work
only for the same number of ranks. Runs on one model count by their median.

Called by the policy; changes are events of the board's owner. Bounded: `NAMES_MAX` names of `RUNS_PER_NAME` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.core.scheduling.estimates.run_time_prediction import JobTraits
from phalanx.core.scheduling.policy import NO_SAMPLES, SpeedSamples
from phalanx.core.work.pace import MeasuredPace

NAMES_MAX: Final = 10_000  # as many as have statistics of run times
RUNS_PER_NAME: Final = 64  # the newest, as for run times
_Name = tuple[str, str]
_Unit = tuple[str, int]  # tokens or steps, and ranks; 0 for any number of ranks


@dataclass(frozen=True, slots=True)
class _Run:
    job_id: JobId
    traits: JobTraits
    measured: MeasuredPace


class ObservedSpeeds:
    """The runs of the newest jobs, by their owner and name."""

    def __init__(self) -> None:
        self._runs: dict[_Name, dict[tuple[JobId, Epoch], _Run]] = {}

    def copy(self) -> ObservedSpeeds:
        """A copy for a trial."""
        other = ObservedSpeeds()
        other._runs = dict(self._runs)  # `learn` replaces the runs of a name, so that the copies may share them
        return other

    def learn(self, job_id: JobId, traits: JobTraits, measured: MeasuredPace) -> bool:
        """Learn from an attempt, or from more steps of one; returns whether this is new."""
        name, key = (traits.user, traits.name), (job_id, measured.epoch)
        runs = self._runs.get(name, {})
        known = runs.get(key)
        if known is not None and known.measured == measured:
            return False
        self._runs.pop(name, None)
        runs = self._runs[name] = {one: run for one, run in runs.items() if one != key}  # newest last
        runs[key] = _Run(job_id, traits, measured)
        if len(runs) > RUNS_PER_NAME:
            del runs[next(iter(runs))]
        if len(self._runs) > NAMES_MAX:
            del self._runs[next(iter(self._runs))]
        return True

    def samples(self, job_id: JobId, traits: JobTraits) -> SpeedSamples:
        """The speeds of such a job on the models on which it, or jobs like it, ran.

        The narrowest of these that covers several models: its own runs, those of jobs with the same command and number of GPUs, the
        ratios within each job of its name. If none does, the model that its own kind ran on, as a base for other sources.
        """
        runs = list(self._runs.get((traits.user, traits.name), {}).values())
        if not runs:
            return NO_SAMPLES
        own = [one for one in runs if one.job_id == job_id]
        alike = [one for one in runs if (one.traits.command, one.traits.gpus) == (traits.command, traits.gpus)]
        by_job: dict[JobId, list[_Run]] = {}
        for one in runs:
            by_job.setdefault(one.job_id, []).append(one)
        for groups in ([own], [alike], list(by_job.values())):
            found = _combined([_compared([one.measured for one in group]) for group in groups])
            if len(found.speeds) > 1:
                return found
        return max((_compared([one.measured for one in group]) for group in (alike, own)), key=lambda one: one.runs)


def _compared(measured: Sequence[MeasuredPace]) -> SpeedSamples:
    """The speed on each model in the unit that covers the most models, then the most runs."""
    best = NO_SAMPLES
    for unit in _units(measured):
        by_model: dict[str, list[float]] = {}
        for one in measured:
            speed = _speed(one, unit)
            if speed > 0.0:
                by_model.setdefault(one.model, []).append(speed)
        found = SpeedSamples(
            speeds={model: median(speeds) for model, speeds in sorted(by_model.items())},
            runs=sum(len(speeds) for speeds in by_model.values()),
        )
        if (len(found.speeds), found.runs) > (len(best.speeds), best.runs):
            best = found
    return best


def _units(measured: Iterable[MeasuredPace]) -> list[_Unit]:
    """Tokens before steps, equal ranks before any ranks. Steps of different numbers of ranks are not comparable."""
    ranks = sorted({one.ranks for one in measured}, reverse=True)
    return [*(("tokens", count) for count in ranks), *(("steps", count) for count in ranks), ("tokens", 0)]


def _speed(measured: MeasuredPace, unit: _Unit) -> float:
    """Work per device and second in this unit; 0 if the run cannot be expressed in it."""
    what, ranks = unit
    if ranks not in (0, measured.ranks):
        return 0.0
    work = measured.pace.tokens if what == "tokens" else 1
    return work / measured.pace.step_s / measured.devices


def _combined(groups: Sequence[SpeedSamples]) -> SpeedSamples:
    """The median over the groups of the speed on each model, relative to the model that most of them cover."""
    several = [one for one in groups if len(one.speeds) > 1]
    if not several:
        return NO_SAMPLES
    count: Callable[[str], int] = lambda model: sum(model in one.speeds for one in several)  # noqa: E731  # a key
    base = max(sorted({model for one in several for model in one.speeds}), key=count)
    used = [one for one in several if base in one.speeds]
    models = sorted({model for one in used for model in one.speeds})
    return SpeedSamples(
        speeds={
            model: median([one.speeds[model] / one.speeds[base] for one in used if model in one.speeds])
            for model in models
        },
        runs=sum(one.runs for one in used),
    )
