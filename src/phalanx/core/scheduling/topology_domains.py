"""Counts the whole free nodes in each domain of the topology, updated as nodes change: finding the smallest domain for a gang is a look-up.

A pool owns one and reports every change to it. Domains of a level are numbered along the node numbers, so each is one run of them and
its part of a set of nodes is a shift and a mask. Of the domains of one level the fullest is preferred (the fewest whole free nodes that
suffice), so that empty domains stay free for large gangs; of equally full ones the one in the fullest outer domain, then the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from phalanx.core.fleet.topology import TopologyTree
from phalanx.core.scheduling.node_bitsets import bitset_of, lowest_member

Counts = list[list[int]]  # [level][domain]


class DomainLevel:
    """One level of the tree, restricted to the nodes of this pool.

    Attributes:
        domain_of_node: domain of each node number; -1 for nodes outside the pool.
        first: lowest node number of each domain.
        mask: mask as wide as the domain's range of node numbers.
        whole: whole free nodes of each domain.
        by_whole: set of the domains with each number of whole free nodes.
        present: set of the numbers that some domain has.
        under: for this level (first) and each further in, set of the domains there that lie in each domain here.
        inner: domains of the next level in each domain, as a range; empty at the innermost.
    """

    __slots__ = ("by_whole", "domain_of_node", "first", "inner", "mask", "present", "under", "whole")

    def __init__(self, domain_of_node: list[int], nodes: Sequence[int], count: int) -> None:
        self.domain_of_node = domain_of_node
        sizes = [0] * count
        self.first = [-1] * count
        last = [0] * count
        for node in nodes:
            domain = domain_of_node[node]
            sizes[domain] += 1
            last[domain] = node
            if self.first[domain] < 0:
                self.first[domain] = node
        self.mask = [(1 << (end - first + 1)) - 1 for first, end in zip(self.first, last, strict=True)]
        self.whole = [0] * count
        self.by_whole = [0] * (max(sizes, default=0) + 1)
        self.by_whole[0] = (1 << count) - 1
        self.present = 1
        self.under: list[list[int]] = []
        self.inner: list[range] = []

    def change_count(self, domain: int, step: int) -> None:
        """Change the domain's number of whole free nodes by `step`."""
        before = self.whole[domain]
        after = self.whole[domain] = before + step
        bit = 1 << domain
        by_whole = self.by_whole
        left = by_whole[before] ^ bit
        by_whole[before] = left
        if not left:
            self.present ^= 1 << before
        joined = by_whole[after]
        if not joined:
            self.present |= 1 << after
        by_whole[after] = joined | bit

    def nodes_in(self, bits: int, domain: int) -> int:
        """The domain's part of a set of nodes, shifted to its first node."""
        return bits >> self.first[domain] & self.mask[domain]


class DomainIndex:
    """The levels of one pool, outermost first.

    Attributes:
        nodes_with: [free devices] set of the innermost domains that have a node with exactly this many free.
    """

    __slots__ = ("_counts", "_starts", "_width", "levels", "node_devices_max", "nodes_with")

    def __init__(self, tree: TopologyTree, nodes: Sequence[int], node_devices_max: int) -> None:
        """Domains of the given nodes, ascending; all count as taken until reported free.

        Raises:
            ValueError: the numbers do not follow the tree, so that a domain is not one run of them.
        """
        self.node_devices_max = node_devices_max
        self.levels = [_level(tree, depth, nodes) for depth in range(len(tree.levels))]
        for outer, further in pairwise(self.levels):
            parent = [outer.domain_of_node[first] for first in further.first]
            starts = [0, *(at for at in range(1, len(parent)) if parent[at] != parent[at - 1]), len(parent)]
            outer.inner = [range(start, end) for start, end in pairwise(starts)]
        for depth, level in enumerate(self.levels):
            for further in self.levels[depth:]:
                members: list[list[int]] = [[] for _ in level.first]
                for domain, first in enumerate(further.first):
                    members[level.domain_of_node[first]].append(domain)
                level.under.append([bitset_of(inside) for inside in members])
        innermost = len(self.levels[-1].first)
        self.nodes_with = [0] * (node_devices_max + 1)
        self._counts = [[0] * innermost for _ in range(node_devices_max + 1)]
        self._width = (max(nodes, default=0) + 8) // 8
        self._starts = [np.array(level.first, dtype=np.intp) for level in self.levels]

    # ---------------------------------------------------------------- changes

    def update_node(self, node: int, before: int, after: int) -> None:
        """The node's free devices changed from `before` to `after`; -1 for a node that accepts no work."""
        domain = self.levels[-1].domain_of_node[node]
        if before >= 0:
            counts = self._counts[before]
            counts[domain] -= 1
            if not counts[domain]:
                self.nodes_with[before] ^= 1 << domain
        if after >= 0:
            counts = self._counts[after]
            if not counts[domain]:
                self.nodes_with[after] |= 1 << domain
            counts[domain] += 1
        if (before == self.node_devices_max) != (after == self.node_devices_max):
            step = 1 if after == self.node_devices_max else -1
            for level in self.levels:
                level.change_count(level.domain_of_node[node], step)

    # ---------------------------------------------------------------- queries

    def find_for_exact(self, free: int) -> int:
        """The fullest innermost domain that has a node with exactly this many free; there must be one."""
        level = self.levels[-1]
        holding = self.nodes_with[free]
        rest = level.present
        while True:
            low = rest & -rest
            hit = level.by_whole[low.bit_length() - 1] & holding
            if hit:
                return self._fullest(hit, len(self.levels) - 1)
            rest ^= low

    def find_for_nodes(self, bits: int) -> int:
        """The fullest innermost domain that has one of these nodes; there must be one."""
        level = self.levels[-1]
        holding = np.flatnonzero(np.add.reduceat(self._flags(bits), self._starts[-1], dtype=np.intp)).tolist()
        least = min(level.whole[domain] for domain in holding)
        hit = bitset_of(domain for domain in holding if level.whole[domain] == least)
        return self._fullest(hit, len(self.levels) - 1)

    def find_for_gang(
        self, depth: int, count: int, *, counts: Counts | None = None, one_more: int | None = None
    ) -> int:
        """The fullest domain of a level that has `count` candidates; -1 for none.

        Args:
            depth: the level's number.
            count: nodes of the gang.
            counts: candidates by domain, from `count`; None if every whole free node is one.
            one_more: nodes that could hold a tail but are not candidates; None without a tail. A domain needs one of them, or one
                more candidate.
        """
        level = self.levels[depth]
        if counts is None:
            rest = level.present >> count << count
            while rest:
                low = rest & -rest
                free = low.bit_length() - 1
                hit = level.by_whole[free]
                if free == count and one_more is not None:
                    hit = self._with_one_more(level, hit, one_more)
                if hit:
                    return self._fullest(hit, depth)
                rest ^= low
            return -1
        own = counts[depth]
        for free in sorted({candidates for candidates in own if candidates >= count}):
            hit = bitset_of(domain for domain, candidates in enumerate(own) if candidates == free)
            if free == count and one_more is not None:
                hit = self._with_one_more(level, hit, one_more)
            if hit:
                return self._fullest(hit, depth)
        return -1

    def count(self, bits: int) -> Counts:
        """The number of these nodes in each domain. About 20 us for 12,500 nodes, regardless of the domains."""
        flags = self._flags(bits).astype(np.intp)
        return [np.add.reduceat(flags, starts).tolist() for starts in self._starts]

    def whole_free_counts(self) -> Counts:
        """Whole free nodes of each domain. Read-only."""
        return [level.whole for level in self.levels]

    def _flags(self, bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.unpackbits(np.frombuffer(bits.to_bytes(self._width, "little"), dtype=np.uint8), bitorder="little")

    def _with_one_more(self, level: DomainLevel, domains: int, one_more: int) -> int:
        found = 0
        while domains:
            low = domains & -domains
            if level.nodes_in(one_more, low.bit_length() - 1):
                found |= low
            domains ^= low
        return found

    def _fullest(self, hit: int, depth: int) -> int:
        """Of equally full domains the one in the fullest domain of the next outer level, and so on; then the lowest."""
        for outer in range(depth - 1, -1, -1):
            if not hit & (hit - 1):
                break
            level = self.levels[outer]
            under = level.under[depth - outer]
            rest = level.present
            best = 0
            while not best:
                low = rest & -rest
                domains = level.by_whole[low.bit_length() - 1]
                while domains:
                    one = domains & -domains
                    best |= under[one.bit_length() - 1] & hit
                    domains ^= one
                rest ^= low
            hit = best
        return lowest_member(hit)


def _level(tree: TopologyTree, depth: int, nodes: Sequence[int]) -> DomainLevel:
    """The level with its domains renumbered along the nodes; domains without a node of the pool are left out."""
    of = [-1] * len(tree.node_ids)
    own: dict[int, int] = {}
    before = -1
    for node in nodes:
        path = tree.domains[depth][node]
        domain = own.setdefault(path, len(own))
        if domain < before:
            raise ValueError(
                f"node number {node} ({tree.node_ids[node]}) is in {tree.names[depth][path]}, but not next to its other nodes: "
                "number the nodes in the tree's order (Tree.order_keys)"
            )
        of[node] = before = domain
    return DomainLevel(of, nodes, len(own))
