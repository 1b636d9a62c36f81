"""Maps records to numbers: the board's number of each node, the kind of its devices, and a job's needs in those numbers.

A kind is a model of devices at a site. Nodes are numbered by kind, then by their position in the topology tree, then by id: consecutive numbers are neighbours, in the tree and in
the order of ranks. A node with devices of two models or sizes has two numbers, which share its CPUs and memory. Devices with MIG mode on are a
kind of their own, because they are granted in slices only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.mig import DeviceMig, MigProfile
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.summary import NodeKinds, summary_from_counts, summary_of
from phalanx.core.fleet.topology import TopologyTree, build_topology_tree
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.node_filter import ALL_NODES, NodeFilter, node_filter_of, unmountable_nodes
from phalanx.core.scheduling.pool import HeldShare, SharePosition
from phalanx.core.scheduling.shape import Shape, acceptable_shapes, placement_part, tasks_per_node
from phalanx.core.scheduling.sharing.mig_devices import DivisibleDevice, HeldSlices
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.snapshot import EMPTY_USAGE, Usage
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.job import Job
from phalanx.core.work.mig_request import profile_milli
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import MIG_GROUP, MILLI_PER_DEVICE, DeviceShare, GrantedSlice, ShareKind
from phalanx.core.work.spec import JobSpec, Role, TopologyConstraint
from phalanx.core.work.states import WaitReasonCode

_NO_SHARE: Final = -1
NO_LICENCES: Final[Mapping[str, int]] = {}
NO_RESERVATIONS: Final[Mapping[ReservationId, Reservation]] = {}


class _Part(NamedTuple):
    """What a shape takes of a device of some kind: whole devices, a share, or MIG slices of `milli` thousandths each.

    Attributes:
        device_memory_bytes: of the devices that it is for; 0 for any.
    """

    milli: int = 0
    group: str = ""
    device_memory_bytes: int = 0
    profile: str = ""
    slices: int = 0


class PendingUsage:
    """What is in use now, including this plan's placements."""

    def __init__(self, usage: Mapping[NodeId, Usage], free_licences: Mapping[str, int] = NO_LICENCES) -> None:
        self._usage = usage
        self._free_licences = dict(free_licences)
        self._changed: dict[NodeId, Usage] = {}

    def usage_of(self, node_id: NodeId) -> Usage:
        """What is in use on the node."""
        return self._changed.get(node_id) or self._usage.get(node_id, EMPTY_USAGE)

    def add(self, allocation: Allocation) -> None:
        """Count this allocation as in use too."""
        for grant in allocation.grants:
            self._changed[grant.node_id] = self.usage_of(grant.node_id).plus(grant)
        for name, seats in allocation.licences:
            self._free_licences[name] = self._free_licences.get(name, 0) - seats

    def has_capacity_for(self, allocation: Allocation, nodes: Mapping[NodeId, Node]) -> bool:
        """Whether its licences, CPUs, memory and extras are free."""
        if any(self._free_licences.get(name, 0) < seats for name, seats in allocation.licences):
            return False
        for grant in allocation.grants:
            asked = grant.host
            if asked and not (self.usage_of(grant.node_id).host + asked).fits(nodes[grant.node_id].host):
                return False
        return True


@dataclass(slots=True)
class FleetIndex:
    """The numbering of one fleet. Rebuilt when a node joins, leaves for good, or changes its devices, its labels or whether it can mount.

    Attributes:
        nodes: the node of each number.
        device_models: the model of each kind of devices; nodes without devices have the model "".
        kind_sites: the site of each kind.
        model_of_node: kind of each node number.
        device_memory_bytes: of each device there.
        healthy_devices: healthy devices of that kind on each node, ascending.
        divisible: the devices of each number that are granted in MIG slices.
        numbers_of_node: numbers of each node.
        twins: numbers that share a node, for nodes with several.
        alike: the numbers with the same kind, device memory, division and number of healthy devices, ascending.
    """

    nodes: list[Node] = field(default_factory=list)
    device_models: list[str] = field(default_factory=list)
    kind_sites: list[str] = field(default_factory=list)
    model_of_node: list[int] = field(default_factory=list)
    device_memory_bytes: list[int] = field(default_factory=list)
    healthy_devices: list[tuple[int, ...]] = field(default_factory=list)
    numbers_of_node: dict[NodeId, tuple[int, ...]] = field(default_factory=dict)
    twins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    alike: dict[tuple[int, int, DeviceMig | None, int], list[int]] = field(default_factory=dict)
    tree: TopologyTree | None = None
    divisible: dict[int, tuple[DivisibleDevice, ...]] = field(default_factory=dict)
    _unmountable: int = -1  # not known yet

    @property
    def device_counts(self) -> list[int]:
        """Devices of each node number that are granted as a whole or in shares; MIG slices are counted apart."""
        return [0 if number in self.divisible else len(found) for number, found in enumerate(self.healthy_devices)]

    def bitset_of(self, node_ids: Iterable[NodeId]) -> int:
        """The nodes as a bitset; unknown ones are ignored."""
        found = 0
        for node_id in node_ids:
            for number in self.numbers_of_node.get(node_id, ()):
                found |= 1 << number
        return found

    def left_out_by(self, spec: JobSpec) -> int:
        """The nodes that a job's own lists of nodes leave out, and those that cannot mount what it mounts, as a bitset."""
        unlisted = ((1 << len(self.nodes)) - 1) & ~self.bitset_of(spec.nodelist) if spec.nodelist else 0
        return unlisted | self.bitset_of(spec.exclude) | self.unmountable_by(spec)

    def unmountable_by(self, spec: JobSpec) -> int:
        """The nodes that a job leaves out since they cannot mount object stores, as a bitset; 0 for a job that mounts none."""
        if not spec.mounts_stores:
            return 0
        if self._unmountable < 0:
            self._unmountable = self.bitset_of(node.id for node in self.nodes if node.mounts_error)
        return self._unmountable

    def needs(self, shapes: Iterable[Shape], topology: TopologyConstraint, project: str = "") -> tuple[Need, ...]:
        """The shapes as needs, in order of preference. Empty: no node has such devices, or the fleet lacks a required level.

        A share that is asked for as memory is one need for each size of device memory, the smallest share first.
        """
        shapes = tuple(shapes)
        if any(shape.others for shape in shapes):
            return tuple(need for shape in shapes for need in self._needs_of_roles(shape, topology))
        within = self._level(topology.within)
        slice_within = self._level(topology.slice_within)
        if (topology.required and within < 0) or (topology.slice_nodes and slice_within < 0):
            return ()  # the level existed when the job was submitted; without it, no placement is near enough
        found = []
        for shape in shapes:
            for part in self._parts(shape, project):
                kinds, excluded = self._kinds_for(shape, part)
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
                        extras=shape.extras,
                        licences=shape.licences,
                        within=within,
                        required=topology.required and within >= 0,
                        slice_nodes=topology.slice_nodes if slice_within >= 0 else 0,
                        slice_within=slice_within,
                        nodes_max=shape.nodes_max if shape.nodes_max > shape.nodes else 0,
                        excluded=excluded,
                        share_milli=part.milli * max(1, part.slices),
                        share_group=part.group,
                        mig_profile=part.profile,
                        mig_slices=part.slices,
                    )
                )
        return tuple(found)

    def _needs_of_roles(self, shape: Shape, topology: TopologyConstraint) -> Iterator[Need]:
        """The needs of a gang with several roles, of which each takes whole devices: one for each site that has those of all roles."""
        alone = [self.needs((one,), topology) for one in shape.each]
        if not all(alone):
            return
        for site in sorted(set(self.kind_sites)):
            own = [self._at_site(needs[0], site) for needs in alone]
            if all(need.kinds for need in own):
                yield replace(own[0], others=tuple(own[1:]))

    def _at_site(self, need: Need, site: str) -> Need:
        """The need with the kinds of a site only."""
        return replace(need, kinds=tuple([kind for kind in need.kinds if self.kind_sites[kind] == site]))

    def _parts(self, shape: Shape, project: str) -> list[_Part]:
        """What a shape takes of a node, in as many ways as the fleet's devices differ, the smallest part first."""
        share = shape.share
        if share is None:
            return [_Part()]
        if share.kind is ShareKind.MIG:
            return self._slices_for(shape)
        group = f"{share.kind}:{project}"
        return [
            _Part(milli=share.milli_of(memory_bytes), group=group, device_memory_bytes=memory_bytes)
            for memory_bytes in self._share_sizes(shape)
        ]

    def _slices_for(self, shape: Shape) -> list[_Part]:
        """The profiles that serve the shape on the divisible devices that it accepts; those that take the least of a device first."""
        share, found = shape.share, set()
        alike = {
            (self.model_of_node[number], self.device_memory_bytes[number], own[0].mig.profiles): number
            for number, own in self.divisible.items()
        }
        for (_, _, profiles), number in alike.items():
            profile = None if share is None else share.mig_profile(profiles)
            if share is not None and profile is not None and shape.accepts(self._device(number)):
                found.add((profile_milli(profile, profiles), profile.name, share.count))
        return [_Part(milli, MIG_GROUP, profile=name, slices=count) for milli, name, count in sorted(found)]

    def _device(self, number: int) -> Device:
        """One of the devices of this number."""
        own = self.divisible.get(number)
        return Device(
            index=0,
            uuid="",
            model=self.device_models[self.model_of_node[number]],
            memory_bytes=self.device_memory_bytes[number],
            mig=None if own is None else own[0].mig,
        )

    def _share_sizes(self, shape: Shape) -> list[int]:
        """Sizes of device memory on which a share by memory is another part of the device, largest first; a single 0 for other shapes."""
        if shape.share is None or not shape.share.memory_gib:
            return [0]
        return sorted(set(self.device_memory_bytes) - {0}, reverse=True)

    def places(self, allocation: Allocation) -> tuple[Places, tuple[SharePosition, ...]]:
        """The places of an allocation, and where on each node its share lies; grants on nodes that are gone are ignored."""
        found: list[tuple[int, tuple[int, int], SharePosition]] = []
        for grant in allocation.grants:
            number = self._number_of(grant)
            if number is not None:
                count = min(grant.whole_devices, len(self.healthy_devices[number]))
                found.append((grant.role, (number, count), _position(grant)))
        found.sort(key=lambda one: one[:2])
        shared = any(position != _NO_SHARE for *_, position in found)
        return tuple([place for _, place, _ in found]), tuple([position for *_, position in found]) if shared else ()

    def _number_of(self, grant: NodeGrant) -> int | None:
        """The number of its node that has its devices; if some became unhealthy, one of their kind (divided or not), else any."""
        slices = grant.share is not None and bool(grant.share.slices)
        numbers = sorted(
            self.numbers_of_node.get(grant.node_id, ()), key=lambda number: (number in self.divisible) is not slices
        )
        fitting = (number for number in numbers if set(grant.devices) <= set(self.healthy_devices[number]))
        return next(fitting, numbers[0] if numbers else None)

    def allocation(
        self, need: Need, places: Places, role: Role, taken: PendingUsage, shared: Sequence[HeldShare] = ()
    ) -> Allocation | None:
        """The grants for these places on devices that are not in use; None if too few are free.

        Args:
            need: of the job.
            places: of the job.
            role: of the job.
            taken: what is in use.
            shared: the device of each place, if the need is for shares, or its MIG slices. A device of which nothing is placed yet gets the
                first free index.
        """
        grants: list[NodeGrant] = []
        chosen: tuple[int, ...]
        first = 0
        roles, parts = role.each, need.places_by_role(places)
        owners = [own for own, (_, held) in enumerate(parts) for _ in held] if need.others else [0] * len(places)
        for rank, (number, count) in enumerate(places):
            own, part = owners[rank], parts[owners[rank]][0]
            node = self.nodes[number]
            held = taken.usage_of(node.id)
            free = [index for index in self.healthy_devices[number] if index not in held.devices]
            share = None
            if need.mig_profile:
                share = self._slices(need, number, held, shared[rank])
                if share is None:
                    return None
                chosen = tuple(sorted({one.device for one in share.slices}))
            elif need.share_milli:
                device = shared[rank]
                assert isinstance(device, SharedDevice), device
                placed = held.shares.get(device.index, (0, ""))[1] == device.group
                if not placed and not free:
                    return None
                share = self._share(need, number)
                chosen = (device.index if placed else free[0],)
            elif len(free) < count:
                return None
            else:
                chosen = _adjacent(free, count)
            tasks = tasks_per_node(roles[own], need.mig_slices or count)
            grants.append(
                NodeGrant(
                    node_id=node.id,
                    node_rank=rank,
                    devices=chosen,
                    share=share,
                    cpus=part.cpus,
                    memory_bytes=part.memory_bytes,
                    extras=part.extras,
                    tasks=tasks,
                    first_rank=first,
                    role=own,
                )
            )
            first += tasks
        return Allocation(grants=tuple(grants), licences=need.licences)

    def _share(self, need: Need, number: int) -> DeviceShare:
        kind = ShareKind(need.share_group.partition(":")[0])
        memory_bytes = self.device_memory_bytes[number] * need.share_milli // MILLI_PER_DEVICE
        return DeviceShare(milli=need.share_milli, memory_bytes=memory_bytes, kind=kind, group=need.share_group)

    def _slices(self, need: Need, number: int, held: Usage, wanted: HeldShare) -> DeviceShare | None:
        """The MIG slices of a grant; None if one of the places is not free yet, or the devices are divided otherwise by now."""
        assert isinstance(wanted, HeldSlices), wanted
        own, taken = self.divisible.get(number, ()), dict(held.slices)
        found: list[GrantedSlice] = []
        profile = None
        for one in wanted.slices:
            device = own[one.place]
            profile = device.mig.profile(one.profile)
            index = device.index
            if profile is None or (index in held.devices and index not in held.slices):
                return None
            granted = GrantedSlice(
                device=index,
                profile=one.profile,
                start=one.start,
                memory_slices=profile.memory_slices,
                milli=need.share_milli // need.mig_slices,
            )
            if taken.get(index, 0) & granted.bits:
                return None
            taken[index] = taken.get(index, 0) | granted.bits
            found.append(granted)
        if profile is None or len(found) < need.mig_slices:
            return None
        return DeviceShare(
            milli=need.share_milli,
            memory_bytes=profile.memory_bytes,
            kind=ShareKind.MIG,
            group=need.share_group,
            slices=tuple(found),
        )

    def _level(self, name: str) -> int:
        return self.tree.level(name) if name and self.tree is not None else -1

    def _kinds_for(self, shape: Shape, part: _Part) -> tuple[tuple[int, ...], int]:
        """The kinds that can hold the shape's parts, by name; and the nodes of these kinds whose devices do not fit."""
        fitting: set[int] = set()
        unfit: list[tuple[int, list[int]]] = []
        for (kind, _, _, healthy), numbers in self.alike.items():
            each = self._capacity_on(shape, part, numbers[0])
            if not each and shape.node_devices:
                unfit.append((kind, numbers))
            elif each * healthy >= shape.node_devices:
                fitting.add(kind)
        excluded = 0
        for kind, numbers in unfit:
            if kind in fitting:
                for number in numbers:
                    excluded |= 1 << number
        return tuple(sorted(fitting)), excluded

    def _capacity_on(self, shape: Shape, part: _Part, number: int) -> int:
        """What a device of this number has for the part: 1 or 0 devices, or its MIG slices."""
        device = self._device(number)
        if part.device_memory_bytes not in (0, device.memory_bytes):
            return 0
        if part.profile:
            mig, share = device.mig, shape.share
            profile = None if mig is None or share is None else share.mig_profile(mig.profiles)
            if mig is None or profile is None or profile.name != part.profile:
                return 0
            if profile_milli(profile, mig.profiles) != part.milli:
                return 0
        return shape.capacity_on(device)


def index_fleet(nodes: Mapping[NodeId, Node]) -> FleetIndex:
    """Number the fleet."""
    fleet = [nodes[node_id] for node_id in sorted(nodes)]
    tree = build_topology_tree(fleet)
    place = {node.id: key for node, key in zip(fleet, tree.order_keys(), strict=True)}
    parts: list[tuple[tuple[str, bool, str], tuple[object, ...], int, Node, tuple[Device, ...]]] = []
    for node in fleet:
        by_kind: dict[tuple[str, bool, int, tuple[MigProfile, ...]], list[Device]] = {}
        for device in node.devices:
            usable = device.mig is None or not device.divided or device.mig.grantable
            if device.healthy and usable:
                profiles = device.mig.profiles if device.mig is not None and device.divided else ()
                key = (device.model, device.divided, device.memory_bytes, profiles)
                by_kind.setdefault(key, []).append(device)
        for (model, divided, memory_bytes, _), found in sorted(by_kind.items()) or [(("", False, 0, ()), [])]:
            own = tuple(sorted(found, key=lambda device: device.index))
            parts.append(((model, divided, node.site), place[node.id], memory_bytes, node, own))
    parts.sort(key=lambda part: part[:3])
    kinds = sorted({part[0] for part in parts})
    fit = FleetIndex(device_models=[model for model, *_ in kinds], kind_sites=[site for *_, site in kinds])
    order = {kind: number for number, kind in enumerate(kinds)}
    for number, (kind, _, memory_bytes, node, own) in enumerate(parts):
        fit.nodes.append(node)
        fit.model_of_node.append(order[kind])
        fit.device_memory_bytes.append(memory_bytes)
        fit.healthy_devices.append(tuple([device.index for device in own]))
        if kind[1]:
            fit.divisible[number] = tuple(
                [DivisibleDevice(device.index, device.mig) for device in own if device.mig is not None]
            )
        mig = own[0].mig if kind[1] else None
        fit.alike.setdefault((order[kind], memory_bytes, mig, len(own)), []).append(number)
        fit.numbers_of_node[node.id] = (*fit.numbers_of_node.get(node.id, ()), number)
    for numbers in fit.numbers_of_node.values():
        if len(numbers) > 1:
            fit.twins.update((number, numbers) for number in numbers)
    fit.tree = build_topology_tree(fit.nodes) if tree.levels else None
    return fit


def _position(grant: NodeGrant) -> SharePosition:
    """Where the grant's share lies on its node."""
    if grant.share is None:
        return _NO_SHARE
    if not grant.share.slices:
        return grant.devices[0]
    return tuple([(one.device, one.profile, one.start) for one in grant.share.slices])


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
        node_kinds: NodeKinds,
        reservations: Mapping[ReservationId, Reservation] = NO_RESERVATIONS,
    ) -> None:
        self._nodes = nodes
        self._kind_of = node_kinds.kind_of
        self._fit = fit
        self._reservations = reservations
        self._unmountable = unmountable_nodes(nodes.values())
        self._shapes: dict[tuple[Role, NodeFilter], tuple[Shape, ...] | WaitReason] = {}
        self._needs: dict[tuple[object, ...], tuple[Need, ...]] = {}
        self._kinds = node_kinds.count_kinds(node for node in nodes.values() if node.schedulable)
        self._summary = summary_from_counts(self._kinds)

    def invalidate(self, node: Node) -> None:
        """The node accepts work now, or no longer does: drop the cached results."""
        self._kinds[self._kind_of(node)] += 1 if node.schedulable else -1
        self._summary = summary_from_counts(self._kinds)
        self._shapes.clear()
        self._needs.clear()

    def shapes_of_job(self, job: Job) -> tuple[Shape, ...] | WaitReason:
        """The shapes on the nodes that accept work now and that the job may use, or why there are none."""
        spec = job.spec
        unmountable = self._unmountable if spec.mounts_stores else frozenset[NodeId]()
        chosen = node_filter_of(spec.nodelist, spec.exclude, spec.reservation, self._reservations, unmountable)
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
    whys = [node.cordon.why for node in nodes if node.state is NodeState.UP and node.cordon is not None]
    if whys:
        same = whys[0] if len(set(whys)) == 1 else ""
        are = "is" if len(whys) == 1 else "are"
        return f"no node accepts work: {same or f'{len(whys)} {are} drained or cordoned'}"
    return "no node is up" if nodes else "no node has joined"
