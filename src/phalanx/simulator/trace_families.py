"""Families of generated traces: each varies one thing that a schedule depends on, so that a policy can be judged on more than one workload.

`draw_trace` draws a trace of a family by a seed. A family comes with the fleet that gives it its load. Used by `phalanx simulate --family`
and by the benchmark of policies.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.simulator.fleet import TraceNode, equal_nodes
from phalanx.simulator.report import LARGE_GPUS
from phalanx.simulator.trace import Trace, TraceJob

GPUS_PER_NODE: Final = 8
SMALL_SIZES: Final = ((1, 0.8), (2, 0.1), (4, 0.1))  # GPUs and their shares among small jobs, nearly as on Philly
LARGE_SIZES: Final = ((8, 0.75), (16, 0.2), (32, 0.05))
TAIL_BEGIN: Final = 2.0  # of a Pareto tail, as a multiple of the median
LONGEST_S: Final = 30 * 86_400.0
BURST_GAP_S: Final = 20.0  # mean time between two submits of one burst: a script that submits a sweep
_HOUR_S, _DAY_S, _WEEK_S = 3600.0, 86_400.0, 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFamily:
    """A kind of workload.

    Attributes:
        about: what is special about it, for a list of families.
        jobs: number of jobs.
        nodes: nodes of `GPUS_PER_NODE` devices in its fleet.
        load: GPU-seconds of all jobs, divided by those of the fleet from the first submit to the last.
        large_share: share of jobs with `LARGE_GPUS` GPUs or more.
        median_s: median run time of small jobs, in seconds.
        large_factor: median run time of large jobs as a multiple of that.
        deviation: standard deviation of the logarithm of run times.
        tail: index of the Pareto distribution that run times past twice the median follow; 0 if they are log-normal there too.
        users: number of users; the trace has them in the place of virtual clusters. Some submit more than others, as 1 / rank.
        scripts: scripts of each user and size; jobs of one script have similar run times.
        own_deviation: deviation of the logarithm of run times of one script; the rest of `deviation` is between scripts.
        burst: mean number of jobs that are submitted together.
        day_depth, week_depth: how much the rate of submits falls at night, and at the weekend: 0 for not at all, 1 for to nothing.
    """

    about: str
    jobs: int = 3000
    nodes: int = 8
    load: float = 0.9
    large_share: float = 0.03
    median_s: float = 1800.0
    large_factor: float = 2.0
    deviation: float = 1.7
    tail: float = 0.0
    users: int = 30
    scripts: int = 2
    own_deviation: float = 0.4
    burst: float = 2.0
    day_depth: float = 0.0
    week_depth: float = 0.0

    @property
    def fleet(self) -> tuple[TraceNode, ...]:
        """Its nodes."""
        return equal_nodes(self.nodes, GPUS_PER_NODE)

    @property
    def repeats(self) -> bool:
        """Whether earlier jobs of a user say something about the next: less than half of the variance is within a script."""
        return 2 * self.own_deviation**2 < self.deviation**2


FAMILIES: Final[dict[str, TraceFamily]] = {
    "steady": TraceFamily(about="users repeat themselves; 3 % large gangs"),
    "office": TraceFamily(
        about="nights and weekends are quiet; users repeat themselves",
        load=0.85,
        large_share=0.05,
        day_depth=0.9,
        week_depth=0.8,
    ),
    "sweeps": TraceFamily(about="bursts of 30 similar jobs", burst=30.0, own_deviation=0.15, large_share=0.02),
    "mixed-bursts": TraceFamily(
        about="bursts of 40 unlike jobs, by day", burst=40.0, own_deviation=1.7, day_depth=0.8, large_share=0.04
    ),
    "heavy-tail": TraceFamily(
        about="a few jobs hold most of the work; users do not repeat themselves", load=0.95, tail=0.9, own_deviation=1.7
    ),
    "heavy-scripts": TraceFamily(
        about="a few scripts hold most of the work", load=1.0, tail=1.1, own_deviation=0.3, users=60
    ),
    "gangs": TraceFamily(
        about="60 % large gangs", load=0.8, jobs=1000, large_share=0.6, median_s=7200.0, large_factor=1.0, nodes=16
    ),
    "half-gangs": TraceFamily(
        about="30 % large gangs; users do not repeat themselves",
        load=1.0,
        jobs=1500,
        large_share=0.3,
        median_s=3600.0,
        own_deviation=1.7,
        nodes=16,
    ),
    "overload": TraceFamily(about="40 % more work than the fleet can do; users repeat themselves", load=1.4),
    "overload-unlike": TraceFamily(
        about="20 % more work than the fleet can do, 15 % large gangs; users do not repeat themselves",
        load=1.2,
        large_share=0.15,
        own_deviation=1.7,
        jobs=2000,
    ),
    "few-classes": TraceFamily(
        about="three users with one script for each size",
        users=3,
        scripts=1,
        deviation=1.2,
        own_deviation=0.3,
        load=1.0,
    ),
    "many-classes": TraceFamily(
        about="a thousand users, of whom most submit one or two jobs", users=1000, scripts=3, load=1.1, large_share=0.02
    ),
    "spare": TraceFamily(about="a fleet with room: load 0.6, 10 % large gangs", load=0.6, large_share=0.1, jobs=2000),
    "spare-unlike": TraceFamily(
        about="a fleet with room: load 0.7, 40 % large gangs; users do not repeat themselves",
        load=0.7,
        large_share=0.4,
        own_deviation=1.7,
        jobs=1500,
        nodes=16,
    ),
}


def family_named(name: str) -> TraceFamily:
    """Return the family of this name.

    Raises:
        BadRequest: it does not exist.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise BadRequest(f"unknown family of traces {name!r}", hint=f"one of: {', '.join(FAMILIES)}")
    return family


def draw_trace(family: TraceFamily, seed: int) -> Trace:
    """Draw a trace; equal seeds give equal traces. Times are whole seconds, and the first submit is at 0."""
    chance = random.Random(seed)  # not used for security
    users = _Users(family, chance)
    bursts = _bursts(family, chance)
    drawn: list[tuple[int, str, int, float]] = []  # burst, user, GPUs and run time
    for burst, (gpus, count) in enumerate(bursts):
        user, script = users.script()
        drawn += [(burst, f"user{user}", gpus, users.run_time_s(user, gpus, script)) for _ in range(count)]
    work_gpu_s = sum(gpus * run_s for _, _, gpus, run_s in drawn)
    span_s = work_gpu_s / (family.load * family.nodes * GPUS_PER_NODE)
    begins_s = _arrivals(family, len(bursts), span_s, chance)
    submits_s: list[float] = []
    previous, at_s = -1, 0.0
    for burst, *_ in drawn:
        at_s = at_s + chance.expovariate(1.0 / BURST_GAP_S) if burst == previous else begins_s[burst]
        submits_s.append(at_s)
        previous = burst
    first_s = min(submits_s)
    stretch = span_s / (max(submits_s) - first_s)  # bursts end after their begin: by a percent or so
    rows = sorted(
        (float(round((at_s - first_s) * stretch)), number, user, gpus, run_s)
        for number, (at_s, (_, user, gpus, run_s)) in enumerate(zip(submits_s, drawn, strict=True))
    )
    return Trace(
        jobs=tuple(
            TraceJob(id=f"{line}", submit_s=at_s, duration_s=run_s, gpus=gpus, virtual_cluster=user, line=line)
            for line, (at_s, _, user, gpus, run_s) in enumerate(rows, start=2)
        )
    )


def _bursts(family: TraceFamily, chance: random.Random) -> list[tuple[int, int]]:
    """GPUs and number of jobs of each burst. Exactly the stated share of jobs is large."""
    found: list[tuple[int, int]] = []
    large = round(family.large_share * family.jobs)
    for jobs, sizes in ((family.jobs - large, SMALL_SIZES), (large, LARGE_SIZES)):
        left = jobs
        while left:
            # Geometric, of this mean; gangs of whole nodes are submitted one or two at once.
            mean = family.burst if sizes is SMALL_SIZES else min(family.burst, 2.0)
            count = 1
            while count < left and chance.random() > 1.0 / mean:
                count += 1
            found.append((chance.choices([gpus for gpus, _ in sizes], [share for _, share in sizes])[0], count))
            left -= count
    chance.shuffle(found)
    return found


class _Users:
    """The users and their scripts. A burst is of one user and script."""

    def __init__(self, family: TraceFamily, chance: random.Random) -> None:
        self.family, self.chance = family, chance
        self.weights = list(accumulate(1.0 / rank for rank in range(1, family.users + 1)))
        self.deviations: dict[tuple[int, int, int], float] = {}  # of the logarithm, by user, GPUs and script

    def script(self) -> tuple[int, int]:
        """User, from 1, and number of the script of a burst."""
        user = bisect.bisect(self.weights, self.chance.random() * self.weights[-1]) + 1
        return user, self.chance.randrange(self.family.scripts)

    def run_time_s(self, user: int, gpus: int, script: int) -> float:
        """Run time of a job of this user's script for this number of GPUs."""
        family, chance = self.family, self.chance
        key = (user, gpus, script)
        own = min(family.own_deviation, family.deviation)
        if key not in self.deviations:
            self.deviations[key] = chance.gauss(0.0, (family.deviation**2 - own**2) ** 0.5)
        deviation = self.deviations[key] + chance.gauss(0.0, own)
        median_s = family.median_s * (family.large_factor if gpus >= LARGE_GPUS else 1.0)
        return float(max(1, round(min(median_s * self._with_tail(deviation), LONGEST_S))))

    def _with_tail(self, deviation: float) -> float:
        """Run time as a multiple of the median, for this deviation of its logarithm. The order stays if the tail is a Pareto one."""
        begin = math.log(TAIL_BEGIN)
        if not self.family.tail or deviation <= begin:
            return math.exp(deviation)
        normal = NormalDist(0.0, self.family.deviation)
        beyond = normal.cdf(-deviation) / normal.cdf(-begin)  # of the run times past the begin, the share past this one
        return float(TAIL_BEGIN * beyond ** (-1.0 / self.family.tail))


def _arrivals(family: TraceFamily, count: int, span_s: float, chance: random.Random) -> Sequence[float]:
    """Submit times of bursts over the span, in drawing order, at the rate of the family's days and weeks."""
    steps = max(1, int(span_s / _HOUR_S))
    step_s = span_s / steps
    total = list(accumulate(_rate(family, (number + 0.5) * step_s) for number in range(steps)))
    found = []
    for _ in range(count):
        step = bisect.bisect_left(total, chance.random() * total[-1])
        found.append((step + chance.random()) * step_s)
    return found


def _rate(family: TraceFamily, at_s: float) -> float:
    """Relative rate of submits; the trace begins on a Monday at midnight, and nights last from 20 to 8 o'clock."""
    night = not 8 <= at_s % _DAY_S / _HOUR_S < 20
    weekend = at_s % _WEEK_S >= 5 * _DAY_S
    return (1.0 - family.day_depth * night) * (1.0 - family.week_depth * weekend)
