"""Which nodes of pools would be worth starting for the jobs that wait (`Plan.wanted`).

Jobs are taken by queue priority, then in submit order. Each takes its whole gang from nodes of one GPU model at one site: first free capacity, then
nodes that are on their way, then new nodes of the pools that fit it, the cheapest per device first. A gang that these cannot hold
completely takes none, so that no node is paid for half a gang. Quotas count the fleet with the nodes on their way and those ordered here; if
they admit a gang only on a larger fleet, further nodes are ordered with it. A gang whose rule refuses the order takes none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.capacity import fleet_resources, nodes_resources
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import COMING_STATES, NodePool, members_of, template_node
from phalanx.core.fleet.summary import summary_of
from phalanx.core.ids import JobId, NodeId, PoolId, QueueId, UserId
from phalanx.core.months import month_of
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.scheduling.board_builder import ClusterSnapshot, free_licences
from phalanx.core.scheduling.node_filter import unmountable_nodes
from phalanx.core.scheduling.order_rules import OrderJudge
from phalanx.core.scheduling.shape import Shape, acceptable_shapes
from phalanx.core.state.plan import WaitReason, WantedNodes
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.units import format_duration
from phalanx.core.work.extras import seats_of
from phalanx.core.work.job import Job
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.states import JobState, WaitReasonCode

JOBS_MAX: Final = 512  # waiting jobs considered at once; later ones follow when these run
JOBS_SEEN_MAX: Final = 2048  # looked at for them: to say why a job waits costs more than to place it here
DELAYS_MAX: Final = 3  # reasons named for one job
NODES_PER_S: Final = 2_000  # a larger fleet is read less often: 12,500 nodes take 0.2 s
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
        texts: for each job that gets nodes of a pool: which pool starts how many for it; for each that would, why the pool starts none now.
    """

    wanted: tuple[WantedNodes, ...] = ()
    used: frozenset[NodeId] = frozenset()
    texts: Mapping[JobId, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """What is left of one node: of the fleet, on its way (`pool`), or not yet ordered (`pool` and `new`).

    Attributes:
        devices: whole ones that nothing uses; not those with MIG mode on.
        host: what is free besides devices.
        rooms: thousandths left of each shared device, by the group of its shares.
    """

    node: Node
    devices: int
    host: Resources
    rooms: dict[str, list[int]] = field(default_factory=dict)
    pool: NodePool | None = None
    new: bool = False

    def holds(self, part: _Part) -> bool:
        """Whether the part fits here."""
        if not part.shape.host.fits(self.host):
            return False
        if part.shape.share is None and self.devices < part.devices:
            return False  # most slots of a large demand: nothing else of them is looked at
        accepted = sum(device.healthy and part.shape.accepts(device) for device in self.node.devices)
        if part.shape.slices_of is not None:
            return False  # nodes of pools have no MIG, and slices of other nodes keep none of theirs
        if part.shape.share is None:
            return min(self.devices, accepted) >= part.devices
        return accepted > 0 and (self.devices > 0 or self._room(part) is not None)

    def milli_of(self, part: _Part) -> int:
        """Thousandths of devices that the part takes here."""
        if part.shape.share is None:
            return part.devices * MILLI_PER_DEVICE
        return min(part.shape.share.milli_of(device.memory_bytes) for device in self.node.devices)

    def resources_of(self, part: _Part) -> Resources:
        """Everything that the part takes here."""
        return Resources(self.milli_of(part)) + part.shape.host

    def take(self, part: _Part) -> None:
        """Take the part."""
        self.host -= part.shape.host
        if part.shape.share is None:
            self.devices -= part.devices
            return
        room, rooms = self._room(part), self.rooms.setdefault(part.group, [])
        if room is None:
            self.devices -= 1
            room = MILLI_PER_DEVICE
        else:
            rooms.remove(room)
        rooms.append(room - self.milli_of(part))

    def _room(self, part: _Part) -> int | None:
        """The least room of a shared device that suffices; None if no device of the group has it."""
        milli = self.milli_of(part)
        return min((room for room in self.rooms.get(part.group, ()) if room >= milli), default=None)


@dataclass(frozen=True, slots=True)
class _Part:
    """A job's part of one node: whole devices, or a share of one in `group`."""

    shape: Shape
    devices: int
    group: str


def node_demand(
    cluster: ClusterSnapshot,
    jobs: Iterable[Job],
    reason_of: Callable[[Job], WaitReason | None],
    now_s: float,
    judge: OrderJudge | None = None,
) -> NodeDemand:
    """What the jobs need of the pools at `now_s` (Unix seconds); `judge` may refuse orders. Cost: one look at the fleet, and its free nodes for each kind of request."""
    room = {pool.id: _room(pool, cluster, now_s) for pool in cluster.node_pools.values()}
    if not room:
        return NodeDemand()
    waiting = list(_waiting_for_capacity(cluster, jobs, reason_of))
    if not waiting:
        return NodeDemand(wanted=tuple(_up_to_minimum(cluster, room, {})))
    new = [slot for pool in _by_price(cluster) for slot in _new_slots(pool, room[pool.id], now_s)]
    trial = _trial(cluster, new)
    later, closed = _later_trial(cluster, room, now_s)
    orders: dict[PoolId, list[JobId]] = {}
    counts: dict[PoolId, int] = {}
    used: set[NodeId] = set()
    texts: dict[JobId, str] = {}
    for job in waiting:
        pooled: dict[PoolId, int] = {}
        delays: dict[str, None] = {}
        gang = trial.take_gang(job, judge)
        if not gang and later is not None and (text := _wait_text(later.take_gang(job), closed)):
            texts[job.id] = text
        for slot in gang:
            if slot.pool is None:
                used.add(slot.node.id)
                continue
            pooled[slot.pool.id] = pooled.get(slot.pool.id, 0) + 1
            coming = cluster.pool_nodes.get(slot.node.id)
            if coming is not None and coming.problem:
                delays[coming.problem] = None
            if slot.new:
                slot.new = False
                counts[slot.pool.id] = counts.get(slot.pool.id, 0) + 1
                orders.setdefault(slot.pool.id, []).append(job.id)
        if pooled:
            texts[job.id] = _coming_text(pooled, list(delays))
        if judge is not None and (text := judge.text_of(job.id)):
            texts[job.id] = "; ".join(filter(None, (texts.get(job.id), text)))
    wanted = [
        WantedNodes(
            pool=name, count=counts[name], job_ids=(found := tuple(dict.fromkeys(orders[name]))), why=_why(found)
        )
        for name in sorted(counts)
    ]
    wanted += _up_to_minimum(cluster, room, counts)
    return NodeDemand(wanted=tuple(wanted), used=frozenset(used), texts=texts)


def _later_trial(
    cluster: ClusterSnapshot, room: Mapping[PoolId, int], now_s: float
) -> tuple[_Trial | None, Mapping[PoolId, str]]:
    """The same trial with the pools that order nothing now, and why; None without such a pool."""
    closed = {pool.id: why for pool in cluster.node_pools.values() if (why := why_closed(pool, cluster, now_s))}
    if not closed:
        return None, closed
    rooms = {pool.id: room[pool.id] or _later_places(pool, cluster) for pool in cluster.node_pools.values()}
    pools = sorted(_by_price(cluster), key=lambda pool: pool.id in closed)
    return _trial(cluster, [slot for pool in pools for slot in _new_slots(pool, rooms[pool.id], now_s)]), closed


def why_closed(pool: NodePool, cluster: ClusterSnapshot, now_s: float) -> str:
    """Why the pool orders no node now, for its last failures, nodes that cannot be stopped, or its cap of the month; empty if it does."""
    wait_s = pool.waits_s(now_s)
    if wait_s > 0.0:
        nodes = f"{pool.failures} node{'' if pool.failures == 1 else 's'}"
        return f"pool {pool.id} tries again in {format_duration(wait_s)}: {nodes} failed to start, the last: {pool.failure}"
    members = members_of(pool.id, cluster.pool_nodes)
    stuck = next((member for member in members if member.leaving and member.problem), None)
    if stuck is not None and not pool.places(members):
        return f"pool {pool.id} orders no other node before {stuck.id} is stopped: {stuck.problem}"
    if pool.removing or pool.cap_per_month is None or pool.places_this_month(members, now_s):
        return ""
    if not pool.cap_per_month:
        return f"pool {pool.id} orders no node: its cap is $0 a month"
    spent, month = pool.spent_this_month(members, now_s), month_of(now_s)
    return (
        f"pool {pool.id} orders no node: ${spent:,.2f} of its ${pool.cap_per_month:,.2f} a month are spent in {month}, "
        f"and {len(members)} of its nodes run"
    )


def _wait_text(gang: list[_Slot], closed: Mapping[PoolId, str]) -> str:
    """Why the pools that the gang needs start no node for it now; "" if it needs none of them."""
    pools = {slot.pool.id for slot in gang if slot.pool is not None and slot.pool.id in closed}
    return "; ".join(closed[name] for name in sorted(pools))


def _coming_text(counts: Mapping[PoolId, int], delays: Sequence[str]) -> str:
    """Which pools start how many nodes, and why those ordered before are not up yet."""
    starting = [
        f"pool {name} is starting {count} node{'' if count == 1 else 's'} for it"
        for name, count in sorted(counts.items())
    ]
    return "; ".join([*starting, *delays[:DELAYS_MAX]])


def demand_period_s(nodes: int, least_s: float) -> float:
    """Time between two computations on a fleet of so many nodes: each reads all of it."""
    return max(least_s, nodes / NODES_PER_S)


def _waiting_for_capacity(
    cluster: ClusterSnapshot, jobs: Iterable[Job], reason_of: Callable[[Job], WaitReason | None]
) -> Iterator[Job]:
    """The jobs that nodes of a pool could help, in the order in which they are served: at most `JOBS_MAX`, of `JOBS_SEEN_MAX` looked at.

    Jobs tied to named nodes, reservations or domains are left out, and those for MIG slices, which no node of a pool has.
    """
    priority = {queue.id: queue.priority for queue in cluster.queues.values()}
    eligible = [
        job
        for job in jobs
        if job.state is JobState.PENDING
        and not (job.held or job.unmet_dependencies)
        and not (job.spec.nodelist or job.spec.reservation)
        and not all(one.is_mig for one in job.spec.role.gpus.choices)
        and not job.spec.topology.binding
    ]
    eligible.sort(key=lambda job: (-priority.get(job.queue, 0), job.seq))
    found = 0
    for job in eligible[:JOBS_SEEN_MAX]:
        reason = reason_of(job)
        if reason is not None and reason.reason in CAPACITY_REASONS:
            yield job
            found += 1
            if found == JOBS_MAX:
                return


class _GrowingQuotas:
    """The queue tree with the usage of the running jobs and of the gangs taken here, on a fleet that grows.

    The usage is kept as a sum for each user of a queue: a tree for another fleet then costs nothing that grows with the running jobs.

    Attributes:
        capacity: of the fleet, with the nodes on their way and those ordered so far.
    """

    def __init__(self, cluster: ClusterSnapshot, capacity: Resources) -> None:
        self.capacity = capacity
        self._queues = cluster.queues
        self._running: dict[tuple[QueueId, UserId], tuple[Resources, int]] = {}
        for attempt in cluster.attempts.values():
            job = cluster.jobs[attempt.job_id]
            if job.queue in self._queues:
                self._count(job, attempt.allocation.resources)
        self._trees = {capacity: self._tree(capacity)}

    def admits(self, job: Job, asked: Resources, more: Resources) -> bool:
        """Whether the job may use these resources if the fleet had `more`."""
        capacity = self.capacity + more
        if capacity not in self._trees:
            self._trees = {self.capacity: self._trees[self.capacity], capacity: self._tree(capacity)}
        tree = self._trees[capacity]
        return tree.check_admission(tree.job_node(job.queue), job.user, asked) is None

    def take(self, job: Job, asked: Resources, more: Resources) -> None:
        """Count the job as running, on a fleet that grows by `more`."""
        self._count(job, asked)
        if more != NO_RESOURCES:
            self.capacity += more
            self._trees = {self.capacity: self._tree(self.capacity)}
        else:
            tree = self._trees[self.capacity]
            tree.add_running(tree.job_node(job.queue), job.user, asked)
            self._trees = {self.capacity: tree}

    def _count(self, job: Job, held: Resources) -> None:
        before, jobs = self._running.get((job.queue, job.user), (NO_RESOURCES, 0))
        self._running[job.queue, job.user] = before + held, jobs + 1

    def _tree(self, capacity: Resources) -> QuotaTree:
        tree = QuotaTree(self._queues.values(), capacity)
        for (queue, user), (held, jobs) in self._running.items():
            tree.add_running(tree.job_node(queue), user, held, jobs)
        return tree


class _Trial:
    """Places gangs one after the other. Slots only shrink, so a request that did not fit is not tried again.

    Args:
        slots: free capacity, nodes on their way, and new nodes, in the order in which they are used.
        quotas: on the fleet without the new nodes.
        free_seats: of each licence.
        releasable: nodes of pools without jobs, which are released if no job needs them.
    """

    def __init__(
        self,
        slots: list[_Slot],
        quotas: _GrowingQuotas,
        free_seats: dict[str, int],
        releasable: Container[NodeId],
    ) -> None:
        self._slots = slots
        self._summary = summary_of(slot.node for slot in slots)
        self._unmountable = unmountable_nodes(slot.node for slot in slots)
        self._quotas = quotas
        self._free_seats = free_seats
        # Requests that no slots hold; with queue, user and licences those that quotas refuse.
        self._failed: set[tuple[object, ...]] = set()
        self._vetoed: dict[
            tuple[object, ...], list[NodePool]
        ] = {}  # new nodes of requests that the judge refused a job
        self._idle = [slot for slot in slots if slot.pool is None and slot.node.id in releasable]
        self._all: dict[tuple[str, str], list[_Slot]] = {}
        self._free: dict[tuple[str, str], list[_Slot]] = {}
        self._sites: dict[str, list[_Slot]] = {}
        for slot in slots:
            model = slot.node.devices[0].model if slot.node.devices else ""
            self._sites.setdefault(slot.node.site, []).append(slot)
            self._all.setdefault((model, slot.node.site), []).append(slot)
            if slot.devices or slot.rooms:
                self._free.setdefault((model, slot.node.site), []).append(slot)

    def take_gang(self, job: Job, judge: OrderJudge | None = None) -> list[_Slot]:
        """Take the parts of the job's gang from the slots, in their order; empty if they do not hold all of it, a licence lacks seats, or a quota or
        the judge refuses it.

        Slots that the job's quota needs, although the gang does not use them, follow.
        """
        role = job.spec.role
        exclude = self._excluded(job, judge)
        request = (
            role.gpus,
            role.cpus,
            role.memory_bytes,
            role.extras,
            role.others,
            exclude,
            job.project if role.gpus.has_shares else "",
        )
        refused = (job.queue, job.user, role.licences, *request)
        if request in self._failed or refused in self._failed:
            return []
        if any(self._free_seats.get(name, 0) < seats for name, seats in role.licences):
            return []
        if judge is not None and refused in self._vetoed and not judge.admits(job, self._vetoed[refused]):
            return []  # nothing was taken since: it would find the same slots
        try:
            shapes = acceptable_shapes(role, self._summary)
        except NeverFits:
            return []
        held, vetoes = False, list[list[NodePool]]()
        for shape in shapes:
            groups = self._free if shape.node_devices else self._all
            for slots in (self._sites if role.others else groups).values():  # each role may have a model of its own
                found = _find(_parts(shape, job), slots, exclude)
                held = held or bool(found)
                if taken := self._take(job, found, judge, vetoes) if found else []:
                    return taken
                if held and not role.gpus.alternatives:
                    break  # other slots would be as many
        if not vetoes:  # the rule of another queue, or for another job, may admit the same request
            self._failed.add(refused if held else request)
        elif len(vetoes) == 1:
            self._vetoed[refused] = vetoes[0]
        return []

    def _excluded(self, job: Job, judge: OrderJudge | None) -> frozenset[str]:
        """Nodes on which the job must not run."""
        kept_off = frozenset[str]() if judge is None else judge.keeps_off(job)
        unmountable = self._unmountable if job.spec.mounts_stores else ()
        return kept_off.union(job.spec.exclude, unmountable)

    def _take(
        self, job: Job, found: list[tuple[_Slot, _Part]], judge: OrderJudge | None, vetoes: list[list[NodePool]]
    ) -> list[_Slot]:
        """Take these slots; none if quotas refuse, or the judge, which adds the pools of the nodes to the vetoes."""
        quotas = self._quotas
        licences = job.spec.role.licences
        asked = sum((slot.resources_of(part) for slot, part in found), Resources(extras=licences))
        taken = [slot for slot, _ in found]
        new = [slot for slot in taken if slot.new]
        own = _capacity(new)
        if not quotas.admits(job, asked, own):
            spare = [slot for slot in self._slots if slot.new and not any(slot is one for one in new)]
            if not quotas.admits(job, asked, own + _capacity(spare)):
                return []
            # The fewest that suffice, by bisection: a larger fleet admits all that a smaller one does.
            count = bisect_left(
                range(len(spare)), True, key=lambda count: quotas.admits(job, asked, own + _capacity(spare[:count]))
            )
            new += spare[:count]
            taken += spare[:count]
        pools = [slot.pool for slot in new if slot.pool is not None]
        if judge is not None and pools and not judge.admits(job, pools):
            vetoes.append(pools)
            return []
        self._idle = [slot for slot in self._idle if not any(slot is one for one in taken)]
        if self._idle and not new and not quotas.admits(job, asked, -_capacity(self._idle)):
            taken += self._idle
            self._idle = []
        self._vetoed.clear()
        quotas.take(job, asked, _capacity(new))
        for slot, part in found:
            slot.take(part)
        for name, seats in licences:
            self._free_seats[name] -= seats
        return taken


def _capacity(slots: Iterable[_Slot]) -> Resources:
    return nodes_resources(slot.node for slot in slots)


def _parts(shape: Shape, job: Job) -> list[_Part]:
    found: list[_Part] = []
    for one in shape.each:
        group = "" if one.share is None else f"{one.share.kind}:{job.project}"
        last = [_Part(one, one.last_node_devices, "")] if one.last_node_devices else []
        found += [_Part(one, one.devices, group)] * one.nodes + last
    return found


def _find(parts: list[_Part], slots: list[_Slot], exclude: Container[str]) -> list[tuple[_Slot, _Part]]:
    """A slot for each part, each on another node; empty if one finds none."""
    found: list[tuple[_Slot, _Part]] = []
    taken: set[NodeId] = set()
    for part in parts:
        slot = next(
            (one for one in slots if one.node.id not in taken and one.node.id not in exclude and one.holds(part)),
            None,
        )
        if slot is None:
            return []
        taken.add(slot.node.id)
        found.append((slot, part))
    return found


def _room(pool: NodePool, cluster: ClusterSnapshot, now_s: float) -> int:
    """How many more nodes the pool may order now."""
    if pool.waits_s(now_s) > 0.0:
        return 0
    return min(_places(pool, cluster), pool.places_this_month(members_of(pool.id, cluster.pool_nodes), now_s))


def _places(pool: NodePool, cluster: ClusterSnapshot) -> int:
    """How many more nodes the pool may have, whatever it cost so far."""
    return pool.places(members_of(pool.id, cluster.pool_nodes))


def _later_places(pool: NodePool, cluster: ClusterSnapshot) -> int:
    """The same once the nodes have gone that it releases."""
    return pool.places(one for one in members_of(pool.id, cluster.pool_nodes) if not one.leaving)


def _by_price(cluster: ClusterSnapshot) -> list[NodePool]:
    return sorted(cluster.node_pools.values(), key=lambda pool: (pool.price_per_device_h, pool.id))


def _slot_of(node: Node, pool: NodePool | None = None, *, new: bool = False) -> _Slot:
    return _Slot(node=node, devices=len(node.devices), host=node.host, pool=pool, new=new)


def _new_slots(pool: NodePool, count: int, now_s: float) -> list[_Slot]:
    offer = pool.next_offer(0.0, now_s) or pool.offers[0]
    return [
        _slot_of(template_node(pool, NodeId(f"{pool.id}+{number}"), offer.text), pool, new=True)
        for number in range(count)
    ]


def _coming_slots(cluster: ClusterSnapshot) -> list[_Slot]:
    found = []
    for member in sorted(cluster.pool_nodes.values(), key=lambda member: member.id):
        pool = cluster.node_pools.get(member.pool)
        if pool is not None and member.state in COMING_STATES and member.id not in cluster.nodes:
            found.append(_slot_of(template_node(pool, member.id, member.offer), pool))
    return found


def _free_slots(cluster: ClusterSnapshot) -> list[_Slot]:
    """What is free on the nodes that accept work."""
    found = []
    for node_id, node in sorted(cluster.nodes.items()):
        if node.schedulable:
            usage = cluster.usage.get(node_id, EMPTY_USAGE)
            slot = _slot_of(node)
            slot.devices = sum(
                device.healthy and not device.divided and device.index not in usage.devices for device in node.devices
            )
            for used, group in usage.shares.values():
                slot.rooms.setdefault(group, []).append(MILLI_PER_DEVICE - used)
            slot.host -= usage.host
            found.append(slot)
    return found


def _trial(cluster: ClusterSnapshot, new: list[_Slot]) -> _Trial:
    """A trial on what is free, on its way, and new."""
    coming = _coming_slots(cluster)
    capacity = fleet_resources(cluster.nodes, seats_of(cluster.licences)) + _capacity(coming)
    idle = {name for name in cluster.pool_nodes if cluster.usage.get(name, EMPTY_USAGE) == EMPTY_USAGE}
    return _Trial(
        [*_free_slots(cluster), *coming, *new], _GrowingQuotas(cluster, capacity), free_licences(cluster), idle
    )


def _up_to_minimum(
    cluster: ClusterSnapshot, room: Mapping[PoolId, int], counts: Mapping[PoolId, int]
) -> list[WantedNodes]:
    """Further nodes that bring each pool to its minimum. Nodes that are being released do not count towards it."""
    found = []
    for name, pool in sorted(cluster.node_pools.items()):
        kept = sum(not member.leaving for member in members_of(name, cluster.pool_nodes)) + counts.get(name, 0)
        more = min(pool.min_nodes - kept, room[name] - counts.get(name, 0))
        if more > 0:
            found.append(WantedNodes(pool=name, count=more, why=f"the minimum is {pool.min_nodes}"))
    return found


def _why(job_ids: tuple[JobId, ...]) -> str:
    named = ", ".join(job_ids[:3]) + (f" and {len(job_ids) - 3} more" if len(job_ids) > 3 else "")  # as elsewhere
    return f"job{'' if len(job_ids) == 1 else 's'} {named} wait{'s' if len(job_ids) == 1 else ''} for capacity"
