"""Detects bad nodes: nodes that fail jobs more often than the others. They are used last, or drained.

Each failure that may be a node's fault is a mark (`core.lifecycle.transitions.FaultMark`): weight 1 for a lost node or a failed device, less for
failures that programs cause as often. Marks decay, so that a repaired node is trusted again. A node is compared with its own fleet: if all
nodes fail often, none is a bad node. Pure functions; marks are stored on node records.

Test: by chance alone, a node would have the mean marks of the other nodes. With marks as a Poisson count of that mean, the tail gives the
probability of as many as it has. A bad node has at least three times the mean, and its marks are too unlikely by chance in the whole fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId

HALF_LIFE_S: Final = 14 * 86_400.0
"""Half-life of a mark. Assumed: at 6.5 failures per 1,000 node-days a healthy node is marked once in five months; repairs take days."""
TIMES_MEAN: Final = 3.0  # least factor over the other nodes' mean
MARKS_MIN: Final = 1.5  # fewer form no pattern: two full failures, one of them some days ago, or many lesser ones
USED_LAST_PROBABILITY: Final = (
    0.05  # probability of any such node in a healthy fleet, below which the node is used last
)
DRAIN_PROBABILITY: Final = 0.001  # below which it is drained
MEAN_LEAST: Final = 6.5e-3 * 20.2
"""Marks of a healthy node by published rates: 6.5 per 1,000 node-days (see `failure_rate`) times the mean life of a mark, 20.2 days with
the half-life above (14 / ln 2). Used as the least mean, since a young fleet without failures has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSum:
    """Decayed sum of a node's marks at time `at_s`."""

    sum: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """A bad node. `probability`: probability that any node of a healthy fleet has as many marks."""

    marks: float
    mean: float
    probability: float

    @property
    def drain(self) -> bool:
        """Whether the evidence suffices to drain it."""
        return self.probability < DRAIN_PROBABILITY

    @property
    def why(self) -> str:
        """`fails gangs 9.8 times as often as the others (3.0 marks against 0.3)`."""
        times = self.marks / self.mean
        return f"fails gangs {times:.1f} times as often as the others ({self.marks:.1f} marks against {self.mean:.2f})"


def decayed_sum(marks: MarkSum, now_s: float) -> float:
    """The sum at `now_s`. If the clock was set back, nothing decays."""
    age_s = max(0.0, now_s - marks.at_s)
    return float(marks.sum * 2.0 ** (-age_s / HALF_LIFE_S))


def add_mark(marks: MarkSum, weight: float, now_s: float) -> MarkSum:
    """The marks with one more mark added."""
    return MarkSum(sum=decayed_sum(marks, now_s) + weight, at_s=now_s)


def find_bad_nodes(fleet: Mapping[NodeId, MarkSum], now_s: float) -> dict[NodeId, BadNode]:
    """The bad nodes of a fleet, by node; none in a fleet of one. Cost: linear in the nodes."""
    sums = {node_id: decayed_sum(marks, now_s) for node_id, marks in fleet.items()}
    if len(sums) < 2:
        return {}
    total, found = sum(sums.values()), {}
    for node_id, own in sums.items():
        mean = max(MEAN_LEAST, (total - own) / (len(sums) - 1))
        if own < MARKS_MIN or own < TIMES_MEAN * mean:
            continue
        chance = min(1.0, len(sums) * poisson_tail(own, mean))
        if chance < USED_LAST_PROBABILITY:
            found[node_id] = BadNode(marks=own, mean=mean, probability=chance)
    return found


def poisson_tail(count: float, mean: float) -> float:
    """P(K >= count) for a Poisson count K with this mean; interpolated geometrically between integers, since decayed marks are fractions.

    Formula: sum(exp(-m) m^k / k!, k >= count), summed from `count` outwards on the smaller side.
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
