"""The limits of one attempt by cgroups: a group of version 2, or one in each hierarchy of version 1."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Final

from phalanx.core.work.failure import MemoryOveruse
from phalanx.node.processes import cgroup_mounts
from phalanx.node.processes.attempt_limits import AttemptLimits, JobLimits
from phalanx.node.processes.cgroup_mounts import LIMIT_CONTROLLERS
from phalanx.node.processes.cgroups import Cgroup, node_cgroup_name, why_no_entry
from phalanx.node.processes.proctable import read_small

PERIOD_US: Final = 100_000
"""The kernel's default period for CPU quotas. Source: Documentation/scheduler/sched-bwc.rst."""
_NO_QUOTA: Final = -1  # the value of a new group of version 1
_QUOTA_MIN_US: Final = 1_000  # the kernel refuses less
_WEIGHT_PER_CPU: Final = 100  # the default weight of a v2 group: a node's group counts as one group for each CPU
_WEIGHT_MAX: Final = 10_000
_SHARES_PER_CPU: Final = 1024  # the same for version 1
_SHARES_MAX: Final = 262_144
_AT_LIMIT_BYTES: Final = 4 << 20  # an allocation that does not fit fails below the limit; a huge page has 2 MiB
_log = logging.getLogger(__name__)


def weigh_v2(folder: str, cpus: int) -> None:
    """Set the weight of a node's group against the rest of the machine."""
    _put(f"{folder}/cpu.weight", min(_WEIGHT_MAX, _WEIGHT_PER_CPU * cpus))


def weigh_v1(folder: str, cpus: float) -> None:
    """The same for version 1."""
    _put(f"{folder}/cpu.shares", max(2, min(_SHARES_MAX, round(_SHARES_PER_CPU * cpus))))


class CgroupV2Limits(AttemptLimits):
    """Limits in the group of the containment."""

    def __init__(self, limits: JobLimits, folder: str, *, node_cpus: int) -> None:
        super().__init__(limits)
        self._folder = folder
        share = min(1.0, limits.share_cpus / node_cpus)
        _put(f"{folder}/cpu.weight", max(1, round(_WEIGHT_MAX * share)))
        _put(f"{folder}/cpu.max", f"{_quota_us(limits.cpus) if limits.cpus else 'max'} {PERIOD_US}")
        _put(f"{folder}/memory.max", limits.memory_bytes or "max")
        if limits.memory_bytes:
            _put(f"{folder}/memory.oom.group", 1)
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                _put(f"{folder}/memory.swap.max", 0)
        self._events_before = self._events()

    def oom_kills(self) -> int | None:
        """See AttemptLimits."""
        return self._events().get("oom_kill")

    def memory_overuse(self) -> MemoryOveruse | None:
        """See AttemptLimits."""
        if not self.memory_bytes:
            return None
        # `oom` counts failures at this group's own limit; `oom_kill` also kills for the whole machine.
        now = self._events()
        if not all(now.get(name, 0) > self._events_before.get(name, 0) for name in ("oom", "oom_kill")):
            return None
        used_bytes = _number(f"{self._folder}/memory.peak") or self.memory_bytes  # memory.peak: Linux 5.19
        return MemoryOveruse(used_bytes=used_bytes, asked_bytes=self.memory_bytes)

    def close(self) -> None:
        """Nothing: the containment removes the group."""

    def _events(self) -> dict[str, int]:
        return _numbers(f"{self._folder}/memory.events")


class CgroupV1Limits(AttemptLimits):
    """Limits in a group of each hierarchy. Version 1 kills one process at the limit; the watch then ends the others."""

    def __init__(self, limits: JobLimits, folders: dict[str, str]) -> None:
        cpu, memory = folders["cpu"], folders["memory"]
        super().__init__(limits, folders=(cpu, memory))
        self._memory = memory
        self._kills_before = 0
        try:
            for folder in self.folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder)
            weigh_v1(cpu, limits.share_cpus)
            if limits.cpus or _number(f"{cpu}/cpu.cfs_quota_us") != _NO_QUOTA:  # one that a dead supervisor left
                self._set_quota(cpu, limits.cpus)
            if limits.memory_bytes:
                _put(f"{memory}/memory.limit_in_bytes", limits.memory_bytes)
                with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                    _put(f"{memory}/memory.memsw.limit_in_bytes", limits.memory_bytes)
                self._kills_before = self.oom_kills() or 0
        except OSError:
            self.close()
            raise

    def oom_kills(self) -> int | None:
        """See AttemptLimits."""
        return _numbers(f"{self._memory}/memory.oom_control").get("oom_kill")

    def memory_overuse(self) -> MemoryOveruse | None:
        """See AttemptLimits."""
        # A kill for the whole machine is counted in `oom_kill` too. Failures at the limit are not: memory.failcnt stays 0 on newer kernels.
        if not self.memory_bytes or (self.oom_kills() or 0) <= self._kills_before:
            return None
        used_bytes = _number(f"{self._memory}/memory.max_usage_in_bytes") or 0
        if used_bytes < self.memory_bytes - _AT_LIMIT_BYTES:
            return None
        return MemoryOveruse(used_bytes=used_bytes, asked_bytes=self.memory_bytes)

    def close(self) -> None:
        """Remove the groups."""
        for folder in self.folders:
            Cgroup(folder).remove()

    @staticmethod
    def _set_quota(folder: str, cpus: float) -> None:
        try:
            _put(f"{folder}/cpu.cfs_period_us", PERIOD_US)
            _put(f"{folder}/cpu.cfs_quota_us", _quota_us(cpus) if cpus else _NO_QUOTA)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # More than a group above has: that limit is the tighter one and holds.
            _log.info("%s: no quota of %g CPUs: a group above has less", folder, cpus)


def claim_v1(node_key: str) -> tuple[dict[str, str], str]:
    """The folders of the node's groups by controller, and why they cannot be used. Tries one of each, and removes it."""
    folders: dict[str, str] = {}
    with open("/proc/self/mountinfo") as file:
        mountinfo = file.read()
    with open("/proc/self/cgroup") as file:
        membership = file.read()
    for controller, file_name in zip(LIMIT_CONTROLLERS, ("cpu.cfs_quota_us", "memory.limit_in_bytes"), strict=True):
        mount = cgroup_mounts.find_v1(mountinfo, controller)
        own = None if mount is None else cgroup_mounts.own_folder(mount, membership)
        if own is None:
            return {}, f"no writable {controller} hierarchy of cgroup version 1"
        folders[controller] = f"{own}/{node_cgroup_name(node_key)}"
        why = _try_v1(f"{folders[controller]}/probe.{os.getpid()}", file_name)
        with contextlib.suppress(OSError):  # attempts of a dead supervisor may live in it
            os.rmdir(folders[controller])
        if why:
            return {}, why
    return folders, ""


def _try_v1(folder: str, file_name: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(f"{folder}/{file_name}", os.W_OK):
            return f"{folder} has no writable {file_name}"
        return why_no_entry(folder)
    except OSError as error:
        return f"cannot make {folder}: {error.strerror}"
    finally:
        Cgroup(folder).remove()


def _quota_us(cpus: float) -> int:
    return max(_QUOTA_MIN_US, round(cpus * PERIOD_US))


def _put(path: str, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(read_small(path))
    return None


def _numbers(path: str) -> dict[str, int]:
    """The lines `name number` of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = read_small(path).decode().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}
    return {}
