"""What is held as of now and by the placements of one plan: looked up where asked, never copied whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.state.snapshot import EMPTY_USAGE, Usage
from phalanx.core.work.allocation import Allocation


class Taken:
    """Devices, CPUs and memory held as of now, and by this plan's placements: looked up where asked, never copied whole."""

    def __init__(self, usage: Mapping[NodeId, Usage]) -> None:
        self._usage = usage
        self._more: dict[NodeId, tuple[set[int], int, int]] = {}

    def devices(self, node_id: NodeId) -> Collection[int]:
        """Devices held on the node."""
        more = self._more.get(node_id)
        return more[0] if more is not None else self._usage.get(node_id, EMPTY_USAGE).devices

    def add(self, allocation: Allocation) -> None:
        """This is held too."""
        for grant in allocation.grants:
            held = self._usage.get(grant.node_id, EMPTY_USAGE)
            devices, cpus, memory = self._more.get(grant.node_id) or (set(held.devices), held.cpus, held.memory_bytes)
            devices.update(grant.devices)
            self._more[grant.node_id] = (devices, cpus + grant.cpus, memory + grant.memory_bytes)

    def room_for(self, allocation: Allocation, nodes: Mapping[NodeId, Node]) -> bool:
        """Whether the CPUs and memory for it are free."""
        for grant in allocation.grants:
            if not (grant.cpus or grant.memory_bytes):
                continue
            held = self._usage.get(grant.node_id, EMPTY_USAGE)
            _, cpus, memory = self._more.get(grant.node_id) or (None, held.cpus, held.memory_bytes)
            node = nodes[grant.node_id]
            if cpus + grant.cpus > node.cpus or memory + grant.memory_bytes > node.memory_bytes:
                return False
        return True
