"""Sets of nodes: bitset operations, and an index of the nodes with enough free CPUs, memory and extras.

A set of small numbers (nodes, domains, counts) is a Python integer: bit `n` is set if `n` is in the set. Set arithmetic on 12,500 nodes takes
about a hundred nanoseconds, and the lowest member is found without a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.resources import Extras

# Members; for more, NumPy's constant 5 us is less than the loop's 0.1 us each (measured, 12,500 nodes)
_LOOP_MAX: Final = 64


def bitset_of(members: Iterable[int]) -> int:
    """The set of these numbers. Linear in the largest: `1 << n` for each would be quadratic."""
    chosen = list(members)
    if not chosen:
        return 0
    raw = bytearray(max(chosen) // 8 + 1)
    for member in chosen:
        raw[member >> 3] |= 1 << (member & 7)
    return int.from_bytes(raw, "little")


def members_of(bits: int) -> NDArray[np.int64]:
    """The members, ascending, as an array."""
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(
        np.unpackbits(raw, bitorder="little").view(np.bool_)
    )  # of flags: four times as fast as of bytes


def lowest_member(bits: int) -> int:
    """The lowest member; -1 for the empty set."""
    return (bits & -bits).bit_length() - 1


def lowest_members(bits: int, count: int, base: int = 0) -> list[int]:
    """The `count` lowest members ascending, or all if there are fewer, each plus `base`."""
    if count > _LOOP_MAX:
        members: list[int] = (members_of(bits)[:count] + base).tolist()
        return members
    found: list[int] = []
    base -= 1
    while bits and len(found) < count:
        step = (bits & -bits).bit_length()
        base += step
        found.append(base)
        bits >>= step
    return found


_PAIRS_MAX: Final = 256  # cached sets; a live queue uses a handful of pairs, and 256 sets of 12,500 nodes are 0.4 MB
# Once 1/8 of the nodes changed, a set is rebuilt: an update costs about eight times the first check of a node
_REBUILD_FRACTION: Final = 8


class CapacityIndex:
    """The index; see the module.

    Attributes:
        cpus, memory, extras: free CPUs, bytes and named amounts by node number; the board's own lists, only read here.
        nodes: numbers of the indexed nodes.
        cached_sets: (CPUs, bytes, extras) -> the nodes with at least these, and the length of `_booked` at which that was true.
    """

    __slots__ = ("_booked", "cached_sets", "cpus", "extras", "memory", "nodes")

    def __init__(
        self,
        cpus: Sequence[int] | None,
        memory: Sequence[int] | None,
        nodes: Sequence[int],
        extras: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.cpus = cpus
        self.memory = memory
        self.extras = extras or {}
        self.nodes = tuple(nodes)
        self.cached_sets: dict[tuple[int, int, Extras], tuple[int, int]] = {}
        self._booked: list[int] = []

    def mark_changed(self, node: int) -> None:
        """CPUs or memory of the node have changed, or are about to."""
        if self.cached_sets:  # otherwise there is nothing to update
            self._booked.append(node)
            if len(self._booked) > 4 * len(self.nodes) + 1024:  # sets this far behind are rebuilt anyway
                self.cached_sets.clear()
                self._booked.clear()

    def nodes_with(self, cpus: int, memory_bytes: int, extras: Extras = ()) -> int:
        """The nodes with at least these. Linear in the nodes for the first query, then in the changes."""
        key = (cpus, memory_bytes, extras)
        found, upto = self.cached_sets.get(key, (0, -1))
        booked = self._booked
        if upto == len(booked):
            return found
        changed = set(booked[upto:]) if upto >= 0 else set()
        if upto < 0 or len(changed) * _REBUILD_FRACTION > len(self.nodes):
            found = bitset_of(node for node in self.nodes if self._has(node, *key))
        else:
            for node in changed:
                if (found >> node & 1) != self._has(node, *key):
                    found ^= 1 << node
        if len(self.cached_sets) >= _PAIRS_MAX:
            self.cached_sets.clear()
        self.cached_sets[key] = (found, len(booked))
        return found

    def _has(self, node: int, cpus: int, memory_bytes: int, extras: Extras) -> bool:
        return (
            (self.cpus is None or self.cpus[node] >= cpus)
            and (self.memory is None or self.memory[node] >= memory_bytes)
            and all(name in self.extras and self.extras[name][node] >= amount for name, amount in extras)
        )
