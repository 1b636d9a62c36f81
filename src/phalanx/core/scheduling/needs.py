"""A job's request in numbers: equal requests are one `Need`, which is searched, priced and explained once.

Running attempts are expressed as needs too, so that a board that did not start them can count them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.core.ids import NodeId
from phalanx.core.resources import Extras, Resources
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.share import MILLI_PER_DEVICE

Places = tuple[tuple[int, int], ...]  # (node number, devices) per node of a gang, node numbers ascending


@dataclass(frozen=True, slots=True)
class Need:
    """A gang of `nodes` parts of `devices` devices each, and `last_node_devices` devices on one more node (0 for none).

    Attributes:
        kinds: numbers of the pools it may use, in order of preference; the whole gang goes into one.
        cpus, memory_bytes: of each part.
        within: topology level (number, outermost 0) of which a single domain must hold it; -1 for any.
        required: `within` is required; else preferred.
        slice_nodes, slice_within: every slice of this many parts, in rank order, inside one domain of that level; 0 and -1 for no slices.
        excluded: bitset of nodes of the kind whose devices are too small.
        nodes_max: elastic: up to this many parts; equal to `nodes` or 0 for a fixed gang.
        share_milli: thousandths of one device in each part, instead of whole devices; 0 for none.
        share_group: only shares of one group lie on one device.
        mig_profile, mig_slices: MIG slices of each part, and their number; "" and 0 for none. `share_milli` is that of all of them.
        extras: named amounts of each part.
        licences: seats of licences for the whole gang.
        others: the further roles of a gang with several, each on nodes of its own. Its places are those of this role, then those of the others.
    """

    nodes: int
    devices: int
    last_node_devices: int = 0
    kinds: tuple[int, ...] = (0,)
    cpus: int = 0
    memory_bytes: int = 0
    within: int = -1
    required: bool = False
    slice_nodes: int = 0
    slice_within: int = -1
    nodes_max: int = 0
    excluded: int = 0
    share_milli: int = 0
    share_group: str = ""
    mig_profile: str = ""
    mig_slices: int = 0
    extras: Extras = ()
    licences: Extras = ()
    others: tuple[Need, ...] = ()

    @property
    def milli(self) -> int:
        """Thousandths of devices of the smallest acceptable gang."""
        return self.gpus * MILLI_PER_DEVICE + self.nodes * self.share_milli

    @property
    def parts(self) -> int:
        """Nodes of the smallest acceptable gang, without those of its other roles."""
        return self.nodes + (self.last_node_devices > 0)

    @property
    def roles(self) -> tuple[Need, ...]:
        """The need of each role alone, without the licences of the gang."""
        return (replace(self, others=(), licences=()), *self.others) if self.others else (self,)

    def places_by_role(self, places: Places) -> list[tuple[Need, Places]]:
        """The part of these places that belongs to each role."""
        if not self.others:
            return [(self, places)]
        found, first = [], 0
        for role in self.roles:
            found.append((role, places[first : first + role.parts]))
            first += role.parts
        return found

    @property
    def resources(self) -> Resources:
        """Everything that the smallest acceptable gang takes."""
        return self.resources_of(self.parts, self.milli)

    def resources_of(self, parts: int, milli: int) -> Resources:
        """Everything that so many parts with these thousandths of devices take; of several roles, the parts are those of the need."""
        if self.others:
            host = sum((role.resources for role in self.roles), Resources(extras=self.licences))
            return host + Resources(milli - host.milli)
        if not (self.extras or self.licences):
            return Resources(milli, self.cpus * parts, self.memory_bytes * parts)
        part = Resources(0, self.cpus, self.memory_bytes, self.extras)
        return part * parts + Resources(milli, extras=self.licences)

    @property
    def asks_host(self) -> bool:
        """Whether it takes anything besides devices."""
        return bool(self.cpus or self.memory_bytes or self.extras or self.licences or self.others)

    @property
    def node_devices(self) -> int:
        """Devices of a node that a part uses, as a whole or in part."""
        return 1 if self.share_milli else self.devices

    @property
    def gpus(self) -> int:
        """Whole devices of the smallest acceptable gang."""
        own = self.nodes * self.devices + self.last_node_devices
        return own + sum([role.gpus for role in self.others]) if self.others else own

    @property
    def devices_only(self) -> bool:
        """Whether counts of whole devices alone decide: no shares, CPUs, memory, extras or topology requested."""
        return not (self.share_milli or self.asks_host or self.within >= 0 or self.slice_nodes or self.excluded)


def need_of_places(needs: Iterable[Need], places: Places, kind: Sequence[int], share_milli: int = 0) -> Need | None:
    """The need that these places satisfy, an elastic one with its actual width; None if none does, e.g. after a change of the fleet.

    Args:
        needs: in order of preference.
        places: not empty.
        kind: pool of each node number.
        share_milli: thousandths of a device that each part holds, instead of whole devices.
    """
    for need in needs:
        parts = need.parts
        if need.others:
            continue  # its places belong to roles, which only the attempt knows: see `need_of_attempt`
        serves = (
            parts <= len(places) <= max(parts, need.nodes_max)
            and max((count for _, count in places), default=-1) == need.devices
            and need.share_milli == share_milli
        )
        if serves and kind[places[0][0]] in need.kinds:
            return replace(need, nodes=len(places)) if need.nodes_max else need
    return None


def need_of_attempt(attempt: Attempt, kinds: Collection[int], known: Container[NodeId]) -> Need:
    """The resources of an attempt as a need on nodes of the `kinds` where it runs; for a job whose request no longer has a shape on this fleet.

    Of a gang with several roles, only the grants on `known` nodes count, which have places.
    """
    allocation = attempt.allocation
    if not allocation.grants[-1].role:
        return _need_of_grants(allocation.grants, kinds, allocation.licences)
    roles: dict[int, list[NodeGrant]] = {}
    for grant in allocation.grants:
        if grant.node_id in known:
            roles.setdefault(grant.role, []).append(grant)
    first, *others = [_need_of_grants(grants, kinds) for grants in roles.values()] or [Need(0, 0)]
    return replace(first, others=tuple(others), licences=allocation.licences)


def _need_of_grants(grants: Sequence[NodeGrant], kinds: Collection[int], licences: Extras = ()) -> Need:
    share = grants[0].share
    return Need(
        nodes=len(grants),
        kinds=tuple(sorted(kinds)) or (0,),
        devices=max(grant.whole_devices for grant in grants),
        share_milli=0 if share is None else share.milli,
        share_group="" if share is None else share.group,
        mig_profile=share.slices[0].profile if share is not None and share.slices else "",
        mig_slices=len(share.slices) if share is not None else 0,
        cpus=grants[0].cpus,
        memory_bytes=grants[0].memory_bytes,
        extras=grants[0].extras,
        licences=licences,
    )
