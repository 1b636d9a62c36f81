"""The mix of requests: how often users ask for what, learned from the jobs seen so far, bounded in size.

Placement by fragmentation reads it (`fragmentation.py`), the board and the packing replay fill it.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Final, NamedTuple

MIX_GROWTH: Final = 2.0  # readers take the mix again when this many times as many jobs have been seen
MIX_JOBS_MAX: Final = 1 << 16  # jobs in the mix; then all counts are halved, so that old habits fade
MIX_DEMANDS_MAX: Final = 128  # distinct demands that readers get, the most frequent ones: openb has 79 after rounding
_KEPT_MAX: Final = 8 * MIX_DEMANDS_MAX  # distinct demands that are counted
_SIGNIFICANT_BITS: Final = 5  # of CPUs and memory: rounds down by at most 1/16, so that 11.9 and 12 CPUs are one demand


class Demand(NamedTuple):
    """What a job needs of one node.

    Attributes:
        cpus: any unit, the same for jobs and nodes.
        memory: any unit, the same for jobs and nodes.
        devices: whole ones; 0 with a share or for a job without GPUs.
        share_milli: thousandths of one device; 0 for none.
        models: numbers of the models that it accepts; None for any.
    """

    cpus: int
    memory: int
    devices: int
    share_milli: int
    models: frozenset[int] | None = None


@lru_cache(maxsize=_KEPT_MAX)  # asked at every submit and every placement, mostly for the same demands
def rounded(demand: Demand) -> Demand:
    """The demand with CPUs and memory rounded down, so that nearly equal demands are one."""
    return demand._replace(cpus=_round_down(demand.cpus), memory=_round_down(demand.memory))


def _round_down(amount: int) -> int:
    dropped = max(0, amount.bit_length() - _SIGNIFICANT_BITS)
    return amount >> dropped << dropped


class RequestMix:
    """How often each demand was seen, rounded."""

    __slots__ = ("_counts", "_next", "_seen")

    def __init__(self) -> None:
        self._counts: Counter[Demand] = Counter()
        self._seen = 0
        self._next = 1

    def observe(self, demand: Demand) -> bool:
        """Count a job; returns whether so many have come since the last time that readers should take the mix again."""
        self._counts[rounded(demand)] += 1
        self._seen += 1
        if self._seen > MIX_JOBS_MAX:
            self._counts = Counter({one: count // 2 for one, count in self._counts.items() if count > 1})
            self._seen = self._next = self._counts.total()
        if len(self._counts) > _KEPT_MAX:
            self._counts = Counter(dict(self._counts.most_common(_KEPT_MAX // 2)))
        if self._seen < self._next:
            return False
        self._next = int(self._seen * MIX_GROWTH)
        return True

    def most_common(self) -> list[tuple[Demand, int]]:
        """The most frequent demands for GPUs with their counts; ties in the order of their first job."""
        counts = Counter({one: count for one, count in self._counts.items() if one.devices or one.share_milli})
        return counts.most_common(MIX_DEMANDS_MAX)
