"""MIG (Multi-Instance GPU) of one device: which slices it can be divided into, where they can lie, and which exist.

A slice is a GPU instance with one compute instance over all of it: a part of the GPU with its own processors and memory, which a process
uses like a GPU of its own. The GPU's memory is divided into memory slices, 8 on most models. An instance occupies neighbouring memory
slices from one of the starts that its profile allows. Two instances never share a memory slice; this also divides the processors.
Source: NVIDIA Multi-Instance GPU User Guide, r580, "Concepts" and "Supported MIG Profiles", read November 2026.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MEMORY_SLICES_MAX: Final = 8  # of a device; GPUs have 8, 4 or 2. The states of a device double with each
PROFILES_MAX: Final = 32  # of a device; an RTX PRO 6000 has 11


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MigProfile:
    """A kind of slice that a GPU model can be divided into.

    Attributes:
        name: as NVIDIA writes it: "1g.10gb", "1g.10gb+me" with media extensions.
        id: of the GPU instance profile, as `nvidia-smi mig -lgip` shows it and the driver takes it.
        compute_slices: of the processors, of 7 on most models.
        memory_slices: that an instance occupies.
        memory_bytes: that its processes can use.
        starts: memory slices at which an instance can begin, ascending.
        max_instances: at most so many at once on an empty device.
    """

    name: str
    id: int
    compute_slices: int
    memory_slices: int
    memory_bytes: int
    starts: tuple[int, ...]
    max_instances: int

    @property
    def has_media(self) -> bool:
        """Whether an instance takes the device's media extension, of which it has one."""
        return has_media(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A slice that exists.

    Attributes:
        profile: name; "" if the device has no such profile any more.
        start: the first of the memory slices that it occupies.
        memory_slices: that it occupies.
        uuid: the name that a process selects it by ("MIG-..."); "" if it has no compute instance.
    """

    profile: str
    start: int
    memory_slices: int
    uuid: str = ""


class PlacementSource(enum.StrEnum):
    """Where the starts of a device's profiles come from: its driver, or the shipped table of its model."""

    DRIVER = "driver"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMig:
    """The MIG side of a device that supports it, as its supervisor found it at start.

    Attributes:
        on: MIG mode is on. Only an operator switches it, while the GPU is idle.
        profiles: what it can be divided into; those whose starts are unknown are left out. A node registers them only where MIG mode is on.
        source: of the starts.
        slices: that exist and do not belong to this supervisor.
        closed_reason: why the supervisor can make no slices here, for messages; "" if it can as far as it knows.
    """

    on: bool
    profiles: tuple[MigProfile, ...] = ()
    source: PlacementSource = PlacementSource.DRIVER
    slices: tuple[MigSlice, ...] = ()
    closed_reason: str = ""

    @property
    def grantable(self) -> bool:
        """Whether the supervisor can make slices here, as far as it knows. Then the device is granted in slices only."""
        return self.on and bool(self.profiles) and not self.closed_reason

    def profile(self, name: str) -> MigProfile | None:
        """The profile with this name."""
        return next((one for one in self.profiles if one.name == name), None)

    def invalid(self) -> str:
        """What is impossible in this record, which a supervisor sent; "" if nothing is."""
        if len(self.profiles) > PROFILES_MAX or len(self.slices) > MEMORY_SLICES_MAX:
            return f"{len(self.profiles)} profiles and {len(self.slices)} slices"
        if len({one.name for one in self.profiles}) < len(self.profiles):
            return "two profiles have the same name"
        if any(one.starts != tuple(sorted(set(one.starts))) for one in self.profiles):
            return "the starts of a profile are not ascending"
        spans = [(one.name, start, one.memory_slices) for one in self.profiles for start in one.starts]
        spans += [(one.profile, one.start, one.memory_slices) for one in self.slices]
        return next(
            (
                f"{name} on memory slices {start} to {start + size - 1}"
                for name, start, size in spans
                if start < 0 or size < 1 or start + size > MEMORY_SLICES_MAX
            ),
            "",
        )


def has_media(profile: str) -> bool:
    """Whether an instance of the profile takes the media extension of its device."""
    return "+me" in profile


def slice_bits(start: int, memory_slices: int, profile: str = "") -> int:
    """What an instance occupies of its device, as a bitset: its memory slices, and bit `MEMORY_SLICES_MAX` for the media extension."""
    return ((1 << memory_slices) - 1) << start | (has_media(profile) << MEMORY_SLICES_MAX)


def occupied_bits(slices: Iterable[MigSlice]) -> int:
    """What these instances occupy together, as `slice_bits` has it."""
    found = 0
    for one in slices:
        found |= slice_bits(one.start, one.memory_slices, one.profile)
    return found


def device_memory_slices(profiles: Iterable[MigProfile]) -> int:
    """The memory slices that a device with these profiles has: the end of the farthest instance."""
    return max((one.starts[-1] + one.memory_slices for one in profiles if one.starts), default=1)
