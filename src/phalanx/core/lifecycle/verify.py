"""Verifies a plan's placement against the newest state. A rejection is normal: the next cycle plans again."""

from __future__ import annotations

from phalanx.core.fleet.mig import occupied_bits
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.state.plan import Placement
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.state.world import World
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState


def rejection_reason(world: World, placement: Placement) -> str:
    """Why the placement cannot be committed; empty if it can. Checks invariants 1, 2, 4 to 7 and 12 of the design."""
    job = world.jobs.get(placement.job_id)
    if job is None or job.state is not JobState.PENDING or job.held or job.cancelled_by:
        return "the job no longer waits"
    if job.unmet_dependencies:
        return "its dependencies are not met yet"
    if _array_full(world, job):
        return "its array runs as many elements as it may"
    if placement.job_id in world.attempts:
        return "the job has a live attempt"
    if job.queue in world.queues:
        holdings = world.holdings()
        refusal = holdings.check_admission(holdings.job_node(job.queue), job.user, placement.allocation.resources)
        if refusal is not None:
            return refusal.describe()
    for name, seats in placement.allocation.licences:
        licence = world.licences.get(name)
        if licence is None or world.licence_usage.get(name, 0) + seats > licence.total:
            return f"licence {name} has too few free seats"
    reserved = _reserved(world, job, placement.allocation)
    if reserved:
        return reserved
    seen: set[NodeId] = set()
    for grant in placement.allocation.grants:
        if grant.node_id in seen:
            return f"{grant.node_id} has two grants"
        seen.add(grant.node_id)
        conflict = _grant_conflict(world, grant, grant.host)
        if conflict:
            return conflict
    return ""


def wake_rejection(world: World, attempt: Attempt) -> str:
    """Why a sleeping attempt cannot have its devices again now; empty if it can. It holds its CPUs and memory all the time."""
    job, allocation = world.jobs[attempt.job_id], attempt.full_allocation
    for grant in allocation.grants:
        users = [
            other.job_id
            for other in world.attempts_on(grant.node_id)
            for one in other.allocation.grants
            if one.node_id == grant.node_id and set(one.devices) & set(grant.devices)
        ]
        if users:
            names = ", ".join(map(str, grant.devices))
            jobs = ", ".join(users)
            return f"device {names} of {grant.node_id} is in use by job{'s' if len(users) > 1 else ''} {jobs}"
        conflict = _grant_conflict(world, grant, NO_RESOURCES)
        if conflict:
            return conflict
    reserved = _reserved(world, job, allocation)
    if reserved:
        return reserved
    if job.queue in world.queues:
        holdings = world.holdings()
        number, held = holdings.job_node(job.queue), attempt.allocation.resources
        holdings.remove_running(number, job.user, held)
        refusal = holdings.check_admission(number, job.user, allocation.resources)
        holdings.add_running(number, job.user, held)
        if refusal is not None:
            return refusal.describe()
    return ""


def _reserved(world: World, job: Job, allocation: Allocation) -> str:
    """Which of the nodes is reserved for others, in words."""
    for reservation in world.reservations.values():
        if reservation.begun and not reservation.admits(job.user, job.queue):
            reserved = [grant.node_id for grant in allocation.grants if grant.node_id in reservation.nodes]
            if reserved:
                return f"{reserved[0]} is reserved for {reservation.holders_text} ({reservation.id})"
    return ""


def _grant_conflict(world: World, grant: NodeGrant, more: Resources) -> str:
    """Why the devices of the grant, and `more` of its node besides devices, cannot be held now; empty if they can."""
    node = world.nodes.get(grant.node_id)
    if node is None or not node.schedulable:
        return f"{grant.node_id} accepts no new jobs"
    held = world.usage.get(grant.node_id, EMPTY_USAGE)
    conflict = held.conflict(grant)
    if conflict:
        return f"devices of {grant.node_id} {conflict}"
    usable = {device.index for device in node.devices if device.healthy}
    if not set(grant.devices) <= usable:
        return f"{grant.node_id} lacks healthy devices"
    conflict = _mig_conflict(node, grant)
    if conflict:
        return f"{grant.node_id}: {conflict}"
    lacking = (held.host + more).lacking(node.host) if more else ""
    return f"{grant.node_id} lacks {lacking}" if lacking else ""


def _array_full(world: World, job: Job) -> bool:
    """Whether the array runs its maximum of elements. Stopping ones count: the limit often stands for licences."""
    place = job.array
    if place is None or place.running_max is None:
        return False
    return len(world.relations.running.get(place.array_id, ())) >= place.running_max


def _mig_conflict(node: Node, grant: NodeGrant) -> str:
    """Why the grant does not suit the MIG mode of its devices: slices only where it is on, at a start of the profile, beside slices of others."""
    slices = () if grant.share is None else grant.share.slices
    by_index = {device.index: device for device in node.devices}
    if not slices:
        divided = [index for index in grant.devices if (mig := by_index[index].mig) is not None and mig.on]
        return f"device {divided[0]} has MIG mode on, so it is granted in slices only" if divided else ""
    for one in slices:
        mig = by_index[one.device].mig
        if mig is None or not mig.grantable:
            why = "MIG mode is off" if mig is None or not mig.on else mig.closed_reason
            return f"no slices can be made on device {one.device}: {why}"
        profile = mig.profile(one.profile)
        if profile is None or one.start not in profile.starts or one.memory_slices != profile.memory_slices:
            return f"device {one.device} has no profile {one.profile} at memory slice {one.start}"
        if occupied_bits(mig.slices) & one.bits:
            return f"memory slice {one.start} of device {one.device} is in use outside Phalanx"
    return ""
