"""How long ranks take to exchange data: bandwidth terms of ring algorithms, and a latency that grows with the logarithm of the group.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4: a ring
all-gather or reduce-scatter of n bytes over p ranks moves (p - 1)/p n through every rank, an all-reduce both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.performance.coefficients import Physics
from phalanx.core.performance.machine import Machine
from phalanx.core.work.layout import Axis, Layout


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange data. `bytes_per_s` and `latency_s` as one of them sees it; `near` of them share one link domain."""

    size: int
    near: int
    bytes_per_s: float
    latency_s: float

    def gather_s(self, total_bytes: float) -> float:
        """All-gather, or reduce-scatter, of `total_bytes` over the group."""
        if self.size == 1:
            return 0.0
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.latency_s * math.log2(self.size)

    def all_reduce_s(self, total_bytes: float) -> float:
        """All-reduce of `total_bytes`."""
        return 2.0 * self.gather_s(total_bytes)


class Network:
    """What groups of a layout see of the machine. Derived once per layout."""

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
        # A pair of NVLink-bridged PCIe cards is a domain of 2 in a node of 8: wider groups go over PCIe.
        self.bridge_only = 1 < gpu.link_domain < machine.gpus_per_node
        self.link_domain = gpu.link_domain
        self.pcie_bytes_per_s = gpu.pcie_bytes_per_s * physics.link_share
        # An all-to-all that was measured goes before what all-reduces of the same links reach.
        self._swap_near = None if measured is None else measured.all_to_all_within_bytes_per_s
        self._swap_far = None if measured is None else measured.all_to_all_between_bytes_per_s

    def group(self, size: int, stride: int) -> Group:
        """`size` ranks, every `stride`-th in rank order."""
        extent = size * stride
        # Blocks that do not fill nodes evenly lie across them: four of six devices here, the next two and two of the next node.
        near = math.gcd(self.island, extent) // stride
        return self._of(size, max(1, min(near, size)), extent)

    def _of(self, size: int, near: int, extent: int) -> Group:
        local = self.local_bytes_per_s(extent)
        if size <= near:
            return Group(size, near, local, self.near_latency_s)
        # Every device has its share of the network, so a group enters and leaves a node through as many as it has there.
        return Group(size, near, min(local, near * self.far_bytes_per_s), self.far_latency_s)

    def local_bytes_per_s(self, extent: int) -> float:
        """Inside a node, between ranks of a block of `extent`: by the bridge where it joins them all, else by PCIe."""
        if self.bridge_only and extent > self.link_domain:
            return min(self.near_bytes_per_s, self.pcie_bytes_per_s)
        return self.near_bytes_per_s

    def axis(self, layout: Layout, axis: Axis) -> Group:
        """The ranks along one axis."""
        return self.group(layout.size(axis), layout.stride(axis))

    def axes(self, layout: Layout, *axes: Axis) -> Group:
        """The ranks along several axes together."""
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
        return self._of(size, near, max(layout.size(axis) * layout.stride(axis) for axis in wide))

    def hop_bytes_per_s(self, stride: int) -> float:
        """To the rank `stride` further, one pair alone per device."""
        return self.local_bytes_per_s(stride + 1) if stride < self.island else self.far_bytes_per_s

    def all_to_all_s(self, group: Group, sent_bytes: float) -> float:
        """Every rank of the group sends `sent_bytes` in equal parts to all, itself included: what is for its own node goes by links."""
        if group.size == 1:
            return 0.0
        far = (group.size - group.near) / group.size
        near = (group.near - 1) / group.size
        local = self._swap_near or (group.bytes_per_s if group.size <= group.near else self.near_bytes_per_s)
        seconds = max(sent_bytes * near / local, sent_bytes * far / (self._swap_far or self.far_bytes_per_s))
        return seconds + group.latency_s * math.log2(group.size)


def _island(machine: Machine) -> int:
    """Devices that reach each other without the network: those of a node, or of the nodes that one link domain spans.

    Nodes of several domains are taken evenly: 128 devices in domains of 72 are two islands of 64.
    """
    per_node, domain = machine.gpus_per_node, machine.gpu.link_domain
    together = min(machine.nodes, domain // per_node)
    if together <= 1:
        return per_node
    islands = -(-machine.nodes // together)
    return -(-machine.nodes // islands) * per_node
