"""The state that a plan is made from: nodes, their usage, and pending jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import NodePool, PoolNode
from phalanx.core.ids import JobId, NodeId, PoolId, QueueId, ReservationId
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import Licence
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import MILLI_PER_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that live allocations hold on one node. Jobs without GPUs hold only CPUs and memory.

    Attributes:
        devices: in use, as a whole or in part.
        shares: devices in use in part: thousandths in use, and the group of all shares.
        host: what is in use besides devices.
        slices: devices with MIG slices: what these occupy (`slice_bits`).
    """

    devices: frozenset[int] = frozenset()
    host: Resources = NO_RESOURCES
    shares: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    slices: Mapping[int, int] = field(default_factory=dict)

    def plus(self, grant: NodeGrant) -> Usage:
        """With this grant too."""
        return self._changed(grant, 1)

    def minus(self, grant: NodeGrant) -> Usage:
        """Without this grant, which is part of it."""
        return self._changed(grant, -1)

    def conflict(self, grant: NodeGrant) -> str:
        """Why the grant's devices are not free; empty if they are."""
        share = grant.share
        if share is None:
            return "are in use" if self.devices & set(grant.devices) else ""
        for index in grant.devices:
            used, group = self.shares.get(index, (0, share.group))
            if index in self.devices and index not in self.shares:
                return "are in use"
            if group != share.group:
                return "are shared by others"
            if used + share.milli_on(index) > MILLI_PER_DEVICE:
                return "have too little left"
        taken = dict(self.slices)
        for one in share.slices:
            if taken.get(one.device, 0) & one.bits:
                return f"have a MIG slice at {one.start} already"
            taken[one.device] = taken.get(one.device, 0) | one.bits
        return ""

    def _changed(self, grant: NodeGrant, sign: int) -> Usage:
        devices, shares, slices = self.devices, self.shares, self.slices
        if grant.share is None:
            devices = devices | set(grant.devices) if sign > 0 else devices - set(grant.devices)
        else:
            shares, slices = dict(shares), dict(slices)
            for index in grant.devices:
                used = shares.get(index, (0, ""))[0] + sign * grant.share.milli_on(index)
                shares[index] = (used, grant.share.group)
                devices = devices | {index}
                if not used:
                    del shares[index]
                    devices = devices - {index}
            for one in grant.share.slices:
                slices[one.device] = slices.get(one.device, 0) ^ one.bits
                if not slices[one.device]:
                    del slices[one.device]
        return Usage(
            devices=devices,
            shares=shares,
            slices=slices,
            host=self.host + grant.host if sign > 0 else self.host - grant.host,
        )


EMPTY_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of the state. Its mappings do not change while a plan is made.

    Attributes:
        pending: pending jobs, in any order; the scheduler sorts them.
        jobs: pending and running jobs; if empty, only `pending` exist.
        attempts: the live attempt of each running job.
        queue_usage: usage of the queues so far.
        awaited_nodes: nodes that are not known yet, in words; empty if all are.
        licence_usage: seats in use of each licence.
        capacity_version: as in a world; None: the snapshot does not count its changes.
    """

    version: int
    now_s: float
    nodes: Mapping[NodeId, Node]
    usage: Mapping[NodeId, Usage] = field(default_factory=dict)
    pending: tuple[Job, ...] = ()
    queues: Mapping[QueueId, Queue] = field(default_factory=dict)
    reservations: Mapping[ReservationId, Reservation] = field(default_factory=dict)
    attempts: Mapping[JobId, Attempt] = field(default_factory=dict)
    jobs: Mapping[JobId, Job] = field(default_factory=dict)
    queue_usage: Mapping[QueueId, QueueUsage] = field(default_factory=dict)
    awaited_nodes: str = ""
    node_pools: Mapping[PoolId, NodePool] = field(default_factory=dict)
    pool_nodes: Mapping[NodeId, PoolNode] = field(default_factory=dict)
    licences: Mapping[str, Licence] = field(default_factory=dict)
    licence_usage: Mapping[str, int] = field(default_factory=dict)
    capacity_version: None = None

    def usage_of(self, node_id: NodeId) -> Usage:
        """Usage of a node; empty without allocations."""
        return self.usage.get(node_id, EMPTY_USAGE)
