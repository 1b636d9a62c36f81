"""Which nodes of pools would be worth starting for the jobs that wait (`Plan.wanted`).

Jobs are taken by queue priority, then in submit order. Each takes its whole gang from nodes of one GPU model: first free capacity, then
nodes that are on their way, then new nodes of the pools that fit it, the cheapest per device first. A gang that these cannot hold
completely takes none, so that no node is paid for half a gang. Quotas count as if the new nodes were there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import COMING_STATES, NodePool, PoolNodeState, members_of, template_node
from phalanx.core.fleet.summary import FleetSummary, summary_of
from phalanx.core.ids import JobId, NodeId, PoolId
from phalanx.core.scheduling.board_builder import ClusterSnapshot
from phalanx.core.scheduling.shape import Shape, acceptable_shapes
from phalanx.core.state.plan import WaitReason, WantedNodes
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.work.job import Job, JobState, WaitReasonCode
from phalanx.core.work.quota_tree import QuotaTree
from phalanx.core.work.share import MILLI_PER_DEVICE

JOBS_MAX: Final = 512  # waiting jobs considered at once; later ones follow when these run
EVERY_S: Final = 1.0  # between two computations: each reads the whole fleet
CAPACITY_REASONS: Final = frozenset(
    {
        WaitReasonCode.RESOURCES,
        WaitReasonCode.NO_NODES,
        WaitReasonCode.NODES_DOWN,
        WaitReasonCode.PRIORITY,
        WaitReasonCode.QUOTA,  # judged again below: a larger fleet has more to share
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDemand:
    """What waiting jobs need of pools.

    Attributes:
        wanted: the nodes to order.
        used: nodes of the fleet that waiting jobs need, so that they are not released.
        texts: for each job that gets nodes of a pool: which pool starts how many for it.
    """

    wanted: tuple[WantedNodes, ...] = ()
    used: frozenset[NodeId] = frozenset()
    texts: Mapping[JobId, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """What is left of one node: of the fleet, on its way (`pool`), or not yet ordered (`pool` and `new`)."""

    node: Node
    milli: int
    cpus: int
    memory_bytes: int
    pool: NodePool | None = None
    new: bool = False

    def holds(self, shape: Shape, milli: int) -> bool:
        """Whether a part of the shape with so many thousandths of devices is left here."""
        if self.cpus < shape.cpus or self.memory_bytes < shape.memory_bytes or self.milli < milli:
            return False
        whole = max(shape.node_devices, milli // MILLI_PER_DEVICE)
        return sum(device.healthy and shape.accepts(device) for device in self.node.devices) >= whole

    def take(self, shape: Shape, milli: int) -> None:
        """Take a part."""
        self.milli -= milli
        self.cpus -= shape.cpus
        self.memory_bytes -= shape.memory_bytes


def node_demand(
    cluster: ClusterSnapshot, jobs: Iterable[Job], reason_of: Callable[[Job], WaitReason | None], now_s: float
) -> NodeDemand:
    """What the jobs need of the pools at `now_s` (Unix seconds). Cost: the fleet, and the slots for each of `JOBS_MAX` jobs."""
    room = {pool.id: _room(pool, cluster, now_s) for pool in cluster.node_pools.values()}
    if not room:
        return NodeDemand()
    slots = [*_free_slots(cluster), *_coming_slots(cluster)]
    new = [slot for pool in _by_price(cluster) for slot in _new_slots(pool, room[pool.id])]
    summary = summary_of(slot.node for slot in [*slots, *new])
    quotas = _quotas(cluster, new)
    priority = {queue.id: queue.priority for queue in cluster.queues.values()}
    waiting = sorted(_eligible(jobs), key=lambda job: (-priority.get(job.queue, 0), job.seq))[:JOBS_MAX]
    orders: dict[PoolId, list[JobId]] = {}
    counts: dict[PoolId, int] = {}
    used: set[NodeId] = set()
    texts: dict[JobId, str] = {}
    for job in waiting:
        reason = reason_of(job)
        if reason is None or reason.reason not in CAPACITY_REASONS:
            continue
        taken = _take_gang(job, [*slots, *new], summary, quotas)
        pooled: dict[PoolId, int] = {}
        for slot in taken:
            if slot.pool is None:
                used.add(slot.node.id)
                continue
            pooled[slot.pool.id] = pooled.get(slot.pool.id, 0) + 1
            if slot.new:
                slot.new = False
                new.remove(slot)
                slots.append(slot)
                counts[slot.pool.id] = counts.get(slot.pool.id, 0) + 1
                orders.setdefault(slot.pool.id, []).append(job.id)
        if pooled:
            texts[job.id] = "; ".join(
                f"pool {name} is starting {count} node{'' if count == 1 else 's'} for it"
                for name, count in sorted(pooled.items())
            )
    wanted = [
        WantedNodes(
            pool=name, count=counts[name], job_ids=(found := tuple(dict.fromkeys(orders[name]))), why=_why(found)
        )
        for name in sorted(counts)
    ]
    wanted += _up_to_minimum(cluster, room, counts)
    return NodeDemand(wanted=tuple(wanted), used=frozenset(used), texts=texts)


def _eligible(jobs: Iterable[Job]) -> list[Job]:
    """The pending jobs that nodes of a pool could help: those tied to named nodes, reservations or domains are left out."""
    return [
        job
        for job in jobs
        if job.state is JobState.PENDING
        and not (job.spec.nodelist or job.spec.reservation)
        and not (job.spec.topology.required or job.spec.topology.slice_nodes)
    ]


def _take_gang(job: Job, slots: list[_Slot], summary: FleetSummary, quotas: QuotaTree) -> list[_Slot]:
    """Take the parts of the job's gang from the slots, in their order; empty if they do not hold all of it, or a quota refuses it."""
    try:
        shapes = acceptable_shapes(job.spec.role, summary)
    except NeverFits:
        return []
    for shape in shapes:
        for model in dict.fromkeys(_model(slot) for slot in slots):
            parts = _parts(
                shape, [slot for slot in slots if _model(slot) == model and slot.node.id not in job.spec.exclude]
            )
            if not parts:
                continue
            milli = sum(part for _, part in parts)
            queue = quotas.job_node(job.queue)
            if quotas.check_admission(queue, job.user, milli) is not None:
                return []
            quotas.add_running(queue, job.user, milli)
            for slot, part in parts:
                slot.take(shape, part)
            return [slot for slot, _ in parts]
    return []


def _parts(shape: Shape, slots: list[_Slot]) -> list[tuple[_Slot, int]]:
    """Slots for all parts of the shape, each on another node, with the thousandths of devices of each; empty if some find none."""
    found: list[tuple[_Slot, int]] = []
    left = list(slots)
    last = [shape.last_node_devices * MILLI_PER_DEVICE] if shape.last_node_devices else []
    for number in range(shape.nodes + len(last)):
        slot = None
        for at, one in enumerate(left):
            milli = last[0] if number >= shape.nodes else _milli(shape, one)
            if one.holds(shape, milli):
                slot = left.pop(at)
                found.append((slot, milli))
                break
        if slot is None:
            return []
    return found


def _milli(shape: Shape, slot: _Slot) -> int:
    if shape.share is None:
        return shape.devices * MILLI_PER_DEVICE
    return min(
        (shape.share.milli_of(device.memory_bytes) for device in slot.node.devices), default=MILLI_PER_DEVICE + 1
    )


def _model(slot: _Slot) -> str:
    return slot.node.devices[0].model if slot.node.devices else ""


def _room(pool: NodePool, cluster: ClusterSnapshot, now_s: float) -> int:
    """How many more nodes the pool may order now."""
    if pool.removing or now_s < pool.retry_at_s:
        return 0
    return max(0, pool.max_nodes - len(members_of(pool.id, cluster.pool_nodes)))


def _by_price(cluster: ClusterSnapshot) -> list[NodePool]:
    return sorted(cluster.node_pools.values(), key=lambda pool: (pool.price_per_device_h, pool.id))


def _slot_of(node: Node, pool: NodePool | None = None, *, new: bool = False) -> _Slot:
    milli = len(node.devices) * MILLI_PER_DEVICE
    return _Slot(node=node, milli=milli, cpus=node.cpus, memory_bytes=node.memory_bytes, pool=pool, new=new)


def _new_slots(pool: NodePool, count: int) -> list[_Slot]:
    return [_slot_of(template_node(pool, NodeId(f"{pool.id}+{number}")), pool, new=True) for number in range(count)]


def _coming_slots(cluster: ClusterSnapshot) -> list[_Slot]:
    found = []
    for member in sorted(cluster.pool_nodes.values(), key=lambda member: member.id):
        pool = cluster.node_pools.get(member.pool)
        if pool is not None and member.state in COMING_STATES and member.id not in cluster.nodes:
            found.append(_slot_of(template_node(pool, member.id), pool))
    return found


def _free_slots(cluster: ClusterSnapshot) -> list[_Slot]:
    """What is free on the nodes that accept work."""
    found = []
    for node_id, node in sorted(cluster.nodes.items()):
        if node.schedulable:
            usage = cluster.usage.get(node_id, EMPTY_USAGE)
            slot = _slot_of(node)
            slot.milli = sum(
                MILLI_PER_DEVICE - usage.shares[device.index][0]
                if device.index in usage.shares
                else 0
                if device.index in usage.devices
                else MILLI_PER_DEVICE
                for device in node.devices
                if device.healthy
            )
            slot.cpus -= usage.cpus
            slot.memory_bytes -= usage.memory_bytes
            found.append(slot)
    return found


def _quotas(cluster: ClusterSnapshot, new: list[_Slot]) -> QuotaTree:
    """The queue tree of the fleet with all nodes that could be ordered or are on their way, and the usage of the running jobs."""
    coming = sum(len(slot.node.devices) for slot in [*new, *_coming_slots(cluster)])
    tree = QuotaTree(cluster.queues.values(), sum(len(node.devices) for node in cluster.nodes.values()) + coming)
    for attempt in cluster.attempts.values():
        job = cluster.jobs[attempt.job_id]
        if job.queue in cluster.queues:
            tree.add_running(tree.job_node(job.queue), job.user, attempt.allocation.milli)
    return tree


def _up_to_minimum(
    cluster: ClusterSnapshot, room: Mapping[PoolId, int], counts: Mapping[PoolId, int]
) -> list[WantedNodes]:
    """Further nodes that bring each pool to its minimum. Nodes that are being released do not count towards it."""
    found = []
    for name, pool in sorted(cluster.node_pools.items()):
        kept = sum(
            member.state is not PoolNodeState.DRAINING for member in members_of(name, cluster.pool_nodes)
        ) + counts.get(name, 0)
        more = min(pool.min_nodes - kept, room[name] - counts.get(name, 0))
        if more > 0:
            found.append(WantedNodes(pool=name, count=more, why=f"the minimum is {pool.min_nodes}"))
    return found


def _why(job_ids: tuple[JobId, ...]) -> str:
    named = ", ".join(job_ids[:3]) + (f" and {len(job_ids) - 3} more" if len(job_ids) > 3 else "")  # as elsewhere
    return f"job{'' if len(job_ids) == 1 else 's'} {named} wait{'s' if len(job_ids) == 1 else ''} for capacity"
