"""Lemons: nodes that fail gangs more than others do. From marks against nodes to a score, a place at the end of the line, and a drain.

Each failure that says something of its node is a mark (`core.lifecycle.facts.Mark`): 1 for a lost node or a device the driver gives up, less
for what is as often the program's doing. Marks fade, so that a repaired node is believed again. A node is judged against its own fleet:
where all nodes fail often, none is a lemon. Pure: numbers in, a judgement out. The controller keeps marks on node records, so that they
survive it.

Test: the fleet's mean of the other nodes is what chance alone would give this node. With marks as a Poisson count of that mean, the
probability of so many is the tail; a lemon is one at least three times the mean and too unlikely for chance over the whole fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId

HALF_LIFE_S: Final = 14 * 86_400.0
"""Of a mark. Assumed: at 6.5 failures per 1,000 node-days a sound node is marked once in five months, and repairs take days."""
TIMES_MEAN: Final = 3.0  # so much worse than the others at least, whatever the numbers say
MARKS_MIN: Final = 1.5  # less is no pattern: two whole failures, one of them some days ago, or many lesser ones
LAST_CHANCE: Final = 0.05  # of the whole fleet showing one such node by chance: used last
DRAIN_CHANCE: Final = 0.001  # the same: drained
FLOOR: Final = 6.5e-3 * 20.2
"""Marks that a sound node bears at least by published rates: 6.5 per 1,000 node-days (see `failure_rate`) times the 20.2 days that a mark
lasts with the half-life above (14 / ln 2). A young fleet with no failures has no mean of its own yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What counts against a node: a sum as of `at_s`."""

    sum: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemon:
    """A node judged bad. `chance`: of some node of a sound fleet looking so."""

    marks: float
    mean: float
    chance: float

    @property
    def drain(self) -> bool:
        """Whether that is beyond doubt."""
        return self.chance < DRAIN_CHANCE

    @property
    def why(self) -> str:
        """`fails gangs 9.8 times as often as the others (3.0 marks against 0.3)`."""
        times = self.marks / self.mean
        return f"fails gangs {times:.1f} times as often as the others ({self.marks:.1f} marks against {self.mean:.2f})"


def faded(marks: Marks, now_s: float) -> float:
    """The sum as of now. A clock set back fades nothing."""
    age_s = max(0.0, now_s - marks.at_s)
    return float(marks.sum * 2.0 ** (-age_s / HALF_LIFE_S))


def marked(marks: Marks, weight: float, now_s: float) -> Marks:
    """With one more."""
    return Marks(sum=faded(marks, now_s) + weight, at_s=now_s)


def lemons(fleet: Mapping[NodeId, Marks], now_s: float) -> dict[NodeId, Lemon]:
    """The lemons of a fleet, by node; none in a fleet of one, which has nothing to compare with. Cost: the number of nodes."""
    sums = {node_id: faded(marks, now_s) for node_id, marks in fleet.items()}
    if len(sums) < 2:
        return {}
    total, found = sum(sums.values()), {}
    for node_id, own in sums.items():
        mean = max(FLOOR, (total - own) / (len(sums) - 1))
        if own < MARKS_MIN or own < TIMES_MEAN * mean:
            continue
        chance = min(1.0, len(sums) * poisson_tail(own, mean))
        if chance < LAST_CHANCE:
            found[node_id] = Lemon(marks=own, mean=mean, chance=chance)
    return found


def poisson_tail(count: float, mean: float) -> float:
    """P(K >= count) of a Poisson count K of that mean; between two whole numbers in equal ratios, since faded marks are no whole ones.

    Formula: sum(exp(-m) m^k / k!, k >= count), summed from `count` outwards on the side that is the smaller.
    """
    least = math.floor(count)
    tail = _tail(least, mean)
    if count == least or tail == 0.0:
        return tail
    return float(tail * (_tail(least + 1, mean) / tail) ** (count - least))


def _tail(least: int, mean: float) -> float:
    if least <= 0:
        return 1.0
    if mean <= 0.0:
        return 0.0
    upper = least > mean
    k = least if upper else least - 1
    term = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    total = 0.0
    while term > total * 1e-16 and k >= 0:
        total += term
        term *= mean / (k + 1) if upper else k / mean
        k += 1 if upper else -1
    return total if upper else max(0.0, 1.0 - total)
