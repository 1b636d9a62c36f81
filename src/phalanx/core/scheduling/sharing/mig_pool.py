"""The pool of nodes of one kind whose devices are divided by MIG. It has no whole devices: only slices, CPUs and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.core.fleet.topology import TopologyTree
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.pool import DevicePool, HeldShare, SharePosition
from phalanx.core.scheduling.sharing.mig_devices import DivisibleDevice, HeldSlices, MigDeviceIndex, SliceRequest


class MigPool(DevicePool):
    """Free slices of the nodes of one kind.

    Attributes:
        slices: the devices, and what is taken of them.
    """

    __slots__ = ("slices",)

    def __init__(
        self,
        sizes: Sequence[int],
        divisible: Mapping[int, Sequence[DivisibleDevice]],
        *,
        tree: TopologyTree | None = None,
        cpus: Sequence[int] | None = None,
        memory: Sequence[int] | None = None,
        extras: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """As `DevicePool`, without whole devices; `divisible`: the devices of each node."""
        super().__init__(sizes, tree=tree, cpus=cpus, memory=memory, extras=extras)
        self.slices = MigDeviceIndex(divisible)
        self.divided_devices = {node: len(own) for node, own in divisible.items()}

    def fits_ever(self, need: Need) -> bool:
        """Whether the pool without jobs, with every node back, could hold the need. Ignores CPUs, memory and topology."""
        if not need.mig_profile:
            return super().fits_ever(need)
        rooms = (self.slices.room_when_empty(node, need.mig_profile) for node in self.slices.devices)
        return sum(room >= need.mig_slices for room in rooms) >= need.nodes

    def hold_shares(
        self,
        need: Need,
        places: Places,
        devices: Sequence[HeldShare] = (),
        indices: Sequence[SharePosition] = (),
    ) -> tuple[HeldShare, ...]:
        """Take the slices on each node; return them. The arguments are as in `DevicePool`."""
        request = SliceRequest(need.mig_profile, need.mig_slices)
        held: list[HeldShare] = []
        for rank, (node, _) in enumerate(places):
            if devices:
                found = devices[rank]
                assert isinstance(found, HeldSlices), found
            elif indices:
                known = indices[rank]
                found = self.slices.at(node, () if isinstance(known, int) else known)
            else:
                found = self.slices.choose(node, request)
            self.slices.hold(node, found)
            self.changed_nodes.add(node)
            held.append(found)
        return tuple(held)

    def release_shares(self, need: Need, places: Places, devices: Sequence[HeldShare]) -> None:
        """Release the slices that `hold_shares` took."""
        for (node, _), held in zip(places, devices, strict=True):
            assert isinstance(held, HeldSlices), (need, held)
            self.slices.release(node, held)
            self.changed_nodes.add(node)

    def can_hold(self, need: Need, node: int, held: HeldShare) -> bool:
        """Whether slices that were released are still free."""
        return bool(need.mig_profile) and isinstance(held, HeldSlices) and self.slices.is_free(node, held)

    def _share_candidates(self, need: Need, excluded: int) -> Iterator[int]:
        """Disjoint sets of nodes that can hold the slices, those first where the most stays possible."""
        for bits in self.slices.nodes_with_room(SliceRequest(need.mig_profile, need.mig_slices)):
            yield self._allowed(bits & self.available_nodes, need, excluded)
