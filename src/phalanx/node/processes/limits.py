"""Enforces the CPUs and the memory that a job asked for on its node, in the best of three ways that works here.

CGROUP_V2  cpu.max, cpu.weight, memory.max and memory.oom.group of the attempt's own group
CGROUP_V1  cpu.cfs_quota_us, cpu.shares and memory.limit_in_bytes of a group in each hierarchy
WATCHDOG   the tasks are bound to CPUs, and `diagnosis.memory_watch` measures their memory

The way is chosen once per supervisor (PHALANX_LIMITS = auto, cgroup2, cgroup1 or affinity). A job that asked for nothing has no hard limit: its
weight is its share of the node, and its processes are the first that the kernel kills if the machine itself runs out of memory.
"""

from __future__ import annotations

import os
from typing import Final

from phalanx.core.fleet.node import LimitKind
from phalanx.node.processes import cgroup_delegation, cgroup_limits
from phalanx.node.processes.attempt_limits import AttemptLimits, JobLimits, WatchdogLimits
from phalanx.node.processes.cgroups import Cgroup, NodeCgroup

LIMITS_VARIABLE: Final = "PHALANX_LIMITS"
LIMIT_MODES: Final = {
    "auto": None,
    "cgroup2": LimitKind.CGROUP_V2,
    "cgroup1": LimitKind.CGROUP_V1,
    "affinity": LimitKind.WATCHDOG,
}


class LimitFactory:
    """Opens limits of the kind that works on this node.

    Attributes:
        kind: the kind.
        reasons: why a better one is not used, by kind.
    """

    def __init__(self, node_key: str, *, group: NodeCgroup, mode: str | None = None) -> None:
        """Detect what works here.

        Args:
            node_key: see AttemptKey.
            group: the node's group of version 2.
            mode: one of LIMIT_MODES; by default the value of PHALANX_LIMITS, else "auto".

        Raises:
            ValueError: another word, or a kind that does not work here.
        """
        mode, wanted = limit_mode(mode)
        self._cpus = len(os.sched_getaffinity(0))
        self._group = group
        self._folders: dict[str, str] = {}
        self.reasons: dict[LimitKind, str] = {}
        self.kind = LimitKind.WATCHDOG
        if wanted in (None, LimitKind.CGROUP_V2):
            if group.limits and group.folder is not None:
                self.kind = LimitKind.CGROUP_V2
            else:
                self.reasons[LimitKind.CGROUP_V2] = group.reason or group.why_no_limits
        if self.kind is LimitKind.WATCHDOG and wanted in (None, LimitKind.CGROUP_V1):
            self._folders, why = cgroup_limits.claim_v1(node_key)
            if why:
                self.reasons[LimitKind.CGROUP_V1] = why
            else:
                self.kind = LimitKind.CGROUP_V1
        if wanted not in (None, self.kind):
            assert wanted is not None
            raise ValueError(f"{LIMITS_VARIABLE}={mode}, but {self.reasons[wanted]}; use auto or affinity")

    def create_node_groups(self) -> None:
        """Create the node's groups that pass limits on to attempts, where they do not exist: when `open` finds none. Keepers remove them with their last attempt.

        Raises:
            OSError: they cannot be created.
        """
        if self.kind is LimitKind.CGROUP_V2 and self._group.folder is not None:
            os.makedirs(self._group.folder, exist_ok=True)
            if why := cgroup_delegation.distribute(self._group.folder):
                raise OSError(why)
            cgroup_limits.weigh_v2(self._group.folder, self._cpus)
        for controller, folder in self._folders.items():
            os.makedirs(folder, exist_ok=True)
            if controller == "cpu":
                cgroup_limits.weigh_v1(folder, self._cpus)

    def open(self, name: str, limits: JobLimits, group: Cgroup | None) -> AttemptLimits:
        """The limits of a new attempt generation.

        Args:
            name: of the generation.
            limits: of its job.
            group: the group of its containment, already created; None without one.

        Raises:
            FileNotFoundError: the node's groups do not exist; see `create_node_groups`.
            OSError: they could not be set.
        """
        if self.kind is LimitKind.CGROUP_V2 and group is not None:
            return cgroup_limits.CgroupV2Limits(limits, group.folder, node_cpus=self._cpus)
        if self.kind is LimitKind.CGROUP_V1:
            own = {controller: f"{folder}/{name}" for controller, folder in self._folders.items()}
            return cgroup_limits.CgroupV1Limits(limits, own)
        return WatchdogLimits(limits)

    def close(self) -> None:
        """Remove the node's groups if no attempt is left in them."""
        for folder in set(self._folders.values()):
            Cgroup(folder).remove()


def limit_mode(mode: str | None) -> tuple[str, LimitKind | None]:
    """The mode, and the kind that it asks for; None for the best.

    Raises:
        ValueError: not one of LIMIT_MODES.
    """
    mode = mode or os.environ.get(LIMITS_VARIABLE) or "auto"
    if mode not in LIMIT_MODES:
        raise ValueError(f"{LIMITS_VARIABLE}={mode}: must be {', '.join(LIMIT_MODES)}")
    return mode, LIMIT_MODES[mode]
