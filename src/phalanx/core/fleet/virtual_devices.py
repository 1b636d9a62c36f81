"""The virtual devices of one node as text: `4`, `h100:4` for devices that stand in for a GPU model, `h100:4+mig` with MIG on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

MODEL_PREFIX: Final = "virtual "
"""Begins the model of a virtual device that stands in for a GPU, as in "virtual h100-80gb": requests for `h100` match it."""
VIRTUAL_CPUS_VARIABLE: Final = "PHALANX_VIRTUAL_CPUS"
VIRTUAL_MEMORY_VARIABLE: Final = "PHALANX_VIRTUAL_MEMORY"
"""Set for `phalanx up`: the CPUs and the memory that each virtual node claims to have, by default this machine's."""
VIRTUAL_CPUS_MAX: Final = 4096
_TEXT: Final = re.compile(r"(?:([a-z0-9][a-z0-9.-]{0,39}):)?([0-9]{1,6})(\+mig)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualDevices:
    """`model`: the GPU that they stand in for, "" for none; `mig`: they can be divided into slices."""

    count: int
    model: str = ""
    mig: bool = False

    def __str__(self) -> str:
        return (f"{self.model}:" if self.model else "") + str(self.count) + ("+mig" if self.mig else "")


def parse_virtual_devices(text: str) -> VirtualDevices:
    """Parse the text. Whether the model exists is for the caller to check.

    Raises:
        BadRequest: not of that form, or MIG without a model.
    """
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise BadRequest(f"{text!r} is not [MODEL:]DEVICES[+mig]", hint="write 4, h100:4 or h100:4+mig")
    if match[3] and not match[1]:
        raise BadRequest(f"{text!r} has MIG, but no model to divide", hint=f"write h100:{match[2]}+mig")
    return VirtualDevices(count=int(match[2]), model=match[1] or "", mig=bool(match[3]))
