"""Chooses where a MIG slice is made: the device, and the memory slice at which it begins.

Instances cannot be moved while they are used. So each one is placed where the most stays possible. The openness of a device counts this:
the expected number of further requests that fit, one after the other and each placed best, until the first that does not. Requests are
drawn from the mix of profiles that is asked for. A device has a few hundred states, so openness is computed over all of them once.

Pure. Called by the scheduler and the listing of nodes. Nothing here makes a slice (`node.mig` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from phalanx.core.fleet.mig import MigProfile, MigSlice

_GEOMETRIES_MAX: Final = 64  # kept: a fleet has a few GPU models, each with one mix


class MigState(NamedTuple):
    """What is taken of a device: bit n of `taken` for memory slice n, and whether an instance has the media extension."""

    taken: int
    media: bool


EMPTY: Final = MigState(0, media=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPosition:
    """Where to make a slice: on which device, as a number in the caller's sequence, and from which memory slice."""

    device: int
    start: int


class MigGeometry:
    """What fits together on one GPU model. Immutable but for its memos; get one by `mig_geometry`.

    Attributes:
        profiles: by name.
    """

    __slots__ = ("_best", "_openness", "_weights", "profiles")

    def __init__(self, profiles: Sequence[MigProfile], weights: Mapping[str, float]) -> None:
        self.profiles = {one.name: one for one in profiles}
        total = sum(weights.get(name, 0.0) for name in self.profiles)
        self._weights = [(name, weights[name] / total) for name in self.profiles if weights.get(name, 0.0) > 0.0]
        self._openness: dict[MigState, float] = {}
        self._best: dict[tuple[str, MigState], tuple[float, int] | None] = {}
        self.openness(EMPTY)  # reaches every state

    def state(self, slices: Iterable[MigSlice]) -> MigState:
        """The state of a device with these slices."""
        taken, media = 0, False
        for one in slices:
            taken |= _bits(one.start, one.memory_slices)
            known = self.profiles.get(one.profile)
            media = media or (known is not None and known.has_media)
        return MigState(taken, media)

    def starts(self, name: str, state: MigState) -> tuple[int, ...]:
        """Where an instance of the profile can begin, ascending; empty if it does not fit, or the model has no such profile."""
        profile = self.profiles.get(name)
        if profile is None or (profile.has_media and state.media):
            return ()
        return tuple(start for start in profile.starts if not state.taken & _bits(start, profile.memory_slices))

    def with_instance(self, name: str, start: int, state: MigState) -> MigState:
        """The state after an instance of the profile is made there."""
        profile = self.profiles[name]
        return MigState(state.taken | _bits(start, profile.memory_slices), state.media or profile.has_media)

    def without_instance(self, name: str, start: int, state: MigState) -> MigState:
        """The state after an instance of the profile is removed there."""
        profile = self.profiles[name]
        return MigState(state.taken & ~_bits(start, profile.memory_slices), state.media and not profile.has_media)

    def room(self, name: str, state: MigState) -> int:
        """How many instances of the profile still fit at once."""
        count, end = 0, 0
        for start in self.starts(name, state):
            if start >= end:
                count, end = count + 1, start + self.profiles[name].memory_slices
        return min(count, 1) if count and self.profiles[name].has_media else count

    def openness(self, state: MigState) -> float:
        """The expected number of further requests that fit until the first that does not."""
        found = self._openness.get(state)
        if found is None:
            found = 0.0
            for name, weight in self._weights:
                after = [self.openness(self.with_instance(name, start, state)) for start in self.starts(name, state)]
                if after:
                    found += weight * (1.0 + max(after))
            self._openness[state] = found
        return found

    def best_start(self, name: str, state: MigState) -> tuple[float, int] | None:
        """The least loss of squared openness by an instance of the profile, and its start; the higher of equal ones. None if it does not fit."""
        key = (name, state)
        if key not in self._best:
            before = self.openness(state) ** 2
            losses = [
                (before - self.openness(self.with_instance(name, start, state)) ** 2, -start)
                for start in self.starts(name, state)
            ]
            self._best[key] = (min(losses)[0], -min(losses)[1]) if losses else None
        return self._best[key]


def mig_geometry(profiles: tuple[MigProfile, ...], weights: Mapping[str, float] | None = None) -> MigGeometry:
    """The geometry of a model. The last ones are kept. A new one takes some 10 ms, for the openness of all states.

    Args:
        profiles: of the device.
        weights: how often each profile is asked for, in any unit; unnamed profiles count as never. None: all equally often.
    """
    return _geometry(profiles, None if not weights else tuple(sorted(weights.items())))


@lru_cache(maxsize=_GEOMETRIES_MAX)
def _geometry(profiles: tuple[MigProfile, ...], weights: tuple[tuple[str, float], ...] | None) -> MigGeometry:
    return MigGeometry(
        profiles, dict.fromkeys((one.name for one in profiles), 1.0) if weights is None else dict(weights)
    )


def place_slice(name: str, devices: Sequence[tuple[MigGeometry, MigState]]) -> MigPosition | None:
    """Where an instance of the profile is best made; None if it fits on no device.

    The position that loses the least of the sum of squared openness. The squares let one wide open device count for more than two half
    open ones, so that slices are gathered on the devices that already have some. Ties: the earlier device, then the higher start.
    Less than a microsecond per device.
    """
    best: tuple[float, int, int] | None = None
    for number, (geometry, state) in enumerate(devices):
        found = geometry.best_start(name, state)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, number)
    return None if best is None else MigPosition(device=best[2], start=best[1])


def _bits(start: int, size: int) -> int:
    return ((1 << size) - 1) << start
