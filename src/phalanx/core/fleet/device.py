"""One accelerator of a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.core.fleet.mig import DeviceMig


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator by index and UUID. `virtual` devices are slots without a GPU: their ranks run on the CPU.

    Attributes:
        nvlinks: live NVLinks to each device of the node by index, 0 to itself; behind a switch, all of the device's links to each
            peer. Empty without NVLink.
        pci_bus: "" if unknown.
        pcie: generation and lanes, as "gen5 x16"; "gen5 x8 of x16" if fewer lanes work than the device supports.
        numa: its NUMA node; None on a server with only one, or if unknown.
        mig: how it can be divided into slices; None if it cannot.
    """

    index: int
    uuid: str
    model: str
    memory_bytes: int
    virtual: bool = False
    healthy: bool = True
    nvlinks: tuple[int, ...] = ()
    pci_bus: str = ""
    pcie: str = ""
    numa: int | None = None
    mig: DeviceMig | None = None

    @property
    def divided(self) -> bool:
        """Whether MIG mode is on: the device is granted in slices, never as a whole."""
        return self.mig is not None and self.mig.on


def device_facts(devices: Iterable[Device], pool: str = "") -> dict[str, str | int | float | None]:
    """What a history line says of a node's devices, so that its bill follows from the history alone: the pool, and devices by model."""
    facts: dict[str, str | int | float | None] = {"pool": pool}
    for device in devices:
        count = facts.get(f"gpus {device.model}", 0)
        facts[f"gpus {device.model}"] = (count if isinstance(count, int) else 0) + 1
    return facts
