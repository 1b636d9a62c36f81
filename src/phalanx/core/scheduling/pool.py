"""Free devices per node, kept in buckets by free count so that best fit is a look-up and not a search.

A bucket is a set of nodes (`node_sets.py`); its lowest member is the tie-break, so equal pools give equal placements. The pool counts devices;
the caller chooses the indices on a node. A gang goes into the smallest domain of the topology that can hold it (`gang.py`, `domains.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.core.fleet.topology import Tree
from phalanx.core.scheduling.domains import Domains
from phalanx.core.scheduling.gang import Candidates, place_gang
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_sets import Enough, bits_of, lowest


class Room(NamedTuple):
    """The capacity for a need, to explain why it does not fit.

    Attributes:
        free_total: total number of free devices.
        most_free: free devices on the emptiest node.
        whole_nodes: nodes that are entirely free.
        largest_domain: the most nodes in one domain that can each hold a part of the need; domains are of the level that the need names (of
            its slices' level if it names none; the whole pool without either).
    """

    free_total: int
    most_free: int
    whole_nodes: int
    largest_domain: int


class Pool:
    """Free devices of the nodes of one kind. Node numbers are the board's, over all kinds, and follow the tree's order.

    Attributes:
        size: devices of each node; -1 for a node that is not in this pool.
        free: free devices of each node; maintained while a node is away, so that it can come back.
        unit: devices of the largest node: what "a whole node" means for a gang that spans nodes.
        buckets, counts: [free devices] the nodes with exactly this many, and their number; without nodes that are away.
        listed: the nodes that are not away.
        free_total: sum over those.
        touched: nodes changed since a reader last cleared it.
    """

    __slots__ = (
        "_empty",
        "away",
        "buckets",
        "counts",
        "domains",
        "enough",
        "free",
        "free_total",
        "listed",
        "size",
        "touched",
        "tree",
        "unit",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        tree: Tree | None = None,
        cpus: Sequence[int] | None = None,
        memory: Sequence[int] | None = None,
    ) -> None:
        """All free.

        Args:
            sizes: of every node number; -1 for those of other pools.
            tree: positions of every node number; None (or a tree without levels) for no topology.
            cpus: free CPUs by node number: the board's own list, only read here; None if not counted. Call `booked` when it changed.
            memory: the same in bytes.
        """
        nodes = [node for node, size in enumerate(sizes) if size >= 0]
        self.size = list(sizes)
        self.free = list(sizes)
        self.unit = max(self.size, default=0) if nodes else 0
        self.tree = tree if tree is not None and tree.levels and nodes else None
        self.domains = None if self.tree is None else Domains(self.tree, nodes, self.unit)
        self.enough = Enough(cpus, memory, nodes)
        self.buckets = [bits_of(node for node in nodes if self.free[node] == free) for free in range(self.unit + 1)]
        self.counts = [bucket.bit_count() for bucket in self.buckets]
        self.listed = bits_of(nodes)
        self.free_total = sum(self.free[node] for node in nodes)
        self.away: set[int] = set()
        self.touched: set[int] = set(nodes)
        self._empty: Pool | None = None
        if self.domains is not None:
            for node in nodes:
                self.domains.shift(node, -1, self.free[node])

    # ---------------------------------------------------------------- queries

    def find(self, need: Need, shut: int = 0) -> Places | None:
        """The placement that leaves the least capacity unused, or None.

        One node: the one with the fewest free devices that suffice; of equals the one in the fullest domain, innermost level first, then the
        lowest. A gang: see `gang.place_gang`. A need without devices goes to the nodes with the fewest free CPUs that suffice.

        Args:
            need: `tail` smaller than `devices`.
            shut: nodes not to use, in addition to those in `need.shut`.
        """
        wanted = need.devices
        if need.shut:
            shut |= need.shut
        if need.nodes == 1 and wanted and not need.tail:
            if self.domains is not None or shut or need.cpus or need.memory_bytes:
                node = self._find_one(need, shut)
                return None if node < 0 else ((node, wanted),)
            counts = self.counts
            for free in range(wanted, self.unit + 1):
                if counts[free]:
                    bits = self.buckets[free]
                    return (((bits & -bits).bit_length() - 1, wanted),)
            return None
        if need.gpus > self.free_total or (need.devices == self.unit and need.nodes > self.counts[self.unit]):
            return None
        return place_gang(need, self._candidates(need, shut))

    def find_outside(self, gpus: int, shut: int) -> int:
        """Best fit for at most one node's worth, except on the nodes in `shut`; -1 if nothing fits.

        Whole free nodes are not broken up, since the caller wants to free one.
        """
        for free in range(gpus, self.unit if gpus < self.unit else self.unit + 1):
            bits = self.buckets[free]
            if bits:
                bits ^= bits & shut
                if bits:
                    return lowest(bits)
        return -1

    def fits_ever(self, need: Need) -> bool:
        """Whether the empty pool, with every node back, could hold the need. Ignores CPUs and memory."""
        if self._empty is None:
            self._empty = Pool(self.size, tree=self.tree)
        return self._empty.find(need) is not None

    def why_not(self, need: Need, shut: int = 0) -> Room:
        """The capacity for the need; `shut` as in `find` affects only `largest_domain`."""
        bits = self._candidates(need, shut | need.shut).bits
        level = need.within if need.within >= 0 else need.slice_within
        if self.domains is None or level < 0:
            largest = bits.bit_count()
        elif level < len(self.domains.levels):
            largest = max(self.domains.count(bits)[level])
        else:
            largest = min(1, bits.bit_count())  # the level of nodes: each is a domain
        most = next((free for free in range(self.unit, 0, -1) if self.counts[free]), 0)
        return Room(self.free_total, most, self.counts[self.unit], largest)

    def _find_one(self, need: Need, shut: int) -> int:
        domains = self.domains
        for free in range(need.devices, self.unit + 1):
            if self.counts[free]:
                bits = self._allowed(self.buckets[free], need, shut)
                if not bits:
                    continue
                if domains is None:
                    return lowest(bits)
                all_of_them = bits == self.buckets[free]  # then the domains have them indexed
                domain = domains.for_one(free) if all_of_them else domains.for_one_of(bits)
                level = domains.levels[-1]
                return level.first[domain] + lowest(level.inside(bits, domain))
        return -1

    def _candidates(self, need: Need, shut: int) -> Candidates:
        """The nodes that could each hold a part of the need, best fit first."""
        buckets, domains = self.buckets, self.domains
        if need.devices == 0:
            bits = self._allowed(self.listed, need, shut)
            return Candidates([bits], bits, (), domains, cpus=self.enough.cpus)
        fits = [self._allowed(bucket, need, shut) for bucket in buckets[need.devices :]]
        spare = [self._allowed(bucket, need, shut) for bucket in buckets[need.tail : need.devices]] if need.tail else ()
        bits = 0
        for bucket in fits:
            bits |= bucket
        whole = need.devices == self.unit and bits == buckets[self.unit]
        return Candidates(fits, bits, spare, domains, whole=whole)

    def _allowed(self, bits: int, need: Need, shut: int) -> int:
        if shut:
            bits ^= bits & shut
        if bits and (need.cpus or need.memory_bytes):
            bits &= self.enough.bits(need.cpus, need.memory_bytes)
        return bits

    # ---------------------------------------------------------------- changes

    def take(self, places: Places) -> None:
        """Take the devices."""
        for node, count in places:
            self._shift(node, -count)

    def give(self, places: Places) -> None:
        """Release the devices."""
        for node, count in places:
            self._shift(node, count)

    def booked(self, node: int) -> None:
        """CPUs or memory of the node changed in the board's lists. `take` and `give` imply it for their nodes."""
        self.enough.booked(node)

    def leave(self, node: int) -> None:
        """Take the node out of service: its free devices are no longer offered; its used devices stay used."""
        if node not in self.away:
            self._set_listed(node, back=False)
            self.away.add(node)

    def back(self, node: int) -> None:
        """Return the node to service."""
        if node in self.away:
            self.away.discard(node)
            self._set_listed(node, back=True)

    def _shift(self, node: int, count: int) -> None:
        self.touched.add(node)
        if self.enough.asked:
            self.enough.booked(node)
        before = self.free[node]
        after = self.free[node] = before + count
        if node in self.away:
            return
        if (
            before < 0 or after < 0
        ):  # more in use than exist: devices became unhealthy under their jobs; such a node has none free
            before, after = max(0, before), max(0, after)
        bit = 1 << node
        self.buckets[before] ^= bit
        self.counts[before] -= 1
        self.buckets[after] |= bit
        self.counts[after] += 1
        self.free_total += after - before
        if self.domains is not None:
            self.domains.shift(node, before, after)

    def _set_listed(self, node: int, *, back: bool) -> None:
        free = max(0, self.free[node])
        step = 1 if back else -1
        self.buckets[free] ^= 1 << node
        self.listed ^= 1 << node
        self.counts[free] += step
        self.free_total += step * free
        self.touched.add(node)
        if self.domains is not None:
            self.domains.shift(node, -1 if back else free, free if back else -1)
