"""What the nodes of one fleet have, and what of it is free: devices, CPUs, memory, named amounts, licences. It knows no jobs.

`board.Board` adds the jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.core.fleet.topology import TopologyTree
from phalanx.core.resources import Extras
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_bitsets import bitset_of, lowest_member, lowest_members, members_of
from phalanx.core.scheduling.pool import DevicePool, HeldShare, SharePosition
from phalanx.core.scheduling.shape import hardest_first
from phalanx.core.scheduling.sharing.fragmentation import FragmentationIndex
from phalanx.core.scheduling.sharing.request_mix import Demand


class NodeCapacity:
    """The capacity of one fleet, and searches for room in it.

    Attributes:
        pools: one per kind of device; `pool_of_node[node]` is the index of a node's pool.
        closed_nodes: nodes that left and are not back.
        extras: free named amounts by node number.
        licences: seats of each licence.
        free_licences: free seats of each licence; negative if more are in use than exist.
        foreign_devices: devices in use outside Phalanx, of the nodes that have some.
        fragmentation: scores where parts of nodes go, on a board that has jobs with shares; else None, and best fit by whole devices decides.
    """

    __slots__ = (
        "_rescored",
        "closed_nodes",
        "cpus",
        "devices_of_node",
        "extras",
        "foreign_devices",
        "fragmentation",
        "free_licences",
        "licences",
        "memory",
        "node_devices_max",
        "pool_of_node",
        "pools",
        "tree",
        "twins",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        pools: Sequence[DevicePool] = (),
        pool_of_node: Sequence[int] = (),
        cpus: list[int] | None = None,
        memory: list[int] | None = None,
        extras: Mapping[str, list[int]] | None = None,
        licences: Mapping[str, int] | None = None,
        twins: dict[int, tuple[int, ...]] | None = None,
        tree: TopologyTree | None = None,
    ) -> None:
        self.pools = list(pools) or [DevicePool(sizes)]
        self.pool_of_node = list(pool_of_node) or [0] * len(sizes)
        self.devices_of_node = list(sizes)
        self.node_devices_max = max(self.devices_of_node, default=0)
        self.cpus = cpus or []
        self.memory = memory or []
        self.extras = dict(extras or {})
        self.licences = dict(licences or {})
        self.free_licences = dict(self.licences)
        self.twins = twins or {}
        self.tree = tree
        self.closed_nodes: set[int] = set()
        self.foreign_devices: dict[int, int] = {}
        self.fragmentation: FragmentationIndex | None = None
        self._rescored = 0  # bitset of nodes that changed since the index last read them

    def need_of(self, gpus: int) -> Need:
        """Whole nodes and the remainder on one more, or a part of one node: the shape of jobs in traces."""
        whole, rest = divmod(gpus, self.node_devices_max)
        return (
            Need(nodes=1, devices=gpus)
            if gpus <= self.node_devices_max
            else Need(nodes=whole, devices=self.node_devices_max, last_node_devices=rest)
        )

    def domains(self, level: int) -> NDArray[np.int64]:
        """Domain of each node number at the level; the node itself for the last one."""
        domains = self.tree.domains if self.tree is not None else ()
        return np.array(domains[level] if 0 <= level < len(domains) else range(len(self.devices_of_node)))

    @property
    def free_total(self) -> int:
        """Devices free on nodes that accept work."""
        return sum(pool.free_total for pool in self.pools)

    def devices_on_node(self, node: int) -> int:
        """Devices of the node, those that MIG divides included."""
        return max(0, self.devices_of_node[node]) + self.pools[self.pool_of_node[node]].divided_devices.get(node, 0)

    def lacking_licence(self, licences: Extras) -> str:
        """The first licence of which too few seats are free; empty if all suffice."""
        return next((name for name, seats in licences if self.free_licences.get(name, 0) < seats), "")

    def nodes_of(self, places: Iterable[tuple[int, int]]) -> int:
        """The nodes of these places as a bitset of all their numbers."""
        return bitset_of(number for node, _ in places for number in self.twins.get(node, (node,)))

    # ---------------------------------------------------------------- search

    def find_need(self, need: Need, excluded: int = 0) -> Places | None:
        """Where the need fits now: a part of one node where it fragments the free capacity least, a gang in the first kind that holds it."""
        if need.others:
            return self._find_roles(need, excluded)
        if self.fragmentation is not None and need.nodes == 1 and not need.last_node_devices and not need.mig_profile:
            return self._find_by_fragmentation(self.fragmentation, need, excluded)
        for kind in need.kinds:
            places = self.pools[kind].find(need, excluded)
            if places is not None:
                return places
        return None

    def _find_roles(self, need: Need, excluded: int) -> Places | None:
        """Where each role of a gang fits on nodes of its own, chosen in the order of the roles, else for the largest parts first."""
        roles = need.roles
        largest = hardest_first([(role.devices, role.cpus, role.memory_bytes) for role in roles])
        return self._find_in_order(roles, range(len(roles)), excluded) or self._find_in_order(roles, largest, excluded)

    def _find_in_order(self, roles: Sequence[Need], order: Iterable[int], excluded: int) -> Places | None:
        """The same in one order. The parts of a role without devices may lie on nodes of several kinds."""
        found: list[Places] = [()] * len(roles)
        for number in order:
            role = roles[number]
            for part in (role,) if role.devices else (replace(role, nodes=1),) * role.nodes:
                places = self.find_need(part, excluded)
                if places is None:
                    return None
                found[number] += places
                excluded |= self.nodes_of(places)
        return tuple([place for places in found for place in sorted(places)])

    def _find_by_fragmentation(self, index: FragmentationIndex, need: Need, excluded: int) -> Places | None:
        candidates = 0
        for kind in need.kinds:
            candidates |= self.pools[kind].single_candidates(need, excluded)
        if not candidates:
            return None
        if not candidates & (candidates - 1):
            return ((lowest_member(candidates), need.devices),)
        changed = candidates & self._rescored  # a node that filled up is read when it has room again
        self._rescored ^= changed
        for node in lowest_members(changed, changed.bit_count()):
            pool = self.pools[self.pool_of_node[node]]
            host = (self.cpus[node], self.memory[node]) if self.cpus else (0, 0)
            index.set_node(node, *host, pool.rooms_on(node))
        best = index.best(demand_of(need), members_of(candidates))
        return None if best is None else ((best, need.devices),)

    # ---------------------------------------------------------------- nodes

    def remove_node(self, node: int) -> None:
        """No new work on the node. The end of its jobs is reported separately, as their attempts end."""
        self.closed_nodes.add(node)
        self.pools[self.pool_of_node[node]].remove_node(node)

    def restore_node(self, node: int) -> None:
        """The node accepts work again."""
        self.closed_nodes.discard(node)
        self.pools[self.pool_of_node[node]].restore_node(node)

    def set_foreign_usage(self, node: int, count: int, *, cpus: int = 0, memory_bytes: int = 0) -> None:
        """Set the devices of the node in use outside Phalanx, and add the increase in CPUs and bytes. Call it for each number of a node."""
        more = count - self.foreign_devices.get(node, 0)
        self.foreign_devices[node] = count
        if not count:
            del self.foreign_devices[node]
        pool = self.pools[self.pool_of_node[node]]
        self._mark_rescored(((node, count),))
        if cpus or memory_bytes:
            self.cpus[node] -= cpus
            self.memory[node] -= memory_bytes
            pool.mark_changed(node)
        if more > 0:
            pool.take(((node, more),))
        elif more < 0:
            pool.release(((node, -more),))

    # ---------------------------------------------------------------- use

    def occupy(
        self,
        need: Need | None,
        places: Places,
        shared: Sequence[HeldShare] = (),
        indices: Sequence[SharePosition] = (),
    ) -> tuple[HeldShare, ...]:
        """Take these places without a job; `vacate` releases them. Returns the shared devices; the rest as in `DevicePool.hold_shares`."""
        held: tuple[HeldShare, ...] = ()
        if need is not None and need.others:
            for role, place in self._each_place(need, places, -1):
                self.occupy(role, (place,))
        elif places:
            self._mark_rescored(places)
            pool = self.pools[self.pool_of_node[places[0][0]]]
            if need is not None and need.share_milli:
                held = pool.hold_shares(need, places, shared, indices)
            else:
                pool.take(places)
            if need is not None and need.asks_host:
                self._adjust_host_use(need, places, -1)
        return held

    def vacate(self, need: Need | None, places: Places, shared: Sequence[HeldShare] = ()) -> None:
        """Release places taken by `occupy`, and the shared devices that it returned."""
        if need is not None and need.others:
            for role, place in self._each_place(need, places, 1):
                self.vacate(role, (place,))
        elif places:
            self._mark_rescored(places)
            pool = self.pools[self.pool_of_node[places[0][0]]]
            if need is not None and need.share_milli:
                pool.release_shares(need, places, shared)
            else:
                pool.release(places)
            if need is not None and need.asks_host:
                self._adjust_host_use(need, places, 1)

    def _each_place(self, need: Need, places: Places, sign: int) -> list[tuple[Need, tuple[int, int]]]:
        """Each place of a gang with several roles with its role's need: they may lie in several pools. Counts the gang's licences."""
        self._adjust_host_use(need, (), sign)
        return [(role, place) for role, own in need.places_by_role(places) for place in own]

    def _mark_rescored(self, places: Places) -> None:
        if self.fragmentation is not None:
            for node, _ in places:
                for number in self.twins.get(node, (node,)):
                    self._rescored |= 1 << number

    def _adjust_host_use(self, need: Need, places: Places, sign: int) -> None:
        for name, seats in need.licences:
            self.free_licences[name] = self.free_licences.get(name, 0) + sign * seats
        for node, _ in places:
            for number in self.twins.get(node, (node,)):
                self.cpus[number] += sign * need.cpus
                self.memory[number] += sign * need.memory_bytes
                for name, amount in need.extras:
                    if name in self.extras:  # else no node offers it any more, and nothing can be placed with it
                        self.extras[name][number] += sign * amount
                if number != node:
                    self.pools[self.pool_of_node[number]].mark_changed(number)


def demand_of(need: Need) -> Demand:
    """What one part of the need takes of a node."""
    return Demand(need.cpus, need.memory_bytes, need.devices, need.share_milli, frozenset(need.kinds))
