"""One accelerator of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator by index and UUID. `virtual` devices are slots without silicon: their ranks run on the CPU."""

    index: int
    uuid: str
    model: str
    memory_bytes: int
    virtual: bool = False
    healthy: bool = True
