"""Index of nodes with enough free CPUs and memory: for each of the few pairs that jobs request, a set of nodes maintained as they change.

A pool uses it if a need names CPUs or memory. The lists belong to the board; callers that change an entry must call `booked` before the next
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.core.scheduling.bits import bits_of

_PAIRS_MAX: Final = 256  # cached sets; a live queue uses a handful of pairs, and 256 sets of 12,500 nodes are 0.4 MB
# Once 1/8 of the nodes changed, a set is rebuilt: an update costs about eight times the first check of a node
_REBUILD_FRACTION: Final = 8


class Enough:
    """The index; see the module.

    Attributes:
        cpus, memory: free CPUs and bytes by node number; the board's own lists, only read here.
        nodes: numbers of the indexed nodes.
        asked: (CPUs, bytes) -> the nodes with at least both, and the length of `_booked` at which that was true.
    """

    __slots__ = ("_booked", "asked", "cpus", "memory", "nodes")

    def __init__(self, cpus: Sequence[int] | None, memory: Sequence[int] | None, nodes: Sequence[int]) -> None:
        self.cpus = cpus
        self.memory = memory
        self.nodes = tuple(nodes)
        self.asked: dict[tuple[int, int], tuple[int, int]] = {}
        self._booked: list[int] = []

    def booked(self, node: int) -> None:
        """CPUs or memory of the node have changed, or are about to."""
        if self.asked:  # otherwise there is nothing to update
            self._booked.append(node)
            if len(self._booked) > 4 * len(self.nodes) + 1024:  # sets this far behind are rebuilt anyway
                self.asked.clear()
                self._booked.clear()

    def bits(self, cpus: int, memory_bytes: int) -> int:
        """The nodes with at least both. Linear in the nodes for the first query, then in the changes."""
        key = (cpus, memory_bytes)
        found, upto = self.asked.get(key, (0, -1))
        booked = self._booked
        if upto == len(booked):
            return found
        changed = set(booked[upto:]) if upto >= 0 else set()
        if upto < 0 or len(changed) * _REBUILD_FRACTION > len(self.nodes):
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
