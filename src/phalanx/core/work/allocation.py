"""Granted resources: tasks on devices of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId
from phalanx.core.resources import Extras, Resources
from phalanx.core.work.share import MILLI_PER_DEVICE, DeviceShare


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrant:
    """One node's part of a gang.

    Attributes:
        node_rank: this node's number in the job, from 0.
        devices: indices on the node, ascending; empty for CPU-only work. With a share: the one device that it is a part of. With MIG slices:
            the devices that they lie on.
        tasks: processes started here: ranks `first_rank .. first_rank + tasks - 1`.
        share: the part of the device that is granted; None for whole devices.
        extras: named amounts of what the node offers.
        role: number of its role in the gang, as `Role.each` counts.
    """

    node_id: NodeId
    node_rank: int
    devices: tuple[int, ...]
    cpus: int
    memory_bytes: int
    tasks: int
    first_rank: int
    share: DeviceShare | None = None
    extras: Extras = ()
    role: int = 0

    @property
    def whole_devices(self) -> int:
        """Number of devices that no other job may use."""
        return len(self.devices) if self.share is None else 0

    @property
    def visible_devices(self) -> int:
        """Number of devices that its tasks see: a MIG slice is one."""
        return len(self.share.slices) if self.share is not None and self.share.slices else len(self.devices)

    @property
    def milli(self) -> int:
        """Thousandths of devices."""
        return len(self.devices) * MILLI_PER_DEVICE if self.share is None else self.share.milli

    @property
    def host(self) -> Resources:
        """What it holds of the node besides devices."""
        return Resources(0, self.cpus, self.memory_bytes, self.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """All grants of one attempt, by node rank. Granted and released as a whole. `licences`: seats held by the whole gang."""

    grants: tuple[NodeGrant, ...]
    licences: Extras = ()

    @property
    def gpus(self) -> int:
        """Devices that its tasks see, over all nodes: whole ones, and those of which it has a share."""
        return sum(grant.visible_devices for grant in self.grants)

    @property
    def milli(self) -> int:
        """Thousandths of devices held, over all nodes: what counts for quotas and is billed."""
        return sum(grant.milli for grant in self.grants)

    @property
    def resources(self) -> Resources:
        """Everything that it holds, over all nodes."""
        return sum((grant.host for grant in self.grants), Resources(self.milli, extras=self.licences))

    @property
    def world_size(self) -> int:
        """Tasks over all nodes."""
        return sum(grant.tasks for grant in self.grants)

    def grant_on(self, node_id: NodeId) -> NodeGrant | None:
        """The grant on one node, or None."""
        return next((grant for grant in self.grants if grant.node_id == node_id), None)
