"""Convert Slurm's inventory to fleet nodes with other users' usage, and compute how much of a node our jobs request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import (
    Cordon,
    ForeignUsage,
    Node,
    NodeState,
)
from phalanx.core.ids import NodeId
from phalanx.core.work.allocation import NodeGrant
from phalanx.engines.slurm.options import ENGINE_NAME
from phalanx.engines.slurm.parse import GresGpus, SlurmJob, SlurmNode, SlurmPartition

_WHO_MAX: Final = 4  # jobs named in the list of a node's other users


@dataclass(frozen=True, slots=True, kw_only=True)
class OurUsage:
    """Resources of our live attempts on one node. `devices` are the head's indices; Slurm chooses the physical devices."""

    devices: frozenset[int] = frozenset()
    cpus: int = 0
    memory_bytes: int = 0


def fleet_node(
    slurm: SlurmNode,
    *,
    granted: OurUsage,
    allocated: OurUsage,
    jobs: Sequence[SlurmJob],
    our_job_ids: frozenset[str],
    contended: str = "",
    partition: SlurmPartition | None = None,
    labels: Mapping[str, str] | None = None,
    memory_of: Callable[[str], int] = lambda _: 0,
) -> Node:
    """Build the node's record.

    Args:
        slurm: the node.
        granted: what the head has granted there, started or not.
        allocated: the part of it that Slurm has allocated to our jobs, by Slurm's accounting.
        jobs: the whole queue.
        our_job_ids: Slurm's ids of our jobs.
        contended: who got the node in place of a job of ours; for a while all free devices count as theirs.
        partition: the head's partition; None if unknown.
        labels: the node's place in the topology.
        memory_of: returns the memory of a device of a GRES type, in bytes.
    """
    devices = _devices(slurm.gpus, memory_of)
    used = sum(kind.count for kind in slurm.gpus_used)
    full = (
        slurm.cpus_used - allocated.cpus >= slurm.cpus
        or slurm.memory_used_bytes - allocated.memory_bytes >= slurm.memory_bytes > 0
    )
    # Without free CPUs or memory no task starts, so all GPUs count as taken.
    taken = len(devices) if contended or full else max(0, used - len(allocated.devices))
    free = [index for index in range(len(devices)) if index not in granted.devices]
    cordon = None
    if slurm.closed_reason:
        resume = f"scontrol update NodeName={slurm.name} State=RESUME"
        cordon = Cordon(by=ENGINE_NAME, why=slurm.closed_reason, since_s=0.0, remedy=resume)
    elif partition is not None and not partition.up:
        why = f"Slurm's partition {partition.name} is {partition.state}"
        reopen = f"scontrol update PartitionName={partition.name} State=UP"
        cordon = Cordon(by=ENGINE_NAME, why=why, since_s=0.0, remedy=reopen)
    who = other_users(slurm.name, jobs, our_job_ids)
    others = ForeignUsage(
        devices=tuple(free[len(free) - min(taken, len(free)) :]),
        cpus=min(slurm.cpus, max(0, slurm.cpus_used - allocated.cpus)),
        memory_bytes=min(slurm.memory_bytes, max(0, slurm.memory_used_bytes - allocated.memory_bytes)),
        owners=(contended,) if contended and not who else who,
    )
    if not (others.devices or others.cpus or others.memory_bytes):
        others = replace(others, owners=())
    return Node(
        id=NodeId(slurm.name),
        engine=ENGINE_NAME,
        devices=devices,
        cpus=slurm.cpus,
        memory_bytes=slurm.memory_bytes,
        state=NodeState.UP,
        address=slurm.address,
        hostname=slurm.hostname,
        labels=_labels(slurm, labels or {}),
        cordon=cordon,
        per_attempt=True,
        foreign_usage=others,
    )


def other_users(node: str, jobs: Sequence[SlurmJob], ours: frozenset[str]) -> tuple[str, ...]:
    """Describe other users' jobs on a node."""
    found = [job for job in jobs if job.has_nodes and node in job.nodes and job.id not in ours]
    return tuple(f"Slurm job {job.id} of {job.user}" for job in found[:_WHO_MAX])


def request_shares(grants: Sequence[NodeGrant], nodes: Mapping[str, SlurmNode]) -> tuple[NodeGrant, ...]:
    """Fill in the grants' CPUs and memory: as requested, else in proportion to the devices, and at most what is free there.

    Equal on all nodes, because one Slurm job requests the same share everywhere.
    """
    cpus = [_part(len(grant.devices), nodes[grant.node_id], nodes[grant.node_id].cpus) for grant in grants]
    free = [nodes[grant.node_id].cpus - nodes[grant.node_id].cpus_used for grant in grants]
    memory = [_part(len(grant.devices), nodes[grant.node_id], nodes[grant.node_id].memory_bytes) for grant in grants]
    room = [nodes[grant.node_id].memory_bytes - nodes[grant.node_id].memory_used_bytes for grant in grants]
    least_cpus, least_memory = max(1, min([*cpus, *free])), max(0, min([*memory, *room]))
    return tuple(
        replace(
            grant,
            cpus=grant.cpus or max(grant.tasks if not grant.devices else 1, least_cpus),
            memory_bytes=grant.memory_bytes or least_memory,
        )
        for grant in grants
    )


def gres_type(grant: NodeGrant, slurm: SlurmNode) -> str:
    """Return the GRES type of the granted devices; "" without devices or type. All devices of a gang have one type."""
    if not grant.devices:
        return ""
    first, place = grant.devices[0], 0
    for kind in slurm.gpus:
        place += kind.count
        if first < place:
            return kind.kind
    return ""


def _devices(gpus: Sequence[GresGpus], memory_of: Callable[[str], int]) -> tuple[Device, ...]:
    """Number the devices in configured order; UUIDs are only known once Slurm allocates them."""
    kinds = [kind.kind for kind in gpus for _ in range(kind.count)]
    return tuple(
        Device(index=index, uuid="", model=kind or "gpu", memory_bytes=memory_of(kind))
        for index, kind in enumerate(kinds)
    )


def _part(devices: int, node: SlurmNode, whole: int) -> int:
    """Return the share of `whole` in proportion to the devices; without devices, one CPU's share."""
    total = sum(kind.count for kind in node.gpus)
    return whole * devices // total if devices and total else whole // max(1, node.cpus)


def _labels(slurm: SlurmNode, places: Mapping[str, str]) -> dict[str, str]:
    found = dict(places)
    if slurm.features:
        found["slurm.features"] = ",".join(slurm.features)[:256]
    if slurm.partitions:
        found["slurm.partitions"] = ",".join(slurm.partitions)[:256]
    return found
