"""Shares of a device: amounts in thousandths, and how jobs share one device.

A device's shares sum to at most 1,000 thousandths. Amounts of GPUs that are added, compared with limits or billed are integers in
thousandths ("milli"), so that they sum exactly; a whole device is 1,000.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.mig import slice_bits
from phalanx.core.resources import MILLI_PER_DEVICE

__all__ = ["MIG_GROUP", "MILLI_PER_DEVICE", "DeviceShare", "GrantedSlice", "ShareKind", "gpus_of", "gpus_text"]
MIG_GROUP: Final = "mig"
"""The group of all MIG slices: they isolate, so neighbours may be of any project."""


class ShareKind(enum.StrEnum):
    """How jobs share a device.

    MIG: the device is divided into slices, each with its own processors and memory; jobs of all projects may be neighbours. MPS: their kernels run at the same time, each with a limit on memory and on the processors it may use. Faults are not isolated: a job
    that crashes the device takes its neighbours with it. TIME: they take turns, without any limit.
    """

    MIG = "mig"
    MPS = "mps"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedSlice:
    """A MIG slice that a job is granted: its supervisor makes it there, and removes it when the job has ended.

    Attributes:
        device: index on the node.
        profile: name, such as "1g.10gb".
        start: the first of the memory slices that it occupies.
        memory_slices: that it occupies.
        milli: thousandths of the device, its memory slices.
    """

    device: int
    profile: str
    start: int
    memory_slices: int
    milli: int

    @property
    def bits(self) -> int:
        """What it occupies of its device (`slice_bits`)."""
        return slice_bits(self.start, self.memory_slices, self.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """A job's part of one device of a node, or its MIG slices there.

    Attributes:
        milli: thousandths of the device; of all slices together.
        memory_bytes: device memory that belongs to the part; of slices, to each.
        kind: how the device is shared.
        group: only shares of one group lie on one device: its kind and the project. Slices are one group, whatever the project.
        slices: MIG slices, by local rank; empty for other kinds.
    """

    milli: int
    memory_bytes: int
    kind: ShareKind
    group: str
    slices: tuple[GrantedSlice, ...] = ()

    def milli_on(self, device: int) -> int:
        """Thousandths of the device with this index, which is one of the grant's."""
        return sum(one.milli for one in self.slices if one.device == device) if self.slices else self.milli


def gpus_text(milli: int) -> str:
    """Thousandths as a number of GPUs: "8", "0.25"."""
    return f"{milli / MILLI_PER_DEVICE:.10g}"


def gpus_of(milli: int) -> int | float:
    """Thousandths as a number of GPUs, an integer for whole devices."""
    whole, rest = divmod(milli, MILLI_PER_DEVICE)
    return milli / MILLI_PER_DEVICE if rest else whole
