"""The node's network ports and PCI attachments from /sys. Read once, when the supervisor starts (`host_load` reads their counters).

Sources: Documentation/ABI/testing/sysfs-class-net, sysfs-class-infiniband and sysfs-bus-pci of the Linux kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from phalanx.core.fleet.nic import Nic
from phalanx.node.logic.utf8 import replace_invalid_utf8

_SYS: Final = "/sys"
_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec")  # "200 Gb/sec (4X HDR)"
_ACTIVE: Final = "4: ACTIVE"
_ETHERNET: Final = "1"  # ARPHRD_ETHER; IP over InfiniBand is 32, and reported by its adapter


def nics(root: str = _SYS) -> tuple[Nic, ...]:
    """Ports by name: those with hardware; if there are none (a container, the lab), all except loopback."""
    network = os.path.join(root, "class", "net")
    found = [_port(network, name) for name in ethernet_ports(root)]
    return tuple(sorted([*found, *_adapters(os.path.join(root, "class", "infiniband"))], key=lambda nic: nic.name))


def ethernet_ports(root: str = _SYS) -> list[str]:
    """The names of the Ethernet ports with hardware; if there are none, of all except loopback."""
    network = os.path.join(root, "class", "net")
    names = [name for name in _listed(network) if _text(network, name, "type") == _ETHERNET]
    real = [name for name in names if os.path.exists(os.path.join(network, name, "device"))]
    return [name for name in real or names if name != "lo"]


def numa_of(pci_bus: str, root: str = _SYS) -> int | None:
    """The NUMA node of a PCI device, whose domain may have four or eight digits; None if the kernel reports none (-1)."""
    domain, _, rest = pci_bus.lower().partition(":")
    if not rest:
        return None
    try:
        bus = f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return None
    return _number(_text(root, "bus", "pci", "devices", bus, "numa_node"))


def _port(network: str, name: str) -> Nic:
    speed = _number(_text(network, name, "speed"))  # Mbit/s; -1 or an error where there is no link
    numa, pci_bus = _attached(os.path.join(network, name, "device"))
    return Nic(
        name=replace_invalid_utf8(name),
        kind="ethernet",
        up=_text(network, name, "operstate") == "up",
        bits_per_s=speed * 1_000_000 if speed else None,
        numa=numa,
        pci_bus=pci_bus,
    )


def _adapters(folder: str) -> Iterator[Nic]:
    for adapter in _listed(folder):
        numa, pci_bus = _attached(os.path.join(folder, adapter, "device"))
        for port in _listed(os.path.join(folder, adapter, "ports")):
            place = (folder, adapter, "ports", port)
            if _text(*place, "link_layer") != "InfiniBand":  # RoCE: its Ethernet port is listed already
                continue
            rate = _RATE.match(_text(*place, "rate"))
            yield Nic(
                name=f"{adapter}/{port}",
                kind="infiniband",
                up=_text(*place, "state") == _ACTIVE,
                bits_per_s=round(float(rate[1]) * 1e9) if rate else None,
                numa=numa,
                pci_bus=pci_bus,
            )


def _attached(device: str) -> tuple[int | None, str]:
    """NUMA node and PCI bus of the device behind a port; a virtual port has none."""
    if not os.path.exists(device):
        return None, ""
    return _number(_text(device, "numa_node")), os.path.basename(os.path.realpath(device))


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(*parts: str) -> str:
    """A file's single line; empty if it is missing or unreadable (EINVAL for the speed of a port that is down)."""
    try:
        with open(os.path.join(*parts), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
