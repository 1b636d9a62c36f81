"""A fleet summary that counts equal nodes together: 12,500 nodes are a handful of kinds. Shapes are computed on it, not on nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.mig import MigProfile
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.resources import NO_RESOURCES, Extras, Resources

SlicesOf = Callable[[tuple[MigProfile, ...]], int]
"""How many MIG slices of a request's kind an empty device with these profiles has room for."""
_KINDS_KEPT: Final = 100_000  # nodes, of which some are gone: 8 fleets of 12,500
_MEMORY_GRANTED: Final = 0.95  # vendors' "80 GB" cards report a little less than 80 GiB


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """The properties by which two nodes are equal for a shape.

    Attributes:
        devices: (model, memory in bytes, number of healthy ones that are granted as a whole), sorted.
        mig: (model, memory in bytes, number of healthy ones, profiles) of devices that MIG can divide, sorted. Without profiles where MIG mode is off.
        closed: (model, memory in bytes, why no slices can be made) of devices with MIG mode on, sorted.
        site: as in `Node`.
    """

    cpus: int
    memory_bytes: int
    devices: tuple[tuple[str, int, int], ...]
    mig: tuple[tuple[str, int, int, tuple[MigProfile, ...]], ...] = ()
    closed: tuple[tuple[str, int, str], ...] = ()
    extras: Extras = ()
    site: str = ""

    @property
    def host(self) -> Resources:
        """What such a node has besides devices."""
        return Resources(0, self.cpus, self.memory_bytes, self.extras)

    def count(
        self, model: str | None, device_memory_bytes: int, *, exact: bool = False, slices_of: SlicesOf | None = None
    ) -> int:
        """Number of healthy devices that match; with `slices_of`, of MIG slices on them."""
        if slices_of is not None:
            return sum(
                healthy * slices_of(profiles)
                for have, memory_bytes, healthy, profiles in self.mig
                if profiles and model_fits(have, memory_bytes, model, device_memory_bytes, exact=exact)
            )
        return sum(
            healthy
            for have, memory_bytes, healthy in self.devices
            if healthy and model_fits(have, memory_bytes, model, device_memory_bytes, exact=exact)
        )


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Kinds of nodes with their counts, sorted by kind so that equal fleets are equal values."""

    kinds: tuple[tuple[NodeKind, int], ...]

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        return sum(count for _, count in self.kinds)

    @property
    def by_site(self) -> tuple[FleetSummary, ...]:
        """The summary of each site, by name; of a fleet at one site, the summary itself."""
        sites = sorted({kind.site for kind, _ in self.kinds})
        if len(sites) < 2:
            return (self,)
        return tuple(FleetSummary(tuple([one for one in self.kinds if one[0].site == site])) for site in sites)

    @property
    def models(self) -> tuple[str, ...]:
        """Models of all devices, unhealthy ones included, by name."""
        return tuple(sorted({model for kind, _ in self.kinds for model, _, _ in kind.devices}))

    def models_like(
        self, model: str | None, device_memory_bytes: int, slices_of: SlicesOf | None = None
    ) -> tuple[str, ...]:
        """Models with a matching healthy device, by name; with `slices_of`, those with MIG slices."""
        if slices_of is not None:
            found = self.mig_like(model, device_memory_bytes)
            return tuple(sorted({have for have, profiles in found if slices_of(profiles)}))
        return tuple(
            sorted(
                {
                    have
                    for kind, _ in self.kinds
                    for have, memory_bytes, healthy in kind.devices
                    if healthy and model_fits(have, memory_bytes, model, device_memory_bytes)
                }
            )
        )

    def mig_like(
        self, model: str | None, device_memory_bytes: int, *, exact: bool = False
    ) -> tuple[tuple[str, tuple[MigProfile, ...]], ...]:
        """Model and profiles of each kind of matching healthy device that MIG can divide; without profiles where MIG mode is off."""
        return tuple(
            sorted(
                {
                    (have, profiles)
                    for kind, _ in self.kinds
                    for have, memory_bytes, healthy, profiles in kind.mig
                    if healthy and model_fits(have, memory_bytes, model, device_memory_bytes, exact=exact)
                }
            )
        )

    def closed_like(self, model: str | None, device_memory_bytes: int) -> tuple[str, ...]:
        """Why matching devices with MIG mode on give no slices; empty if none is like that."""
        reasons = [
            why
            for kind, _ in self.kinds
            for have, memory_bytes, why in kind.closed
            if model_fits(have, memory_bytes, model, device_memory_bytes)
        ]
        return tuple(dict.fromkeys(reasons))

    def sizes(
        self,
        model: str | None,
        device_memory_bytes: int,
        *,
        exact: bool = False,
        host: Resources = NO_RESOURCES,
        slices_of: SlicesOf | None = None,
    ) -> dict[int, int]:
        """Number of nodes with enough CPUs, memory and extras, by their number of matching devices (or slices): `{8: 10_000, 4: 12, 0: 1}`."""
        found: Counter[int] = Counter()
        for kind, nodes in self.kinds:
            if host.fits(kind.host):
                found[kind.count(model, device_memory_bytes, exact=exact, slices_of=slices_of)] += nodes
        return dict(found)


def summary_of(nodes: Iterable[Node]) -> FleetSummary:
    """Summarise the fleet. Linear in its devices: call it once for each change of the fleet, never for each request."""
    return summary_from_counts(Counter(node_kind(node) for node in nodes))


def summary_from_counts(kinds: Counter[NodeKind]) -> FleetSummary:
    """The summary of nodes that the caller has already counted by kind."""
    return FleetSummary(tuple(sorted((kind, count) for kind, count in kinds.items() if count > 0)))


class NodeCapacityKind(NamedTuple):
    """What is counted of a node: its kind, its devices, and how many of them are broken."""

    kind: NodeKind
    devices: int
    broken: int


class NodeKinds:
    """The kind of each node, computed once for each version of its record. Safe for several threads: a race only repeats work.

    Equal facts are one object, so that nodes are counted by the address of their facts: the hash of a kind takes longer than all else.
    """

    __slots__ = ("_facts", "_known")

    def __init__(self) -> None:
        self._known: dict[NodeId, tuple[Node, NodeCapacityKind]] = {}
        self._facts: dict[NodeCapacityKind, NodeCapacityKind] = {}

    def kind_of(self, node: Node) -> NodeKind:
        """The kind of a node."""
        return self._facts_of(node).kind

    def count_kinds(self, nodes: Iterable[Node]) -> Counter[NodeKind]:
        """Count the nodes by kind. Linear in them."""
        return kinds_of_facts(self.count(nodes))

    def count(self, nodes: Iterable[Node]) -> Counter[NodeCapacityKind]:
        """Count the nodes by their facts. Linear in them."""
        known = self._known.get
        facts = [
            found[1] if (found := known(node.id)) is not None and found[0] is node else self._facts_of(node)
            for node in nodes
        ]
        by_address = {id(one): one for one in facts}
        counts: Counter[NodeCapacityKind] = Counter()
        for address, number in Counter(map(id, facts)).items():
            counts[by_address[address]] += number
        return counts

    def _facts_of(self, node: Node) -> NodeCapacityKind:
        known = self._known.get(node.id)
        if known is None or known[0] is not node:
            if len(self._known) >= _KINDS_KEPT:
                self._known.clear()
                self._facts.clear()
            broken = sum(not device.healthy for device in node.devices)
            facts = NodeCapacityKind(node_kind(node), len(node.devices), broken)
            known = self._known[node.id] = (node, self._facts.setdefault(facts, facts))
        return known[1]


def kinds_of_facts(counts: Mapping[NodeCapacityKind, int]) -> Counter[NodeKind]:
    """Counts by kind, of counts by facts."""
    kinds: Counter[NodeKind] = Counter()
    for facts, number in counts.items():
        kinds[facts.kind] += number
    return kinds


def node_kind(node: Node) -> NodeKind:
    """The kind of a node."""
    found: dict[tuple[str, int], int] = {}
    divisible: dict[tuple[str, int, tuple[MigProfile, ...]], int] = {}
    for device in node.devices:
        key = (device.model, device.memory_bytes)
        found[key] = found.get(key, 0) + (device.healthy and not device.divided)
        mig = device.mig
        if mig is not None and (mig.grantable or not mig.on):
            profiles = mig.profiles if mig.on else ()
            divisible[*key, profiles] = divisible.get((*key, profiles), 0) + device.healthy
    devices = tuple(sorted((model, memory_bytes, count) for (model, memory_bytes), count in found.items()))
    mig_devices = tuple(sorted((*kind[:2], count, kind[2]) for kind, count in divisible.items()))
    closed = {
        (device.model, device.memory_bytes, device.mig.closed_reason or "its profiles are not known")
        for device in node.devices
        if device.mig is not None and device.mig.on and not device.mig.grantable
    }
    return NodeKind(node.cpus, node.memory_bytes, devices, mig_devices, tuple(sorted(closed)), node.extras, node.site)


def device_fits(device: Device, model: str | None, device_memory_bytes: int, *, exact: bool = False) -> bool:
    """Whether a device is healthy, large enough and of the model wanted ("h100" also matches "NVIDIA H100 80GB HBM3"), whatever its MIG mode.

    With `exact`, the model must equal the fleet's own name.
    """
    return device.healthy and model_fits(device.model, device.memory_bytes, model, device_memory_bytes, exact=exact)


def model_fits(
    have: str, have_memory_bytes: int, model: str | None, device_memory_bytes: int, *, exact: bool = False
) -> bool:
    """The same for a model and a memory size."""
    if have_memory_bytes < _MEMORY_GRANTED * device_memory_bytes:
        return False
    if model is None or exact:
        return model in (None, have)
    words, wanted = _words(have), _words(model)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def _words(model: str) -> list[str]:
    return model.lower().replace("-", " ").replace("_", " ").split()
