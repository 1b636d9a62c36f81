"""Shares of a device: amounts in thousandths, and how jobs share one device.

A device's shares sum to at most 1,000 thousandths. Amounts of GPUs that are added, compared with limits or billed are integers in
thousandths ("milli"), so that they sum exactly; a whole device is 1,000.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.core.resources import MILLI_PER_DEVICE

__all__ = ["MILLI_PER_DEVICE", "DeviceShare", "ShareKind", "gpus_of", "gpus_text"]


class ShareKind(enum.StrEnum):
    """How jobs share a device.

    MPS: their kernels run at the same time, each with a limit on memory and on the processors it may use. Faults are not isolated: a job
    that crashes the device takes its neighbours with it. TIME: they take turns, without any limit.
    """

    MPS = "mps"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """A job's part of one device of a node.

    Attributes:
        milli: thousandths of the device.
        memory_bytes: device memory that belongs to the part.
        kind: how the device is shared.
        group: only shares of one group lie on one device: its kind and the project.
    """

    milli: int
    memory_bytes: int
    kind: ShareKind
    group: str


def gpus_text(milli: int) -> str:
    """Thousandths as a number of GPUs: "8", "0.25"."""
    return f"{milli / MILLI_PER_DEVICE:.10g}"


def gpus_of(milli: int) -> int | float:
    """Thousandths as a number of GPUs, an integer for whole devices."""
    whole, rest = divmod(milli, MILLI_PER_DEVICE)
    return milli / MILLI_PER_DEVICE if rest else whole
