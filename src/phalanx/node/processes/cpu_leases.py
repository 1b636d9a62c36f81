"""Chooses the CPUs that an attempt is bound to, where no cgroup limits them: those that the fewest other attempts hold.

Several supervisors may share a machine (virtual nodes, seats). They see each other's choice by the name of a socket: the kernel gives an
abstract name to one process only, and takes it back when that process dies. Supervisors in separate network namespaces do not see each other;
then two attempts may share CPUs while others are idle.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

_LEVELS_MAX: Final = 16  # attempts on one CPU that are distinguished; more share it in order of number


class CpuLease:
    """CPUs chosen for one attempt, held until `release`."""

    def __init__(self, cpus: tuple[int, ...], names: list[socket.socket]) -> None:
        self.cpus = cpus
        self._names = names

    def release(self) -> None:
        """Let other attempts have them. May be called again."""
        while self._names:
            self._names.pop().close()


def lease_cpus(count: int) -> CpuLease:
    """Choose `count` of the CPUs that this process may use: least held first, then by number; all of them if there are no more."""
    allowed = sorted(os.sched_getaffinity(0))
    if count >= len(allowed):
        return CpuLease(tuple(allowed), [])
    chosen: list[int] = []
    names: list[socket.socket] = []
    for level in range(_LEVELS_MAX):
        for cpu in allowed:
            if len(chosen) == count:
                break
            if cpu not in chosen and (name := _take(cpu, level)) is not None:
                chosen.append(cpu)
                names.append(name)
    chosen += [cpu for cpu in allowed if cpu not in chosen][: count - len(chosen)]
    return CpuLease(tuple(sorted(chosen)), names)


def _take(cpu: int, level: int) -> socket.socket | None:
    """Hold one level of a CPU; None if it is held."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):
        name.bind(f"\0phalanx-cpu-{cpu}-{level}")
        return name
    name.close()
    return None
