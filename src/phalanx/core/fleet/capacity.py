"""What a whole fleet has: the capacity that quotas divide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.resources import MILLI_PER_DEVICE, Resources, extras_of


def fleet_resources(nodes: Mapping[NodeId, Node], seats: Iterable[tuple[str, int]]) -> Resources:
    """What the fleet has, in any state, with the seats of its licences."""
    return nodes_resources(nodes.values()) + Resources(extras=extras_of(seats))


def nodes_resources(nodes: Iterable[Node], *, healthy: bool = False) -> Resources:
    """What these nodes have together, in any state; with `healthy` without broken devices."""
    devices = cpus = memory_bytes = 0
    extras: list[tuple[str, int]] = []
    for node in nodes:
        devices += sum(device.healthy for device in node.devices) if healthy else len(node.devices)
        cpus += node.cpus
        memory_bytes += node.memory_bytes
        extras += node.extras
    return Resources(devices * MILLI_PER_DEVICE, cpus, memory_bytes, extras_of(extras))
