"""One accelerator of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator by index and UUID. `virtual` devices are slots without silicon: their ranks run on the CPU.

    Attributes:
        nvlinks: live NVLinks to each device of the node by index, 0 to itself; behind a switch all of its own to each. Empty without any.
        pci_bus: "" where nobody says.
        pcie: generation and lanes, as "gen5 x16"; "gen5 x8 of x16" where fewer lanes work than could.
        numa: the memory node that it is attached to; None where there is but one, or nobody says.
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
