"""Devices of a pool that jobs share: which nodes have room for a share, and which device of a node takes it.

A device becomes shared with its first share, and is a whole free device again after its last. Only shares of one group (`DeviceShare.group`)
lie on one device. Whole devices are not here: the pool counts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.work.share import MILLI_PER_DEVICE


class SharedDevice:
    """A device with shares. Mutable, owned by its pool.

    Attributes:
        group: of all its shares.
        used: thousandths in use.
        index: on its node, as the records have it; -1 while none of its jobs has been placed.
    """

    __slots__ = ("group", "index", "shares", "used")

    def __init__(self, group: str, index: int = -1) -> None:
        self.group = group
        self.index = index
        self.used = 0
        self.shares = 0

    @property
    def room(self) -> int:
        """Thousandths not in use."""
        return MILLI_PER_DEVICE - self.used


class SharedDeviceIndex:
    """The shared devices of one pool.

    Attributes:
        on_node: shared devices of each node that has some, in the order in which they became shared.
    """

    __slots__ = ("_nodes", "_rooms", "on_node")

    def __init__(self) -> None:
        self.on_node: dict[int, list[SharedDevice]] = {}
        self._rooms: dict[str, dict[int, dict[int, int]]] = {}  # group -> room -> node -> its devices with that room
        self._nodes: dict[str, dict[int, int]] = {}  # group -> room -> these nodes as a bitset

    def nodes_with_room(self, group: str, milli: int) -> Iterator[tuple[int, int]]:
        """Each room that suffices, smallest first, with the bitset of nodes that have a device of the group with exactly this room."""
        nodes = self._nodes.get(group, {})
        for room in sorted(nodes):
            if room >= milli:
                yield room, nodes[room]

    def best_device(self, node: int, group: str, milli: int) -> SharedDevice | None:
        """The device of the group on this node with the least room that suffices; None without one."""
        fitting = [one for one in self.on_node.get(node, ()) if one.group == group and one.room >= milli]
        return min(fitting, key=lambda one: one.room, default=None)

    def room_by_group(self) -> dict[str, int]:
        """The most room that one device of each group has."""
        return {group: max(rooms) for group, rooms in self._rooms.items()}

    def with_index(self, node: int, index: int) -> SharedDevice | None:
        """The shared device with this index on the node, or None."""
        return next((one for one in self.on_node.get(node, ()) if one.index == index), None)

    def hold(self, node: int, device: SharedDevice, milli: int) -> bool:
        """Add a share; returns whether it is the device's first, so that it was a whole free device until now."""
        first = not device.shares
        if first:
            self.on_node.setdefault(node, []).append(device)
        else:
            self._list(node, device, -1)
        device.used += milli
        device.shares += 1
        self._list(node, device, 1)
        return first

    def release(self, node: int, device: SharedDevice, milli: int) -> bool:
        """Remove a share; returns whether it was the device's last, so that it is a whole free device now."""
        self._list(node, device, -1)
        device.used -= milli
        device.shares -= 1
        if device.shares:
            self._list(node, device, 1)
            return False
        rest = [one for one in self.on_node[node] if one is not device]
        if rest:
            self.on_node[node] = rest
        else:
            del self.on_node[node]
        return True

    def _list(self, node: int, device: SharedDevice, step: int) -> None:
        group, room = device.group, device.room
        counts = self._rooms.setdefault(group, {}).setdefault(room, {})
        before = counts.get(node, 0)
        if before + step:
            counts[node] = before + step
        else:
            del counts[node]
        if before and before + step:
            return
        nodes = self._nodes.setdefault(group, {})
        nodes[room] = nodes.get(room, 0) ^ 1 << node
        if not counts:
            for of_group in (self._rooms, self._nodes):
                del of_group[group][room]
                if not of_group[group]:
                    del of_group[group]
