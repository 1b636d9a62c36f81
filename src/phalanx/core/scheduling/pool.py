"""What is free: devices per node, kept in buckets by free count so that best fit is a look-up and not a search.

A bucket is a whole number whose bit `n` says that node `n` has exactly that many devices free; the lowest bit is the tie-break, so equal
pools give equal placements. Python's integers do the set arithmetic of 12,500 nodes in about a hundred nanoseconds. The pool counts
devices; which indices on a node are handed out is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Places = tuple[tuple[int, int], ...]  # (node number, devices) per node of a gang, node numbers ascending


class Pool:
    """Free devices of the nodes that take work. Node numbers are dense, in the order given.

    Attributes:
        size: devices of each node; 0 for a node that is away.
        free: devices of each node that nobody holds; kept while a node is away, so that it can come back.
        unit: devices of the largest node: what "a whole node" means for a gang that spans nodes.
        free_total: sum over the nodes that are not away.
    """

    __slots__ = ("away", "buckets", "counts", "free", "free_total", "size", "touched", "unit")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.size = list(sizes)
        self.free = list(sizes)
        self.unit = max(self.size, default=0)
        self.buckets = [0] * (self.unit + 1)
        self.counts = [0] * (self.unit + 1)
        for free in self.free:
            self.counts[free] += 1
        for free in range(self.unit + 1):
            self.buckets[free] = _bits(node for node, own in enumerate(self.free) if own == free)
        self.free_total = sum(self.free)
        self.away: set[int] = set()
        self.touched: set[int] = set(range(len(self.size)))  # nodes changed since a reader last cleared it

    def fits_ever(self, gpus: int) -> bool:
        """Whether the empty fleet, with every node back, could hold a gang of `gpus`."""
        whole, rest = divmod(gpus, self.unit) if gpus > self.unit else (0, gpus)
        full = sum(1 for size in self.size if size == self.unit)
        if whole > full:
            return False
        return rest == 0 or full > whole or any(size >= rest for size in self.size if size < self.unit)

    def find(self, gpus: int) -> Places | None:
        """The consolidated placement that leaves the least room behind: one node, or whole nodes and the remainder on one more."""
        unit = self.unit
        if gpus > self.free_total:
            return None
        if gpus <= unit:
            node = self._best(gpus)
            return None if node < 0 else ((node, gpus),)
        whole, rest = divmod(gpus, unit)
        if self.counts[unit] < whole:
            return None
        bits = self.buckets[unit]
        nodes: list[tuple[int, int]] = []
        for _ in range(whole):
            low = bits & -bits
            nodes.append((low.bit_length() - 1, unit))
            bits ^= low
        if rest:
            node = self._best_below(rest)
            if node < 0:
                if not bits:
                    return None
                node = (bits & -bits).bit_length() - 1
            nodes.append((node, rest))
            nodes.sort()
        return tuple(nodes)

    def find_outside(self, gpus: int, shut: int) -> int:
        """Best fit for at most one node's worth, outside the nodes whose bits are set in `shut`; -1 when nothing fits.

        Whole free nodes are not broken up: whoever asks wants to make one.
        """
        for free in range(gpus, self.unit if gpus < self.unit else self.unit + 1):
            bits = self.buckets[free] & ~shut
            if bits:
                return (bits & -bits).bit_length() - 1
        return -1

    def take(self, places: Places) -> None:
        """Hold the devices."""
        for node, count in places:
            self._shift(node, -count)

    def give(self, places: Places) -> None:
        """Let the devices go."""
        for node, count in places:
            self._shift(node, count)

    def leave(self, node: int) -> None:
        """Take the node out: what is free on it is offered no longer. What is held on it stays held."""
        if node not in self.away:
            self._unlist(node)
            self.away.add(node)

    def back(self, node: int) -> None:
        """Offer the node's free devices again."""
        if node in self.away:
            self.away.discard(node)
            self._list(node)

    def _shift(self, node: int, count: int) -> None:
        self.touched.add(node)
        if node in self.away:
            self.free[node] += count
            return
        free = self.free[node]
        bit = 1 << node
        after = free + count
        self.buckets[free] ^= bit
        self.counts[free] -= 1
        self.buckets[after] |= bit
        self.counts[after] += 1
        self.free[node] = after
        self.free_total += count

    def _list(self, node: int) -> None:
        free = self.free[node]
        self.buckets[free] |= 1 << node
        self.counts[free] += 1
        self.free_total += free
        self.touched.add(node)

    def _unlist(self, node: int) -> None:
        free = self.free[node]
        self.buckets[free] ^= 1 << node
        self.counts[free] -= 1
        self.free_total -= free
        self.touched.add(node)

    def _best(self, gpus: int) -> int:
        counts = self.counts
        for free in range(gpus, self.unit + 1):
            if counts[free]:
                bits = self.buckets[free]
                return (bits & -bits).bit_length() - 1
        return -1

    def _best_below(self, gpus: int) -> int:
        for free in range(gpus, self.unit):
            if self.counts[free]:
                bits = self.buckets[free]
                return (bits & -bits).bit_length() - 1
        return -1


def _bits(nodes: Iterable[int]) -> int:
    chosen = list(nodes)
    if not chosen:
        return 0
    raw = bytearray(max(chosen) // 8 + 1)
    for node in chosen:
        raw[node >> 3] |= 1 << (node & 7)
    return int.from_bytes(raw, "little")
