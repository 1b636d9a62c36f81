"""Converts nodes and reservations to the views that the API returns. Pure; live readings are passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from phalanx.core.fleet.mig import DeviceMig, MigSlice
from phalanx.core.fleet.node import Cordon, Node
from phalanx.core.fleet.node_pool import PoolNode
from phalanx.core.fleet.power_limits import MW_PER_W, PowerCap, PowerLimits
from phalanx.core.ids import JobId, ReservationId
from phalanx.core.resources import extras_of
from phalanx.core.scheduling.sharing.mig_placement import mig_geometry
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import gpus_of
from phalanx.wire.api.nodes import (
    CordonView,
    DeviceView,
    MigView,
    NicView,
    NodeView,
    PowerCapView,
    PowerLimitsView,
    ReservationView,
    ReservedView,
    ShareView,
)
from phalanx.wire.supervisor import DeviceSample, SamplesRequest


def reservation_view(reservation: Reservation) -> ReservationView:
    """Return the view of a reservation."""
    return ReservationView(
        id=reservation.id,
        nodes=list(reservation.nodes),
        start_s=reservation.start_s,
        end_s=reservation.end_s,
        users=sorted(reservation.users),
        queues=sorted(reservation.queues),
        maintenance=reservation.maintenance,
        begun=reservation.begun,
        why=reservation.why,
        by=reservation.by,
        open_ended=reservation.open_ended,
    )


def node_view(
    node: Node,
    attempts: Sequence[Attempt],
    samples: SamplesRequest | None,
    reserved: Sequence[Reservation] = (),
    pooled: PoolNode | None = None,
    price_per_h: float | None = None,
    stopped: Mapping[ReservationId, Sequence[JobId]] = MappingProxyType({}),
) -> NodeView:
    """Return the view of a node with its live attempts, its newest samples, its reservations in order, its record in a pool, and its price.

    `stopped`: by reservation, the jobs on the node that its start will stop.
    """
    grants = [
        (attempt.job_id, grant) for attempt in attempts if (grant := attempt.allocation.grant_on(node.id)) is not None
    ]
    held: dict[int, list[tuple[JobId, NodeGrant]]] = {}
    for job_id, grant in grants:
        for index in grant.devices:
            held.setdefault(index, []).append((job_id, grant))
    sampled: Mapping[int, DeviceSample] = {} if samples is None else {d.index: d for d in samples.devices}
    return NodeView(
        id=node.id,
        state=node.state,
        engine=node.engine,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        address=node.address,
        hostname=node.hostname,
        virtual=node.virtual,
        labels=node.labels,
        joined_s=node.joined_s,
        changed_s=node.changed_s,
        down_cause=node.down_cause,
        failures=node.failure_count,
        slow=node.slow_reason,
        bad_node=node.bad_node_reason,
        marks=round(node.fault_score, 3),
        supervisor_id=node.supervisor_id,
        pool="" if pooled is None else pooled.pool,
        pool_state=None if pooled is None else pooled.state,
        price_per_h=price_per_h,
        cordon=None if node.cordon is None else _cordon_view(node.cordon),
        reserved=[_reserved_view(one, stopped.get(one.id, ())) for one in reserved],
        devices=[_device_view(node, index, held, sampled) for index in range(len(node.devices))],
        jobs=[job_id for job_id, _ in grants],
        sampled_s=None if samples is None else samples.at_s,
        load_1m=None if samples is None else samples.load_1m,
        memory_available_bytes=None if samples is None else samples.memory_available_bytes,
        disk_free_bytes=None if samples is None else samples.disk_free_bytes,
        outside=list(node.foreign_usage.owners),
        limits=node.limits,
        mounts_error=node.mounts_error,
        power_cap=_power_cap_view(node.power_cap),
        power_error=node.power_error,
        version=node.version,
        provisioning=node.provisioning_reason,
        extras=dict(node.extras),
        extras_used=dict(extras_of(pair for _, grant in grants for pair in grant.extras)),
        nics=[
            NicView(
                name=nic.name, kind=nic.kind, up=nic.up, bits_per_s=nic.bits_per_s, numa=nic.numa, pci_bus=nic.pci_bus
            )
            for nic in node.nics
        ],
    )


def _cordon_view(cordon: Cordon) -> CordonView:
    return CordonView(by=cordon.by, why=cordon.why, since_s=cordon.since_s, drain=cordon.drain)


def _reserved_view(reservation: Reservation, stops: Sequence[JobId]) -> ReservedView:
    return ReservedView(
        id=reservation.id,
        start_s=reservation.start_s,
        end_s=reservation.end_s,
        holders=reservation.holders_text,
        begun=reservation.begun,
        why=reservation.why,
        open_ended=reservation.open_ended,
        stops=list(stops),
    )


def _device_view(
    node: Node, place: int, held: Mapping[int, Sequence[tuple[JobId, NodeGrant]]], sampled: Mapping[int, DeviceSample]
) -> DeviceView:
    device = node.devices[place]
    here = held.get(device.index, ())
    job_id, grant = here[0] if here else (None, None)
    shares = [_share_view(job, one, device.index) for job, one in here if one.share is not None]
    sample = sampled.get(device.index)
    return DeviceView(
        index=device.index,
        uuid=device.uuid,
        model=device.model,
        memory_bytes=device.memory_bytes,
        virtual=device.virtual,
        healthy=device.healthy,
        job_id=job_id,
        ranks=[] if grant is None or len(here) > 1 else _ranks_on(grant, device.index),
        shares=shares,
        counter="" if sample is None else sample.counter,
        utilization=None if sample is None else sample.utilization,
        memory_used_bytes=None if sample is None else sample.memory_used_bytes,
        power_w=None if sample is None else sample.power_w,
        temperature_c=None if sample is None else sample.temperature_c,
        throttle=[] if sample is None else list(sample.throttle or ()),
        outside=job_id is None and device.index in node.foreign_usage.devices,
        nvlinks=list(device.nvlinks),
        pci_bus=device.pci_bus,
        pcie=device.pcie,
        numa=device.numa,
        mig=_mig_view(device.mig, [one for share in shares for one in share.slices]),
        power_limits=next((_power_limits_view(one) for one in node.power_limits if one.index == device.index), None),
    )


def _power_limits_view(limits: PowerLimits) -> PowerLimitsView:
    return PowerLimitsView(
        limit_w=limits.limit_mw / MW_PER_W,
        default_w=limits.default_mw / MW_PER_W,
        min_w=limits.min_mw / MW_PER_W,
        max_w=limits.max_mw / MW_PER_W,
        original_w=None if limits.original_mw is None else limits.original_mw / MW_PER_W,
    )


def _power_cap_view(cap: PowerCap | None) -> PowerCapView | None:
    if cap is None:
        return None
    return PowerCapView(
        limit_w=cap.milliwatts / MW_PER_W, by=cap.by, since_s=cap.since_s, until_s=cap.until_s, applied=cap.applied
    )


def _share_view(job_id: JobId, grant: NodeGrant, device: int) -> ShareView:
    share = grant.share
    assert share is not None, grant
    return ShareView(
        job_id=job_id,
        gpus=gpus_of(share.milli_on(device)),
        kind=share.kind,
        slices=[
            MigSlice(profile=one.profile, start=one.start, memory_slices=one.memory_slices)
            for one in share.slices
            if one.device == device
        ],
    )


def _mig_view(mig: DeviceMig | None, granted: Sequence[MigSlice] = ()) -> MigView | None:
    if mig is None:
        return None
    geometry = mig_geometry(mig.profiles)
    state = geometry.state((*mig.slices, *granted))
    return MigView(
        on=mig.on,
        source=mig.source,
        profiles=list(mig.profiles),
        slices=list(mig.slices),
        room={name: geometry.room(name, state) for name in geometry.profiles},
        closed_reason=mig.closed_reason,
    )


def _ranks_on(grant: NodeGrant, index: int) -> list[int]:
    """Return the rank whose LOCAL_RANK selects this device; a single task holds all devices; otherwise it is unknown."""
    if grant.tasks == len(grant.devices):
        return [grant.first_rank + grant.devices.index(index)]
    return [grant.first_rank] if grant.tasks == 1 else []
