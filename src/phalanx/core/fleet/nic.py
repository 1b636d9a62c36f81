"""One network port of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A port by the kernel's name: "eth0", or "mlx5_0/1" for port 1 of an InfiniBand adapter.

    Attributes:
        kind: "ethernet" or "infiniband".
        up: it has a carrier, or the fabric reports it active.
        bits_per_s: the negotiated rate; None if the port does not report it, as virtual ports do not.
        numa: its NUMA node; None on a server with only one, or if unknown.
        pci_bus: "" for a port without hardware.
    """

    name: str
    kind: str
    up: bool
    bits_per_s: int | None = None
    numa: int | None = None
    pci_bus: str = ""
