"""Resources in use now, including the placements of one plan; looked up on demand, never copied as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.state.snapshot import EMPTY_USAGE, Usage
from phalanx.core.work.allocation import Allocation


class Taken:
    """Devices, CPUs and memory in use now, including this plan's placements."""

    def __init__(self, usage: Mapping[NodeId, Usage]) -> None:
        self._usage = usage
        self._changed: dict[NodeId, tuple[set[int], int, int]] = {}

    def devices(self, node_id: NodeId) -> Collection[int]:
        """Devices in use on the node."""
        more = self._changed.get(node_id)
        return more[0] if more is not None else self._usage.get(node_id, EMPTY_USAGE).devices

    def add(self, allocation: Allocation) -> None:
        """Count this allocation as in use too."""
        for grant in allocation.grants:
            held = self._usage.get(grant.node_id, EMPTY_USAGE)
            devices, cpus, memory = self._changed.get(grant.node_id) or (
                set(held.devices),
                held.cpus,
                held.memory_bytes,
            )
            devices.update(grant.devices)
            self._changed[grant.node_id] = (devices, cpus + grant.cpus, memory + grant.memory_bytes)

    def room_for(self, allocation: Allocation, nodes: Mapping[NodeId, Node]) -> bool:
        """Whether its CPUs and memory are free."""
        for grant in allocation.grants:
            if not (grant.cpus or grant.memory_bytes):
                continue
            held = self._usage.get(grant.node_id, EMPTY_USAGE)
            _, cpus, memory = self._changed.get(grant.node_id) or (None, held.cpus, held.memory_bytes)
            node = nodes[grant.node_id]
            if cpus + grant.cpus > node.cpus or memory + grant.memory_bytes > node.memory_bytes:
                return False
        return True
