"""The load of the whole machine: CPU, memory and network, from /proc and /sys. A value that the kernel does not report is None, never 0.

Network bytes are those of all ports with hardware (without them, of all ports except loopback), Ethernet and InfiniBand. An RDMA adapter
counts in words of four bytes, and its Ethernet port does not count what RDMA moves, so nothing is counted twice.
Sources: proc_stat(5), proc_meminfo(5); sysfs-class-net-statistics and sysfs-class-infiniband (port_rcv_data) of the Linux kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from phalanx.node.probes.sysfs import ethernet_ports

_RDMA_WORD_BYTES: Final = 4
_IDLE_COLUMNS: Final = (3, 4)  # idle and iowait in the "cpu" line of /proc/stat
_CPU_COLUMNS: Final = 8  # the guest columns after them are part of user and nice


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Means since the reading before, and the memory now. The first reading has no means."""

    cpu_utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    network_received_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None


class HostLoad:
    """Reads the load of this machine.

    Args:
        clock: seconds that never jump.
        root: replaces "/".
    """

    def __init__(self, clock: Callable[[], float], root: str = "/") -> None:
        self._clock = clock
        self._root = root
        self._at_s: float | None = None
        self._cpu: tuple[int, int] | None = None
        self._network: tuple[int, int] | None = None

    def read(self) -> HostReading:
        """Read all counters, and take the differences to the reading before."""
        now_s, cpu, network = self._clock(), self._cpu_ticks(), self._network_bytes()
        memory = self._memory()
        received = sent = None
        if self._network is not None and network is not None and self._at_s is not None and now_s > self._at_s:
            received = _rate(self._network[0], network[0], now_s - self._at_s)
            sent = _rate(self._network[1], network[1], now_s - self._at_s)
        reading = HostReading(
            cpu_utilization=_busy_share(self._cpu, cpu),
            memory_total_bytes=memory.get("MemTotal"),
            memory_available_bytes=memory.get("MemAvailable"),
            network_received_bytes_per_s=received,
            network_sent_bytes_per_s=sent,
        )
        self._at_s, self._cpu, self._network = now_s, cpu, network
        return reading

    def _cpu_ticks(self) -> tuple[int, int] | None:
        """(busy, all) ticks of all CPUs since boot."""
        name, *columns = _text(self._root, "proc/stat").partition("\n")[0].split()[: 1 + _CPU_COLUMNS] or [""]
        if name != "cpu" or len(columns) <= max(_IDLE_COLUMNS) or not all(map(str.isdecimal, columns)):
            return None
        ticks = [int(column) for column in columns]
        return sum(ticks) - sum(ticks[index] for index in _IDLE_COLUMNS), sum(ticks)

    def _memory(self) -> dict[str, int]:
        found = {}
        for line in _text(self._root, "proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            number = value.split()[:1]
            if number and number[0].isdecimal():
                found[name] = int(number[0]) * 1024
        return found

    def _network_bytes(self) -> tuple[int, int] | None:
        """(received, sent) bytes of all ports; None if no port counts."""
        received: list[int | None] = []
        sent: list[int | None] = []
        for port in ethernet_ports(os.path.join(self._root, "sys")):
            counters = os.path.join("sys/class/net", port, "statistics")
            received.append(self._count(counters, "rx_bytes"))
            sent.append(self._count(counters, "tx_bytes"))
        adapters = os.path.join(self._root, "sys/class/infiniband")
        for adapter in _listed(adapters):
            for port in _listed(os.path.join(adapters, adapter, "ports")):
                counters = os.path.join("sys/class/infiniband", adapter, "ports", port, "counters")
                received.append(self._count(counters, "port_rcv_data", _RDMA_WORD_BYTES))
                sent.append(self._count(counters, "port_xmit_data", _RDMA_WORD_BYTES))
        known = [count for count in received if count is not None], [count for count in sent if count is not None]
        return (sum(known[0]), sum(known[1])) if known[0] and known[1] else None

    def _count(self, folder: str, name: str, unit_bytes: int = 1) -> int | None:
        text = _text(self._root, os.path.join(folder, name)).strip()
        return int(text) * unit_bytes if text.isdecimal() else None


def _busy_share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    if before is None or now is None or now[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))


def _rate(before: int, now: int, span_s: float) -> float | None:
    """Bytes per second; None if a counter began again, as after a port came or went."""
    return (now - before) / span_s if now >= before else None


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
