"""The limits of one attempt on its node: what each of the three ways has in common, and the one without cgroups."""

from __future__ import annotations

import abc
import contextlib
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.failure import MemoryOveruse
from phalanx.core.work.share import MILLI_PER_DEVICE, ShareKind
from phalanx.core.work.spec import Role
from phalanx.node.processes.cpu_leases import lease_cpus
from phalanx.node.processes.proctable import read_small

_FIRST_TO_DIE: Final = 500
"""Added to the OOM score of jobs without a memory request. Such a process is killed before any other that holds up to half of the memory.
Source: proc(5), oom_score_adj: thousandths of all memory."""
_SCORE_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The resources of a job on this node.

    Attributes:
        cpus: asked for, and its hard limit; 0 for none. A share of a virtual device is a fraction of a CPU.
        memory_bytes: asked for, and its hard limit; 0 for none.
        share_cpus: the CPUs that it counts for when all jobs want more than the node has.
    """

    cpus: float = 0
    memory_bytes: int = 0
    share_cpus: float = 1


NO_LIMITS: Final = JobLimits()


def limits_of_job(role: Role, grant: NodeGrant, *, virtual: bool, node_cpus: int, node_devices: int) -> JobLimits:
    """What a job may use on a node.

    A share of a virtual device is a share of one CPU, because a virtual device counts as busy while its ranks use a whole one. MPS and MIG
    limit a job to its share, time slices do not. A whole device has no limit.

    Args:
        role: what the job asked for.
        grant: what it was granted on the node.
        virtual: the node's devices are virtual.
        node_cpus: CPUs that the supervisor may use.
        node_devices: devices of the node.
    """
    cpus, weight = (
        float(role.cpus),
        role.cpus or max(1.0, node_cpus * grant.milli / MILLI_PER_DEVICE / max(1, node_devices)),
    )
    if virtual and grant.share is not None:
        weight = grant.share.milli / MILLI_PER_DEVICE
        if grant.share.kind is not ShareKind.TIME:
            cpus = weight
    return JobLimits(cpus=cpus, memory_bytes=role.memory_bytes, share_cpus=weight)


class AttemptLimits(abc.ABC):
    """The limits of one attempt generation.

    Attributes:
        folders: groups that its tasks enter, besides that of the containment.
        cpus: the CPUs that its tasks are bound to; empty for all.
        measured: the kernel does not enforce the memory, so it has to be measured.
    """

    measured = False

    def __init__(self, limits: JobLimits, *, folders: tuple[str, ...] = (), cpus: tuple[int, ...] = ()) -> None:
        self.memory_bytes = limits.memory_bytes
        self.folders = folders
        self.cpus = cpus

    def confinement(self, containment: str | None) -> dict[str, Any]:
        """What a keeper does to each task before it runs; `containment`: the folder of the containment's group."""
        folders = dict.fromkeys((*([] if containment is None else [containment]), *self.folders))
        adjust = 0 if self.memory_bytes else _FIRST_TO_DIE
        return {
            "cgroups": list(folders),
            "cpus": list(self.cpus),
            "oom_score_adj": min(_SCORE_MAX, _own_score() + adjust),
        }

    @abc.abstractmethod
    def oom_kills(self) -> int | None:
        """Processes in it that the kernel killed because memory ran out, here or on the machine; None if that is not counted."""

    @abc.abstractmethod
    def memory_overuse(self) -> MemoryOveruse | None:
        """What it used when the kernel killed a process at its memory limit; None if that did not happen, or the kernel has no limit."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release what belongs to it. No process is left in it."""


class WatchdogLimits(AttemptLimits):
    """The CPUs by affinity. The memory is measured outside, because only that knows the processes."""

    measured = True

    def __init__(self, limits: JobLimits) -> None:
        lease = lease_cpus(ceil(limits.cpus)) if limits.cpus else None
        super().__init__(limits, cpus=() if lease is None else lease.cpus)
        self._lease = lease

    def oom_kills(self) -> int | None:
        """None: not counted."""
        return None

    def memory_overuse(self) -> MemoryOveruse | None:
        """None: the kernel has no limit."""
        return None

    def close(self) -> None:
        """Return its CPUs."""
        if self._lease is not None:
            self._lease.release()


def _own_score() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(read_small("/proc/self/oom_score_adj"))
    return 0
