"""Free devices per node, kept in buckets by free count so that best fit is a look-up and not a search.

A bucket is a set of nodes (`node_sets.py`); its lowest member is the tie-break, so equal pools give equal placements. The pool counts devices;
the caller chooses the indices on a node. A gang goes into the smallest domain of the topology that can hold it (`gang.py`, `domains.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.core.fleet.topology import TopologyTree
from phalanx.core.scheduling.gang_placement import GangCandidates, place_gang
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_bitsets import CapacityIndex, bitset_of, lowest_member
from phalanx.core.scheduling.sharing.mig_devices import HeldSlices, SlicePositions
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice, SharedDeviceIndex
from phalanx.core.scheduling.topology_domains import DomainIndex
from phalanx.core.work.share import MILLI_PER_DEVICE

HeldShare = SharedDevice | HeldSlices
"""What a job holds on a node instead of whole devices: a share of one device, or MIG slices."""
SharePosition = int | SlicePositions
"""Where a share lies on its node: the index of the shared device, or the MIG slices."""


class PoolCapacity(NamedTuple):
    """The capacity for a need, to explain why it does not fit.

    Attributes:
        free_total: total number of free devices.
        node_free_max: free devices on the emptiest node.
        whole_nodes: nodes that are entirely free.
        largest_domain: the most nodes in one domain that can each hold a part of the need; domains are of the level that the need names (of
            its slices' level if it names none; the whole pool without either).
    """

    free_total: int
    node_free_max: int
    whole_nodes: int
    largest_domain: int


class DevicePool:
    """Free devices of the nodes of one kind. Node numbers are the board's, over all kinds, and follow the tree's order.

    Attributes:
        devices_of_node: devices of each node; -1 for a node that is not in this pool.
        free: free devices of each node; maintained while a node is away, so that it can come back.
        node_devices_max: devices of the largest node: what "a whole node" means for a gang that spans nodes.
        nodes_by_free, counts_by_free: [free devices] the nodes with exactly this many, and their number; without nodes that are away.
        available_nodes: the nodes that are not away.
        free_total: sum over those.
        changed_nodes: nodes changed since a reader last cleared it.
        shared: devices that jobs share; `free` does not count them.
        divided_devices: number of devices that are granted in MIG slices, of each node that has some; `free` does not count them.
    """

    __slots__ = (
        "_empty",
        "available_nodes",
        "capacity",
        "changed_nodes",
        "counts_by_free",
        "devices_of_node",
        "divided_devices",
        "domains",
        "free",
        "free_total",
        "node_devices_max",
        "nodes_by_free",
        "removed_nodes",
        "shared",
        "tree",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        tree: TopologyTree | None = None,
        cpus: Sequence[int] | None = None,
        memory: Sequence[int] | None = None,
        extras: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """All free.

        Args:
            sizes: of every node number; -1 for those of other pools.
            tree: positions of every node number; None (or a tree without levels) for no topology.
            cpus: free CPUs by node number: the board's own list, only read here; None if not counted. Call `mark_changed` when it changed.
            memory: the same in bytes.
            extras: the same for each named amount.
        """
        nodes = [node for node, size in enumerate(sizes) if size >= 0]
        self.devices_of_node = list(sizes)
        self.free = list(sizes)
        self.node_devices_max = max(self.devices_of_node, default=0) if nodes else 0
        self.tree = tree if tree is not None and tree.levels and nodes else None
        self.domains = None if self.tree is None else DomainIndex(self.tree, nodes, self.node_devices_max)
        self.capacity = CapacityIndex(cpus, memory, nodes, extras)
        self.nodes_by_free = [
            bitset_of(node for node in nodes if self.free[node] == free) for free in range(self.node_devices_max + 1)
        ]
        self.counts_by_free = [bucket.bit_count() for bucket in self.nodes_by_free]
        self.available_nodes = bitset_of(nodes)
        self.free_total = sum(self.free[node] for node in nodes)
        self.removed_nodes: set[int] = set()
        self.shared = SharedDeviceIndex()
        self.divided_devices: dict[int, int] = {}
        self.changed_nodes: set[int] = set(nodes)
        self._empty: DevicePool | None = None
        if self.domains is not None:
            for node in nodes:
                self.domains.update_node(node, -1, self.free[node])

    # ---------------------------------------------------------------- queries

    def find(self, need: Need, excluded: int = 0) -> Places | None:
        """The placement that leaves the least capacity unused, or None.

        One node: the one with the fewest free devices that suffice; of equals the one in the fullest domain, innermost level first, then the
        lowest. A gang: see `gang.place_gang`. A need without devices goes to the nodes with the fewest free CPUs that suffice.

        Args:
            need: `last_node_devices` smaller than `devices`.
            excluded: nodes not to use, in addition to those in `need.excluded`.
        """
        wanted = need.devices
        if need.excluded:
            excluded |= need.excluded
        if need.share_milli:
            return self._find_shares(need, excluded)
        if need.nodes == 1 and wanted and not need.last_node_devices:
            if self.domains is not None or excluded or need.cpus or need.memory_bytes or need.extras:
                node = self._find_one(need, excluded)
                return None if node < 0 else ((node, wanted),)
            counts = self.counts_by_free
            for free in range(wanted, self.node_devices_max + 1):
                if counts[free]:
                    bits = self.nodes_by_free[free]
                    return (((bits & -bits).bit_length() - 1, wanted),)
            return None
        if need.gpus > self.free_total or (
            need.devices == self.node_devices_max and need.nodes > self.counts_by_free[self.node_devices_max]
        ):
            return None
        return place_gang(need, self._candidates(need, excluded))

    def single_candidates(self, need: Need, excluded: int = 0) -> int:
        """The nodes that could hold one part of the need now, as a bitset; `excluded` as in `find`."""
        excluded |= need.excluded
        if not need.share_milli:
            return self._candidates(need, excluded).bits
        found = 0
        for bits in self._share_candidates(need, excluded):
            found |= bits
        return found

    def rooms_on(self, node: int) -> list[int]:
        """Free thousandths of each device of the node that is not in use as a whole."""
        shared = [device.room for device in self.shared.on_node.get(node, ())]
        return [MILLI_PER_DEVICE] * max(0, self.free[node]) + shared

    def _find_shares(self, need: Need, excluded: int) -> Places | None:
        """Nodes with a shared device that has room, least room first; then nodes with a free device, best fit. One share for each node."""
        if need.nodes == 1:
            for bits in self._share_candidates(need, excluded):
                if bits:
                    return ((lowest_member(bits), 0),)
            return None
        fits = list(self._share_candidates(need, excluded))
        all_of_them = 0
        for bits in fits:
            all_of_them |= bits
        return place_gang(need, GangCandidates(fits, all_of_them, (), self.domains))

    def _share_candidates(self, need: Need, excluded: int) -> Iterator[int]:
        """Disjoint sets of nodes that can hold a share, best fit first."""
        seen = ~self.available_nodes
        for _, bits in self.shared.nodes_with_room(need.share_group, need.share_milli):
            yield self._allowed(bits & ~seen, need, excluded)
            seen |= bits
        for bucket in self.nodes_by_free[1:]:
            yield self._allowed(bucket & ~seen, need, excluded)

    def find_single_node(self, gpus: int, excluded: int) -> int:
        """Best fit for at most one node's worth, except on the nodes in `excluded`; -1 if nothing fits.

        Whole free nodes are not broken up, since the caller wants to free one.
        """
        for free in range(gpus, self.node_devices_max if gpus < self.node_devices_max else self.node_devices_max + 1):
            bits = self.nodes_by_free[free]
            if bits:
                bits ^= bits & excluded
                if bits:
                    return lowest_member(bits)
        return -1

    def fits_ever(self, need: Need) -> bool:
        """Whether the empty pool, with every node back, could hold the need. Ignores CPUs and memory."""
        if self._empty is None:
            self._empty = DevicePool(self.devices_of_node, tree=self.tree)
        return self._empty.find(need) is not None

    def capacity_for(self, need: Need, excluded: int = 0) -> PoolCapacity:
        """The capacity for the need; `excluded` as in `find` affects only `largest_domain`."""
        bits = self._candidates(need, excluded | need.excluded).bits
        level = need.within if need.within >= 0 else need.slice_within
        if self.domains is None or level < 0:
            largest = bits.bit_count()
        elif level < len(self.domains.levels):
            largest = max(self.domains.count(bits)[level])
        else:
            largest = min(1, bits.bit_count())  # the level of nodes: each is a domain
        most = next((free for free in range(self.node_devices_max, 0, -1) if self.counts_by_free[free]), 0)
        return PoolCapacity(self.free_total, most, self.counts_by_free[self.node_devices_max], largest)

    def _find_one(self, need: Need, excluded: int) -> int:
        domains = self.domains
        for free in range(need.devices, self.node_devices_max + 1):
            if self.counts_by_free[free]:
                bits = self._allowed(self.nodes_by_free[free], need, excluded)
                if not bits:
                    continue
                if domains is None:
                    return lowest_member(bits)
                all_of_them = bits == self.nodes_by_free[free]  # then the domains have them indexed
                domain = domains.find_for_exact(free) if all_of_them else domains.find_for_nodes(bits)
                level = domains.levels[-1]
                return level.first[domain] + lowest_member(level.nodes_in(bits, domain))
        return -1

    def _candidates(self, need: Need, excluded: int) -> GangCandidates:
        """The nodes that could each hold a part of the need, best fit first."""
        buckets, domains = self.nodes_by_free, self.domains
        if need.devices == 0:
            bits = self._allowed(self.available_nodes, need, excluded)
            return GangCandidates([bits], bits, (), domains, cpus=self.capacity.cpus)
        fits = [self._allowed(bucket, need, excluded) for bucket in buckets[need.devices :]]
        spare = (
            [self._allowed(bucket, need, excluded) for bucket in buckets[need.last_node_devices : need.devices]]
            if need.last_node_devices
            else ()
        )
        bits = 0
        for bucket in fits:
            bits |= bucket
        whole = need.devices == self.node_devices_max and bits == buckets[self.node_devices_max]
        return GangCandidates(fits, bits, spare, domains, whole=whole)

    def _allowed(self, bits: int, need: Need, excluded: int) -> int:
        if excluded:
            bits ^= bits & excluded
        if bits and (need.cpus or need.memory_bytes or need.extras):
            bits &= self.capacity.nodes_with(need.cpus, need.memory_bytes, need.extras)
        return bits

    # ---------------------------------------------------------------- changes

    def take(self, places: Places) -> None:
        """Take the devices."""
        for node, count in places:
            self._shift(node, -count)

    def release(self, places: Places) -> None:
        """Release the devices."""
        for node, count in places:
            self._shift(node, count)

    def hold_shares(
        self,
        need: Need,
        places: Places,
        devices: Sequence[HeldShare] = (),
        indices: Sequence[SharePosition] = (),
    ) -> tuple[HeldShare, ...]:
        """Take a share of one device on each node; return the devices.

        Args:
            need: with a share.
            places: its nodes.
            devices: those that `release_shares` released, to hold the same again; empty to choose.
            indices: of the devices on their nodes, of a job that already runs; empty to choose.
        """
        held: list[HeldShare] = []
        for rank, (node, _) in enumerate(places):
            known = devices[rank] if devices else None
            index = indices[rank] if indices else -1
            if isinstance(known, HeldSlices) or not isinstance(index, int):
                held.append(known or HeldSlices(()))  # slices of a device that has MIG mode off by now: nothing here
                continue
            if known is not None:
                device = known
            elif indices:
                device = self.shared.with_index(node, index) or SharedDevice(need.share_group, index)
            else:
                device = self.shared.best_device(node, need.share_group, need.share_milli) or SharedDevice(
                    need.share_group
                )
            if self.shared.hold(node, device, need.share_milli):
                self._shift(node, -1)
            else:
                self.changed_nodes.add(node)
            held.append(device)
        return tuple(held)

    def can_hold(self, need: Need, node: int, held: HeldShare) -> bool:
        """Whether a share that was released is still free."""
        if isinstance(held, HeldSlices):
            return True
        return held.room >= need.share_milli if held.shares else self.free[node] > 0

    def release_shares(self, need: Need, places: Places, devices: Sequence[HeldShare]) -> None:
        """Release the shares that `hold_shares` took."""
        for (node, _), device in zip(places, devices, strict=True):
            if isinstance(device, HeldSlices):
                continue
            if self.shared.release(node, device, need.share_milli):
                self._shift(node, 1)
            else:
                self.changed_nodes.add(node)

    def mark_changed(self, node: int) -> None:
        """CPUs or memory of the node changed in the board's lists. `take` and `release` imply it for their nodes."""
        self.capacity.mark_changed(node)

    def remove_node(self, node: int) -> None:
        """Take the node out of service: its free devices are no longer offered; its used devices stay used."""
        if node not in self.removed_nodes:
            self._set_listed(node, back=False)
            self.removed_nodes.add(node)

    def restore_node(self, node: int) -> None:
        """Return the node to service."""
        if node in self.removed_nodes:
            self.removed_nodes.discard(node)
            self._set_listed(node, back=True)

    def _shift(self, node: int, count: int) -> None:
        self.changed_nodes.add(node)
        if self.capacity.cached_sets:
            self.capacity.mark_changed(node)
        before = self.free[node]
        after = self.free[node] = before + count
        if node in self.removed_nodes:
            return
        if (
            before < 0 or after < 0
        ):  # more in use than exist: devices became unhealthy under their jobs; such a node has none free
            before, after = max(0, before), max(0, after)
        bit = 1 << node
        self.nodes_by_free[before] ^= bit
        self.counts_by_free[before] -= 1
        self.nodes_by_free[after] |= bit
        self.counts_by_free[after] += 1
        self.free_total += after - before
        if self.domains is not None:
            self.domains.update_node(node, before, after)

    def _set_listed(self, node: int, *, back: bool) -> None:
        free = max(0, self.free[node])
        step = 1 if back else -1
        self.nodes_by_free[free] ^= 1 << node
        self.available_nodes ^= 1 << node
        self.counts_by_free[free] += step
        self.free_total += step * free
        self.changed_nodes.add(node)
        if self.domains is not None:
            self.domains.update_node(node, -1 if back else free, free if back else -1)
