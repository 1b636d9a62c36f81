"""The devices of this node and their load: the records that probes return, and the facts of the node itself.

`nvml` reads real GPUs, `virtual` replaces them where there are none; both are a DeviceProbe.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.node.logic.utf8 import replace_invalid_utf8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The properties of one device.

    Attributes:
        nvlink_peers: UUIDs of devices on this node with a live NVLink to it, sorted.
        nvlinks: number of links to each of them, in that order; behind a switch the device's link count for each.
        pcie: generation and lanes, as "gen5 x16", or "gen5 x8 of x16" where fewer lanes work than could.
        cuda_number: CUDA's number of it in the order of the PCI bus; None where that is not certain.
    """

    index: int
    uuid: str
    model: str
    memory_bytes: int
    pci_bus: str
    nvlink_peers: tuple[str, ...] = ()
    nvlinks: tuple[int, ...] = ()
    pcie: str = ""
    cuda_number: int | None = None
    virtual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """One device at one moment. Values that the device does not report are None.

    Attributes:
        index: as in DeviceFacts.
        uuid: as in DeviceFacts.
        utilization: 0 to 1, by the counter named.
        counter: "gpm_sm" (share of SM-cycles with work), "nvml_gpu" (share of time with any kernel), "rank_cpu" (CPU of the ranks over one core).
        memory_used_bytes: by all processes; on a virtual device the resident memory of its ranks.
        memory_total_bytes: of the device.
        power_w: drawn now.
        temperature_c: of the chip.
        throttle: why the clocks are held down, by name, sorted; idleness is not included. None where the driver does not say.
        virtual: True on a virtual device.
        xids: XID errors since the previous sample, in order.
        ecc_uncorrected: uncorrectable memory errors since the driver was loaded.
        process_bytes: device memory of each process, by pid; empty where the driver does not say.
        energy_mj: millijoules that the device's own counter has counted since the driver was loaded.
        processes: number of processes on it, on a virtual device of those of its ranks; None where the driver does not say.
    """

    index: int
    uuid: str
    utilization: float | None
    counter: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None
    virtual: bool = False
    xids: tuple[int, ...] = ()
    ecc_uncorrected: int | None = None
    process_bytes: Mapping[int, int] = field(default_factory=dict)
    processes: int | None = None
    energy_mj: int | None = None


class DeviceProbe(Protocol):
    """Reads the devices of a node. Calls come from one thread."""

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The inventory, by index."""
        ...

    def sample(self) -> tuple[DeviceReading, ...]:
        """Current samples of all devices, by index; without devices that fell off the bus."""
        ...

    def close(self) -> None:
        """Release the probe's resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The node itself. `cpus` are those this process may use; `boot_id` changes with every boot."""

    hostname: str
    boot_id: str
    cpus: int
    memory_bytes: int
    disk_free_bytes: int


def node_facts(path: str) -> NodeFacts:
    """The facts of this node, with the free disk under `path`.

    Raises:
        OSError: the path or /proc does not exist.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        boot = boot_id.read().strip()
    disk = os.statvfs(path)
    return NodeFacts(
        hostname=replace_invalid_utf8(socket.gethostname()),
        boot_id=boot,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
    )
