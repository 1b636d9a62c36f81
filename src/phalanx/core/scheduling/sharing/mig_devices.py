"""Devices of a pool that are divided by MIG: which nodes have room for slices, and where each slice goes.

Every device here has MIG mode on, so none is granted as a whole. A node's slices of one job may lie on several of its devices.
`mig_placement` chooses the position of each slice; of the nodes, those where the most stays possible come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.core.fleet.mig import DeviceMig
from phalanx.core.scheduling.sharing.mig_placement import MigGeometry, MigState, mig_geometry, place_slice

_LAYOUTS_MAX: Final = 65_536  # distinct states of nodes whose best layout is kept; about a hundred bytes each
_REQUESTS_MAX: Final = 64  # kept: a model has at most 11 profiles, mostly asked for one by one
_ROUNDED: Final = 6  # digits of a loss, so that equal ones are equal


class SliceRequest(NamedTuple):
    """Slices of one profile on a node."""

    profile: str
    slices: int


@dataclass(frozen=True, slots=True)
class DivisibleDevice:
    """A device with MIG mode on: its index on the node, what it can be divided into, and what others occupy."""

    index: int
    mig: DeviceMig

    @property
    def geometry(self) -> MigGeometry:
        """What fits together on it."""
        return mig_geometry(self.mig.profiles)


SlicePositions = tuple[tuple[int, str, int], ...]
"""MIG slices of a job that already runs: device index on the node, profile and start of each."""


class HeldSlice(NamedTuple):
    """A slice of one device of a node: where the device is among those of the node, and where the slice begins."""

    place: int
    profile: str
    start: int


@dataclass(slots=True, eq=False)
class HeldSlices:
    """The slices that a job holds on one node.

    Attributes:
        slices: by local rank.
        taken: they are counted as taken now; not while a trial has freed them.
    """

    slices: tuple[HeldSlice, ...]
    taken: bool = False


class _Layout(NamedTuple):
    """Where slices go on a node in some state, and the openness that they cost."""

    loss: float
    slices: tuple[HeldSlice, ...]


class MigDeviceIndex:
    """The divisible devices of one pool and what is taken of them.

    Attributes:
        devices: of each node that has some, as its supervisor reported them.
    """

    __slots__ = ("_best", "_geometries", "_layouts", "_states", "devices")

    def __init__(self, devices: Mapping[int, Sequence[DivisibleDevice]]) -> None:
        self.devices = {node: tuple(own) for node, own in devices.items()}
        self._geometries = {node: tuple(one.geometry for one in own) for node, own in self.devices.items()}
        self._states = {
            node: tuple(one.geometry.state(one.mig.slices) for one in own) for node, own in self.devices.items()
        }
        self._layouts: dict[tuple[object, ...], _Layout | None] = {}
        self._best: dict[SliceRequest, _NodesByLoss] = {}

    def room(self, node: int, profile: str) -> int:
        """How many more slices of the profile fit on the node at once."""
        return sum(
            geometry.room(profile, state)
            for geometry, state in zip(self._geometries.get(node, ()), self._states.get(node, ()), strict=True)
        )

    def room_when_empty(self, node: int, profile: str) -> int:
        """How many would fit if no job had a slice."""
        own = zip(self._geometries.get(node, ()), self.devices.get(node, ()), strict=True)
        return sum(geometry.room(profile, geometry.state(one.mig.slices)) for geometry, one in own)

    def nodes_with_room(self, request: SliceRequest) -> Iterator[int]:
        """Disjoint bitsets of the nodes that have room for the slices, the least loss first."""
        best = self._best.get(request)
        if best is None:
            if len(self._best) >= _REQUESTS_MAX:
                self._best.clear()
            best = self._best[request] = _NodesByLoss(set(self.devices))
        for node in best.outdated:
            layout = self._layout(node, request)
            best.set(node, None if layout is None else layout.loss)
        best.outdated.clear()
        for loss in sorted(best.nodes_by_loss):
            yield best.nodes_by_loss[loss]

    def choose(self, node: int, request: SliceRequest) -> HeldSlices:
        """Where the slices go on this node, which has room."""
        layout = self._layout(node, request)
        assert layout is not None, (node, request)
        return HeldSlices(layout.slices)

    def at(self, node: int, positions: SlicePositions) -> HeldSlices:
        """The slices of a job that already runs. Those on devices that are gone are left out."""
        places = {one.index: place for place, one in enumerate(self.devices.get(node, ()))}
        return HeldSlices(
            tuple(HeldSlice(places[index], profile, start) for index, profile, start in positions if index in places)
        )

    def is_free(self, node: int, held: HeldSlices) -> bool:
        """Whether the places of these slices are free."""
        states = self._states.get(node, ())
        return all(
            one.start in self._geometries[node][one.place].starts(one.profile, states[one.place]) for one in held.slices
        )

    def hold(self, node: int, held: HeldSlices) -> None:
        """Count the slices as taken."""
        self._change(node, held, taken=True)

    def release(self, node: int, held: HeldSlices) -> None:
        """Count them as free again."""
        self._change(node, held, taken=False)

    def _change(self, node: int, held: HeldSlices, *, taken: bool) -> None:
        assert held.taken is not taken, held
        held.taken = taken
        if node not in self.devices:
            return  # all its divided devices are gone or unhealthy
        states = list(self._states.get(node, ()))
        for one in held.slices:
            geometry, state = self._geometries[node][one.place], states[one.place]
            if one.profile not in geometry.profiles:
                continue  # the device could be divided otherwise before its supervisor started again
            change = geometry.with_instance if taken else geometry.without_instance
            states[one.place] = change(one.profile, one.start, state)
        self._states[node] = tuple(states)
        for best in self._best.values():
            best.outdated.add(node)

    def _layout(self, node: int, request: SliceRequest) -> _Layout | None:
        geometries, states = self._geometries[node], self._states[node]
        key = (request, states, *(id(one) for one in geometries))
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            self._layouts[key] = _lay_out(request, geometries, states)
        return self._layouts[key]


class _NodesByLoss:
    """The nodes with room for one request, in bitsets by what the slices cost there."""

    __slots__ = ("_loss_of", "nodes_by_loss", "outdated")

    def __init__(self, nodes: set[int]) -> None:
        self.outdated = nodes
        self.nodes_by_loss: dict[float, int] = {}
        self._loss_of: dict[int, float] = {}

    def set(self, node: int, loss: float | None) -> None:
        """Record the cost on this node; None for no room."""
        before = self._loss_of.pop(node, None)
        if before is not None:
            self.nodes_by_loss[before] ^= 1 << node
            if not self.nodes_by_loss[before]:
                del self.nodes_by_loss[before]
        if loss is not None:
            self._loss_of[node] = loss
            self.nodes_by_loss[loss] = self.nodes_by_loss.get(loss, 0) | 1 << node


def _lay_out(request: SliceRequest, geometries: Sequence[MigGeometry], states: Sequence[MigState]) -> _Layout | None:
    """Place the slices one after the other, each at its best position. In the shipped tables the starts of a profile do not overlap, so this
    finds room for all of them if there is some.
    """
    now = list(states)
    held: list[HeldSlice] = []
    before = sum(geometry.openness(state) ** 2 for geometry, state in zip(geometries, now, strict=True))
    for _ in range(request.slices):
        found = place_slice(request.profile, list(zip(geometries, now, strict=True)))
        if found is None:
            return None
        held.append(HeldSlice(found.device, request.profile, found.start))
        now[found.device] = geometries[found.device].with_instance(request.profile, found.start, now[found.device])
    after = sum(geometry.openness(state) ** 2 for geometry, state in zip(geometries, now, strict=True))
    return _Layout(round(before - after, _ROUNDED), tuple(held))
