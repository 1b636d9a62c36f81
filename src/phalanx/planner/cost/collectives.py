"""Time of collectives: bandwidth terms of ring algorithms, and a latency that grows with the logarithm of the group size.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4: a ring
all-gather or reduce-scatter of n bytes over p ranks moves (p - 1)/p n through every rank, an all-reduce both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.planner.cost.coefficients import Physics
from phalanx.planner.cost.machine import Machine


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange data. `bytes_per_s` and `latency_s` are per rank; `near` of the ranks share one link domain."""

    size: int
    near: int
    bytes_per_s: float
    latency_s: float

    def all_gather_s(self, total_bytes: float) -> float:
        """Return the time of an all-gather or reduce-scatter of `total_bytes` over the group."""
        if self.size == 1:
            return 0.0
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.latency_s * math.log2(self.size)

    def all_reduce_s(self, total_bytes: float) -> float:
        """Return the time of an all-reduce of `total_bytes`."""
        return 2.0 * self.all_gather_s(total_bytes)


class RankNetwork:
    """Bandwidth and latency between the ranks of a layout. Derived once per machine."""

    def __init__(self, machine: Machine, physics: Physics) -> None:
        gpu, measured = machine.gpu, machine.measured
        local = gpu.link_bytes_per_s if gpu.link_domain > 1 else gpu.pcie_bytes_per_s
        self.island = _island(machine)
        self.near_bytes_per_s = local * physics.link_share
        self.far_bytes_per_s = machine.network_bytes_per_s * physics.network_share
        self.near_latency_s = physics.latency_s
        self.far_latency_s = 2.0 * physics.latency_s
        if measured is not None:
            self.near_bytes_per_s = measured.within_bytes_per_s or self.near_bytes_per_s
            self.far_bytes_per_s = measured.between_bytes_per_s or self.far_bytes_per_s
            self.near_latency_s = measured.within_latency_s or self.near_latency_s
            self.far_latency_s = measured.between_latency_s or self.far_latency_s
        # NVLink bridges join PCIe cards in pairs: a domain of 2 in a node of 8. Wider groups use PCIe.
        self.bridge_only = 1 < gpu.link_domain < machine.gpus_per_node
        self.link_domain = gpu.link_domain
        self.pcie_bytes_per_s = gpu.pcie_bytes_per_s * physics.link_share
        # A measured all-to-all rate takes precedence over the all-reduce rate of the same links.
        self._all_to_all_near = None if measured is None else measured.all_to_all_within_bytes_per_s
        self._all_to_all_far = None if measured is None else measured.all_to_all_between_bytes_per_s

    def group(self, size: int, stride: int) -> RankGroup:
        """Return the group of `size` ranks, every `stride`-th in rank order."""
        extent = size * stride
        # Blocks that do not divide a node span nodes: with six devices, four lie in one node and the next block in two nodes.
        near = math.gcd(self.island, extent) // stride
        return self._group(size, max(1, min(near, size)), extent)

    def _group(self, size: int, near: int, extent: int) -> RankGroup:
        local = self.local_bytes_per_s(extent)
        if size <= near:
            return RankGroup(size, near, local, self.near_latency_s)
        # Each device has its own share of the network, so a group uses the shares of all its devices in the node.
        return RankGroup(size, near, min(local, near * self.far_bytes_per_s), self.far_latency_s)

    def local_bytes_per_s(self, extent: int) -> float:
        """Return the rate inside a node for a block of `extent` ranks: over the bridge if it joins all of them, else over PCIe."""
        if self.bridge_only and extent > self.link_domain:
            return min(self.near_bytes_per_s, self.pcie_bytes_per_s)
        return self.near_bytes_per_s

    def axis(self, layout: Layout, axis: Axis) -> RankGroup:
        """Return the group of ranks along one axis."""
        return self.group(layout.size(axis), layout.stride(axis))

    def axes(self, layout: Layout, *axes: Axis) -> RankGroup:
        """Return the group of ranks along several axes together."""
        size = math.prod(layout.size(axis) for axis in axes)
        wide = [axis for axis in layout.order if axis in axes and layout.size(axis) > 1]
        if not wide:
            return self.group(1, 1)
        near = 1
        for axis in wide:
            near *= self.axis(layout, axis).near
        group = self.group(size, layout.stride(wide[0]))
        if near == group.near:
            return group
        return self._group(size, near, max(layout.size(axis) * layout.stride(axis) for axis in wide))

    def hop_bytes_per_s(self, stride: int) -> float:
        """Return the rate to the rank `stride` further, with one pair of ranks per device."""
        return self.local_bytes_per_s(stride + 1) if stride < self.island else self.far_bytes_per_s

    def all_to_all_s(self, group: RankGroup, near_bytes: float, far_bytes: float) -> float:
        """Return the time in which each rank sends `near_bytes` to ranks of its link domain and, at the same time, `far_bytes` beyond."""
        if group.size == 1:
            return 0.0
        local = self._all_to_all_near or (group.bytes_per_s if group.size <= group.near else self.near_bytes_per_s)
        seconds = max(near_bytes / local, far_bytes / (self._all_to_all_far or self.far_bytes_per_s))
        return seconds + group.latency_s * math.log2(group.size)


def _island(machine: Machine) -> int:
    """Return the number of devices that reach each other without the network: those of a node, or of the nodes in one link domain.

    Nodes are distributed evenly over domains: 128 devices in domains of 72 are two islands of 64.
    """
    per_node, domain = machine.gpus_per_node, machine.gpu.link_domain
    together = min(machine.nodes, domain // per_node)
    if together <= 1:
        return per_node
    islands = -(-machine.nodes // together)
    return -(-machine.nodes // islands) * per_node
