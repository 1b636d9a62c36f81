"""Maps records to numbers: the board's number of each node, the kind of its devices, and a job's needs in those numbers.

Nodes are numbered by kind, then by their position in the topology tree, then by id: consecutive numbers are neighbours, in the tree and in
the order of ranks. A node with devices of two models or sizes has two numbers, which share its CPUs and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.summary import node_kind, summary_from_counts, summary_of
from phalanx.core.fleet.topology import TopologyTree, build_topology_tree
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_filter import ALL_NODES, NodeFilter, node_filter_of
from phalanx.core.scheduling.shape import Shape, acceptable_shapes, placement_part, tasks_per_node
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.snapshot import EMPTY_USAGE, Usage
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.job import Job, WaitReasonCode
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import MILLI_PER_DEVICE, DeviceShare, ShareKind
from phalanx.core.work.spec import Role, TopologyConstraint

NO_RESERVATIONS: Final[Mapping[ReservationId, Reservation]] = {}


class PendingUsage:
    """Devices, CPUs and memory in use now, including this plan's placements."""

    def __init__(self, usage: Mapping[NodeId, Usage]) -> None:
        self._usage = usage
        self._changed: dict[NodeId, Usage] = {}

    def usage_of(self, node_id: NodeId) -> Usage:
        """What is in use on the node."""
        return self._changed.get(node_id) or self._usage.get(node_id, EMPTY_USAGE)

    def add(self, allocation: Allocation) -> None:
        """Count this allocation as in use too."""
        for grant in allocation.grants:
            self._changed[grant.node_id] = self.usage_of(grant.node_id).plus(grant)

    def has_capacity_for(self, allocation: Allocation, nodes: Mapping[NodeId, Node]) -> bool:
        """Whether its CPUs and memory are free."""
        for grant in allocation.grants:
            asked = grant.host
            if asked and not (self.usage_of(grant.node_id).host + asked).fits(nodes[grant.node_id].host):
                return False
        return True


@dataclass(slots=True)
class FleetIndex:
    """The numbering of one fleet. Rebuilt when a node joins, leaves for good, or changes its devices or labels.

    Attributes:
        nodes: the node of each number.
        device_models: the models of devices, by number; nodes without devices have the kind "".
        model_of_node: kind of each node number.
        device_memory_bytes: of each device there.
        healthy_devices: healthy devices of that kind on each node, ascending.
        numbers_of_node: numbers of each node.
        twins: numbers that share a node, for nodes with several.
    """

    nodes: list[Node] = field(default_factory=list)
    device_models: list[str] = field(default_factory=list)
    model_of_node: list[int] = field(default_factory=list)
    device_memory_bytes: list[int] = field(default_factory=list)
    healthy_devices: list[tuple[int, ...]] = field(default_factory=list)
    numbers_of_node: dict[NodeId, tuple[int, ...]] = field(default_factory=dict)
    twins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tree: TopologyTree | None = None

    @property
    def device_counts(self) -> list[int]:
        """Devices of each node number."""
        return [len(indices) for indices in self.healthy_devices]

    def bitset_of(self, node_ids: Iterable[NodeId]) -> int:
        """The nodes as a bitset; unknown ones are ignored."""
        found = 0
        for node_id in node_ids:
            for number in self.numbers_of_node.get(node_id, ()):
                found |= 1 << number
        return found

    def needs(self, shapes: Iterable[Shape], topology: TopologyConstraint, project: str = "") -> tuple[Need, ...]:
        """The shapes as needs, in order of preference. Empty: no node has such devices, or the fleet lacks a required level.

        A share that is asked for as memory is one need for each size of device memory, the smallest share first.
        """
        within = self._level(topology.within)
        slice_within = self._level(topology.slice_within)
        if (topology.required and within < 0) or (topology.slice_nodes and slice_within < 0):
            return ()  # the level existed when the job was submitted; without it, no placement is near enough
        found = []
        for shape in shapes:
            for memory_bytes in self._share_sizes(shape):
                kinds, excluded = self._kinds_for(shape, memory_bytes)
                if not kinds:
                    continue
                found.append(
                    Need(
                        nodes=shape.nodes,
                        devices=shape.devices,
                        last_node_devices=shape.last_node_devices,
                        kinds=kinds,
                        cpus=shape.cpus,
                        memory_bytes=shape.memory_bytes,
                        within=within,
                        required=topology.required and within >= 0,
                        slice_nodes=topology.slice_nodes if slice_within >= 0 else 0,
                        slice_within=slice_within,
                        nodes_max=shape.nodes_max if shape.nodes_max > shape.nodes else 0,
                        excluded=excluded,
                        share_milli=0 if shape.share is None else shape.share.milli_of(memory_bytes),
                        share_group="" if shape.share is None else f"{shape.share.kind}:{project}",
                    )
                )
        return tuple(found)

    def _share_sizes(self, shape: Shape) -> list[int]:
        """Sizes of device memory on which a share by memory is another part of the device, largest first; a single 0 for other shapes."""
        if shape.share is None or not shape.share.memory_gib:
            return [0]
        return sorted(set(self.device_memory_bytes) - {0}, reverse=True)

    def places(self, allocation: Allocation) -> tuple[Places, tuple[int, ...]]:
        """The places of an allocation, and the index of the shared device of each; grants on nodes that are gone are ignored."""
        found = []
        for grant in allocation.grants:
            numbers = self.numbers_of_node.get(grant.node_id, ())
            number = next(
                (n for n in numbers if set(grant.devices) <= set(self.healthy_devices[n])),
                numbers[0] if numbers else None,
            )
            if number is not None:
                count = min(grant.whole_devices, len(self.healthy_devices[number]))
                found.append(((number, count), -1 if grant.share is None else grant.devices[0]))
        found.sort()
        shared = any(index >= 0 for _, index in found)
        return tuple(place for place, _ in found), tuple(index for _, index in found) if shared else ()

    def allocation(
        self, need: Need, places: Places, role: Role, taken: PendingUsage, shared: Sequence[SharedDevice] = ()
    ) -> Allocation | None:
        """The grants for these places on devices that are not in use; None if too few are free.

        Args:
            need: of the job.
            places: of the job.
            role: of the job.
            taken: what is in use.
            shared: the device of each place, if the need is for shares. One of which nothing is placed yet gets the first free index.
        """
        grants: list[NodeGrant] = []
        first = 0
        for rank, (number, count) in enumerate(places):
            node = self.nodes[number]
            held = taken.usage_of(node.id)
            free = [index for index in self.healthy_devices[number] if index not in held.devices]
            share = None
            if need.share_milli:
                device = shared[rank]
                placed = held.shares.get(device.index, (0, ""))[1] == device.group
                if not placed and not free:
                    return None
                share = self._share(need, number)
                chosen: tuple[int, ...] = (device.index if placed else free[0],)
            elif len(free) < count:
                return None
            else:
                chosen = _adjacent(free, count)
            tasks = tasks_per_node(role, count)
            grants.append(
                NodeGrant(
                    node_id=node.id,
                    node_rank=rank,
                    devices=chosen,
                    share=share,
                    cpus=need.cpus,
                    memory_bytes=need.memory_bytes,
                    tasks=tasks,
                    first_rank=first,
                )
            )
            first += tasks
        return Allocation(grants=tuple(grants))

    def _share(self, need: Need, number: int) -> DeviceShare:
        kind = ShareKind(need.share_group.partition(":")[0])
        memory_bytes = self.device_memory_bytes[number] * need.share_milli // MILLI_PER_DEVICE
        return DeviceShare(milli=need.share_milli, memory_bytes=memory_bytes, kind=kind, group=need.share_group)

    def _level(self, name: str) -> int:
        return self.tree.level(name) if name and self.tree is not None else -1

    def _kinds_for(self, shape: Shape, only_memory_bytes: int = 0) -> tuple[tuple[int, ...], int]:
        """The kinds that can hold the shape's parts, by name; and the nodes of these kinds whose devices are too small.

        With `only_memory_bytes`, devices of another size do not fit.
        """
        fitting: set[int] = set()
        excluded = 0
        takes: dict[tuple[int, int], bool] = {}
        for number, kind in enumerate(self.model_of_node):
            memory_bytes = self.device_memory_bytes[number]
            fits = takes.get((kind, memory_bytes))
            if fits is None:
                device = Device(index=0, uuid="", model=self.device_models[kind], memory_bytes=memory_bytes)
                fits = not shape.node_devices or shape.accepts(device)
                fits = takes[kind, memory_bytes] = fits and only_memory_bytes in (0, memory_bytes)
            if not fits:
                excluded |= 1 << number
            elif len(self.healthy_devices[number]) >= shape.node_devices:
                fitting.add(kind)
        inside = (
            sum(1 << number for number, kind in enumerate(self.model_of_node) if kind in fitting) if excluded else 0
        )
        return tuple(sorted(fitting)), excluded & inside


def index_fleet(nodes: Mapping[NodeId, Node]) -> FleetIndex:
    """Number the fleet."""
    fleet = [nodes[node_id] for node_id in sorted(nodes)]
    tree = build_topology_tree(fleet)
    place = {node.id: key for node, key in zip(fleet, tree.order_keys(), strict=True)}
    parts: list[tuple[str, tuple[object, ...], int, Node, tuple[int, ...]]] = []
    for node in fleet:
        by_kind: dict[tuple[str, int], list[int]] = {}
        for device in node.devices:
            if device.healthy:
                by_kind.setdefault((device.model, device.memory_bytes), []).append(device.index)
        for (model, memory_bytes), found in sorted(by_kind.items()) or [(("", 0), [])]:
            parts.append((model, place[node.id], memory_bytes, node, tuple(sorted(found))))
    parts.sort(key=lambda part: part[:3])
    fit = FleetIndex(device_models=sorted({part[0] for part in parts}))
    order = {kind: number for number, kind in enumerate(fit.device_models)}
    for number, (model, _, memory_bytes, node, indices) in enumerate(parts):
        fit.nodes.append(node)
        fit.model_of_node.append(order[model])
        fit.device_memory_bytes.append(memory_bytes)
        fit.healthy_devices.append(indices)
        fit.numbers_of_node[node.id] = (*fit.numbers_of_node.get(node.id, ()), number)
    for numbers in fit.numbers_of_node.values():
        if len(numbers) > 1:
            fit.twins.update((number, numbers) for number in numbers)
    fit.tree = build_topology_tree(fit.nodes) if tree.levels else None
    return fit


def _adjacent(free: list[int], count: int) -> tuple[int, ...]:
    """Devices that are close together: an aligned block if one is free (pairs and fours share a switch in common servers), else the lowest."""
    if count and not count & (count - 1):
        have = set(free)
        for first in free:
            if first % count == 0 and all(first + step in have for step in range(count)):
                return tuple(range(first, first + count))
    return tuple(free[:count])


class ShapeCache:
    """The requests of one fleet, while the same nodes accept work."""

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        fit: FleetIndex,
        reservations: Mapping[ReservationId, Reservation] = NO_RESERVATIONS,
    ) -> None:
        self._nodes = nodes
        self._fit = fit
        self._reservations = reservations
        self._shapes: dict[tuple[Role, NodeFilter], tuple[Shape, ...] | WaitReason] = {}
        self._needs: dict[tuple[object, ...], tuple[Need, ...]] = {}
        self._kinds = Counter(node_kind(node) for node in nodes.values() if node.schedulable)
        self._summary = summary_from_counts(self._kinds)

    def invalidate(self, node: Node) -> None:
        """The node accepts work now, or no longer does: drop the cached results."""
        self._kinds[node_kind(node)] += 1 if node.schedulable else -1
        self._summary = summary_from_counts(self._kinds)
        self._shapes.clear()
        self._needs.clear()

    def shapes_of_job(self, job: Job) -> tuple[Shape, ...] | WaitReason:
        """The shapes on the nodes that accept work now and that the job may use, or why there are none."""
        spec = job.spec
        chosen = node_filter_of(spec.nodelist, spec.exclude, spec.reservation, self._reservations)
        key = (placement_part(spec.role), chosen)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._shape(*key)
        return found

    def _shape(self, role: Role, chosen: NodeFilter) -> tuple[Shape, ...] | WaitReason:
        if not self._summary.kinds:
            return WaitReason(reason=WaitReasonCode.NO_NODES, detail=_no_nodes_text(self._nodes.values()))
        summary = self._summary
        if chosen is not ALL_NODES:
            summary = summary_of(node for node in self._nodes.values() if node.schedulable and chosen.admits(node.id))
        try:
            if summary.kinds:
                return acceptable_shapes(role, summary)
        except NeverFits:
            pass
        return WaitReason(reason=WaitReasonCode.NODES_DOWN, detail="no node that accepts work now can hold it")

    def needs_of(self, job: Job) -> tuple[Need, ...]:
        """The same as needs on the board; empty for none."""
        shapes = self.shapes_of_job(job)
        if isinstance(shapes, WaitReason):
            return ()
        project = job.project if job.spec.role.gpus.has_shares else ""
        key = (shapes, job.spec.topology, project)
        found = self._needs.get(key)
        if found is None:
            found = self._needs[key] = self._fit.needs(shapes, job.spec.topology, project)
        return found


def _no_nodes_text(nodes: Collection[Node]) -> str:
    """Why no node accepts work, with the cordon's reason if all have the same."""
    whys = {node.cordon.why for node in nodes if node.state is NodeState.UP and node.cordon is not None}
    if whys:
        return "no node accepts work" + (f": {whys.pop()}" if len(whys) == 1 else "")
    return "no node is up" if nodes else "no node has joined"
