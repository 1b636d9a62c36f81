"""Whether a gang fits, found the slow and plain way: what the scheduler's index is held against."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import device_fits
from phalanx.core.ids import NodeId
from phalanx.core.scheduling.shape import Shape
from phalanx.core.state.snapshot import Snapshot, Usage
from phalanx.core.work.allocation import Allocation, NodeGrant


@dataclass(slots=True)
class Room:
    """What is still free on one node within this cycle."""

    node: Node
    devices: list[int]
    cpus: int
    memory_bytes: int


@dataclass(slots=True)
class FreeRooms:
    """Free room of every schedulable node; `take` books a placement for the rest of the cycle."""

    rooms: dict[NodeId, Room] = field(default_factory=dict)
    free_devices: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> FreeRooms:
        """The snapshot's free room, node ids ascending so that ties end in the id."""
        rooms: dict[NodeId, Room] = {}
        for node_id in sorted(snapshot.nodes):
            node = snapshot.nodes[node_id]
            if node.schedulable:
                rooms[node_id] = _room(node, snapshot.usage_of(node_id))
        return cls(rooms=rooms, free_devices=sum(len(room.devices) for room in rooms.values()))

    def take(self, allocation: Allocation) -> None:
        """Book the allocation."""
        for grant in allocation.grants:
            room = self.rooms[grant.node_id]
            room.devices = [index for index in room.devices if index not in grant.devices]
            room.cpus -= grant.cpus
            room.memory_bytes -= grant.memory_bytes
            self.free_devices -= len(grant.devices)


def find(free: FreeRooms, shape: Shape, avoid: tuple[NodeId, ...] = ()) -> Allocation | None:
    """The allocation that leaves the least room behind: fullest nodes first, ties by id; nodes to avoid only if nothing else fits.

    Cost: linear in nodes, plus a sort of those that fit.
    """
    fits: list[tuple[bool, int, int, NodeId, list[int]]] = []
    for node_id, room in free.rooms.items():
        if room.cpus < shape.cpus or room.memory_bytes < shape.memory_bytes or len(room.devices) < shape.devices:
            continue
        devices = room.devices
        if shape.model is not None or shape.device_memory_bytes:
            wanted = _matching(room.node, shape)
            devices = [index for index in devices if index in wanted]
            if len(devices) < shape.devices:
                continue
        fits.append((node_id in avoid, len(room.devices), room.cpus, node_id, devices))
    if len(fits) < shape.nodes:
        return None
    fits.sort(key=lambda fit: fit[:4])
    chosen = sorted(
        fits[: shape.nodes], key=lambda fit: fit[3]
    )  # ranks follow node names, so that logs and racks read in order
    return Allocation(grants=tuple(_grant(shape, rank, fit[3], fit[4]) for rank, fit in enumerate(chosen)))


def most_free(free: FreeRooms, shape: Shape) -> int:
    """The largest number of matching free devices on any one node."""
    return max(
        (len(set(room.devices) & _matching(room.node, shape)) for room in free.rooms.values()),
        default=0,
    )


def _matching(node: Node, shape: Shape) -> set[int]:
    return {device.index for device in node.devices if device_fits(device, shape.model, shape.device_memory_bytes)}


def _grant(shape: Shape, rank: int, node_id: NodeId, devices: list[int]) -> NodeGrant:
    return NodeGrant(
        node_id=node_id,
        node_rank=rank,
        devices=tuple(devices[: shape.devices]),
        cpus=shape.cpus,
        memory_bytes=shape.memory_bytes,
        tasks=shape.tasks,
        first_rank=rank * shape.tasks,
    )


def _room(node: Node, held: Usage) -> Room:
    return Room(
        node=node,
        devices=[device.index for device in node.devices if device.healthy and device.index not in held.devices],
        cpus=node.cpus - held.host.cpus,
        memory_bytes=node.memory_bytes - held.host.memory_bytes,
    )
