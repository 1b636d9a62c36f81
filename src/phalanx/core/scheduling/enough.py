"""Which nodes have enough CPUs and memory: for the few pairs that jobs ask, a set of nodes that is kept true as the nodes change.

A pool asks when a need names CPUs or memory. The lists belong to the board, which changes them as jobs come and go; whoever changes an
entry says so by `booked`, at any time before the next question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.core.scheduling.bits import bits_of

_PAIRS_MAX: Final = 256  # sets kept; a live queue asks a handful of pairs, and 256 sets of 12,500 nodes are 0.4 MB
_SHARE: Final = 8  # once 1/8 of the nodes changed, a set is made anew: a change costs about eight times a first look


class Enough:
    """See the module.

    Attributes:
        cpus, memory: free CPUs and bytes by node number; the board's own lists, only read here.
        nodes: numbers of the nodes that are looked at.
        asked: (CPUs, bytes) -> the nodes with so much of both, and the length of `_booked` for which that is true.
    """

    __slots__ = ("_booked", "asked", "cpus", "memory", "nodes")

    def __init__(self, cpus: Sequence[int] | None, memory: Sequence[int] | None, nodes: Sequence[int]) -> None:
        self.cpus = cpus
        self.memory = memory
        self.nodes = tuple(nodes)
        self.asked: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (CPUs, bytes) -> (set, length of `_booked` it is true for)
        self._booked: list[int] = []

    def booked(self, node: int) -> None:
        """CPUs or memory of the node have changed, or are about to."""
        if self.asked:  # else there is nothing to keep true
            self._booked.append(node)
            if len(self._booked) > 4 * len(self.nodes) + 1024:  # an asker this far behind starts anew anyway
                self.asked.clear()
                self._booked.clear()

    def bits(self, cpus: int, memory_bytes: int) -> int:
        """The nodes with so much of both. Linear in the nodes at the first question, then in what changed."""
        key = (cpus, memory_bytes)
        found, upto = self.asked.get(key, (0, -1))
        booked = self._booked
        if upto == len(booked):
            return found
        changed = set(booked[upto:]) if upto >= 0 else set()
        if upto < 0 or len(changed) * _SHARE > len(self.nodes):
            found = bits_of(node for node in self.nodes if self._has(node, cpus, memory_bytes))
        else:
            for node in changed:
                if (found >> node & 1) != self._has(node, cpus, memory_bytes):
                    found ^= 1 << node
        if len(self.asked) >= _PAIRS_MAX:
            self.asked.clear()
        self.asked[key] = (found, len(booked))
        return found

    def _has(self, node: int, cpus: int, memory_bytes: int) -> bool:
        return (self.cpus is None or self.cpus[node] >= cpus) and (
            self.memory is None or self.memory[node] >= memory_bytes
        )
