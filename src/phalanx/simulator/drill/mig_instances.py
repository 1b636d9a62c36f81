"""The MIG slices that exist on one simulated node, and what a real GPU would refuse: two instances in one place, or MIG mode off.

A slice exists from the preparation of its member until its output is drained, as on a real node. A supervisor that starts again removes what
is left of its own. A member waits for the slice of one that has to go: its attempt has ended, but the node has yet to hear of it.
"""

from __future__ import annotations

from phalanx.core.fleet.mig import occupied_bits
from phalanx.core.fleet.node import Node
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.share import GrantedSlice
from phalanx.node.logic.events import MemberKey
from phalanx.simulator.drill.violations import require


class SimulatedSlices:
    """The slices of a node's members."""

    def __init__(self, node: Node) -> None:
        self._devices = {device.index: device.mig for device in node.devices}
        self._node_id = node.id
        self._made: dict[MemberKey, tuple[GrantedSlice, ...]] = {}

    def make(self, key: MemberKey, grant: NodeGrant) -> None:
        """Make the slices of a member. A repeated call changes nothing.

        Raises:
            InvariantBroken: a device has MIG mode off, no such profile there, or something in its place.
        """
        slices = () if grant.share is None else grant.share.slices
        if not slices or key in self._made:
            return
        for one in slices:
            where = f"{self._node_id}:{one.device}"
            mig = self._devices.get(one.device)
            on = mig is not None and mig.on
            require(on, 1, f"a slice of job {key.job_id} would need MIG mode switched on, on {where}")
            assert mig is not None
            profile = mig.profile(one.profile)
            fits = profile is not None and one.start in profile.starts and one.memory_slices == profile.memory_slices
            require(fits, 1, f"{where} has no {one.profile} at {one.start}, for job {key.job_id}")
            taken = not occupied_bits(mig.slices) & one.bits
            require(taken, 1, f"a slice of job {key.job_id} is made where others have one, on {where}")
        other = self.holder(key, grant)
        if other is not None:
            where = f"{self._node_id}:{slices[0].device}"
            require(False, 1, f"a slice of job {key.job_id} is made where job {other.job_id} has one, on {where}")
        self._made[key] = slices

    def holder(self, key: MemberKey, grant: NodeGrant) -> MemberKey | None:
        """Another member that has a slice in a place that the grant names."""
        slices = () if grant.share is None else grant.share.slices
        return next(
            (
                other
                for other, owned in self._made.items()
                if other != key
                and any(one.device == each.device and one.bits & each.bits for one in slices for each in owned)
            ),
            None,
        )

    def remove(self, key: MemberKey) -> None:
        """Remove the slices of a member. Idempotent."""
        self._made.pop(key, None)

    def remove_all(self) -> None:
        """Remove all of them."""
        self._made.clear()
