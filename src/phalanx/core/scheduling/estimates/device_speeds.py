"""The speed of a job on each model of the fleet, combined from several sources in the order of their confidence.

| source | what it is | may move a running job |
|---|---|---|
| observed | steps that attempts of this job, or of jobs like it, reported | yes |
| calibrated | rates of matrix multiplications that `phalanx calibrate` measured on these devices | only beside an observed speed |
| planned | the planner's step times of the job's model | yes |
| stated | the table `speeds` of the job | yes |
| peak | dated peak FLOP/s of the model | no |

Only ratios count. A source that knows models which an earlier one does not adds them, scaled by the models that both know; without such a
model it adds nothing. So what is observed on one model serves as the base for the ratios of the others. Peak FLOP/s, and a calibration
of devices on which the job never reported a step, say nothing about a job that may be bound by its data: they order models that the user
did not, and no more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from phalanx.core.fleet.summary import model_fits
from phalanx.core.scheduling.needs import Need


class SpeedSource(enum.StrEnum):
    """Where a speed comes from; the first is the surest."""

    OBSERVED = "observed"
    CALIBRATED = "calibrated"
    PLANNED = "planned"
    STATED = "stated"
    PEAK = "peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """What is known of devices whatever runs on them: measured and peak FLOP/s by model as nodes name it; models without are left out."""

    calibrated: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)


NO_FACTS: Final = SpeedFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEvidence:
    """The speeds that one source knows, by number of the model; None for unknown. `runs`: how many runs an observation is based on."""

    source: SpeedSource
    speeds: tuple[float | None, ...]
    runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """The speed on each model as a share of the fastest.

    Attributes:
        speeds: empty if nothing is known, or all are equal.
        sources: of each model's speed, None for a model of which nothing is known, which counts as the slowest; empty if nothing is known.
        runs: of the observation; 0 without one.
    """

    speeds: tuple[float, ...] = ()
    sources: tuple[SpeedSource | None, ...] = ()
    runs: int = 0

    @property
    def guessed(self) -> frozenset[int]:
        """Models whose speed must not move a running job."""
        sure = {SpeedSource.OBSERVED, SpeedSource.PLANNED, SpeedSource.STATED}
        if SpeedSource.OBSERVED in self.sources:
            sure.add(SpeedSource.CALIBRATED)
        return frozenset(number for number, source in enumerate(self.sources) if source not in sure)

    @property
    def moves_jobs(self) -> bool:
        """Whether it knows two models well enough to move a running job from one to the other."""
        sure = {speed for number, speed in enumerate(self.speeds) if number not in self.guessed}
        return len(sure) > 1

    def source_text(self, number: int) -> str:
        """The source for users: `observed, 3 runs`; the weakest of the two that the ratio to the fastest model stands on."""
        if not self.speeds:
            return ""
        order = list(SpeedSource)
        found = [
            source for source in (self.sources[number], self.sources[self.speeds.index(1.0)]) if source is not None
        ]
        if not found:
            return "unknown"
        source = max(found, key=order.index)
        return _SOURCE_TEXTS[source].format(runs=f"{self.runs} run{'' if self.runs == 1 else 's'}")


_SOURCE_TEXTS: Final = {
    SpeedSource.OBSERVED: "observed, {runs}",
    SpeedSource.CALIBRATED: "by the calibration",
    SpeedSource.PLANNED: "by its plan",
    SpeedSource.STATED: "as its speeds say",
    SpeedSource.PEAK: "by peak FLOP/s",
}
NO_ESTIMATE: Final = SpeedEstimate()
_DIGITS: Final = 2  # of a share that was measured: runs differ by more, and each new value makes a new class of jobs


def combined(models: int, evidence: Sequence[SpeedEvidence]) -> SpeedEstimate:
    """The estimate of all sources, given in the order of their confidence, for so many models."""
    found: dict[int, float] = {}
    sources: dict[int, SpeedSource] = {}
    runs = 0
    for one in evidence:
        known = {number: speed for number, speed in enumerate(one.speeds) if speed is not None and speed > 0.0}
        both = [found[number] / speed for number, speed in known.items() if number in found]
        if found and not both:
            continue
        scale = median(both) if both else 1.0
        for number, speed in known.items():
            if number not in found:
                found[number], sources[number] = speed * scale, one.source
                runs = one.runs or runs
    if len(found) < 2:
        return NO_ESTIMATE
    fastest, slowest = max(found.values()), min(found.values())
    exact = set(sources.values()) <= {SpeedSource.STATED}
    shares = [found.get(number, slowest) / fastest for number in range(models)]
    speeds = tuple(share if exact else max(round(share, _DIGITS), 0.01) for share in shares)
    if min(speeds) == max(speeds):
        speeds = ()
    return SpeedEstimate(speeds=speeds, sources=tuple(sources.get(number) for number in range(models)), runs=runs)


def by_model(models: Sequence[str], table: Mapping[str, float]) -> tuple[float | None, ...]:
    """The speeds of a table whose models are named as by the nodes."""
    return tuple(table.get(model) for model in models)


def by_table(
    models: Sequence[str], table: Sequence[tuple[str, float]], *, rest: bool = True
) -> tuple[float | None, ...]:
    """The speeds of a table whose models are named as in a request, empty for an empty table.

    The last matching line counts, so that a general name can stand before an exact one. With `rest`, a model that the table does not name
    is assumed to be as slow as the slowest named one: a job moves there only if nothing else is free.
    """
    if not table:
        return ()
    slowest = min(speed for _, speed in table) if rest else None
    found: list[float | None] = []
    for model in models:
        named = [speed for name, speed in table if model and model_fits(model, 0, name, 0)]
        found.append(named[-1] if named else slowest)
    return tuple(found)


def fastest_first(needs: tuple[Need, ...], speeds: tuple[float, ...]) -> tuple[Need, ...]:
    """The alternatives in the order of their speed per gang; equal ones in the order of preference. Those without devices stay as they are."""
    if not speeds or len(needs) < 2 or not needs[0].milli:
        return needs
    return tuple(sorted(needs, key=lambda need: -max(speeds[kind] for kind in need.kinds) * need.milli))


def speed_ratio_text(ratio: float) -> str:
    """A ratio of speeds in words: 2.1x faster, 1.3x slower."""
    times = max(ratio, 1.0 / ratio)
    return f"{times:.{1 if times < 9.95 else 0}f}".removesuffix(".0") + ("x faster" if ratio >= 1.0 else "x slower")
