"""Containment: track every process of one attempt generation on this node, and stop, resume or kill all of them.

`processes` opens one for each attempt generation. Two kinds, chosen once per supervisor (PHALANX_CONTAINMENT = auto, cgroup or session):

CGROUP   the ranks start in a cgroup of their own; the kernel freezes and kills them atomically.
SESSION  no writable cgroup2: SIGSTOP and SIGKILL sweeps over /proc until two agree.

In both kinds the members are all descendants of the attempt's keeper, a child subreaper that exits only when waitpid finds no child: they
include a daemon that forked twice, changed its session, closed its descriptors and cleared its environment, and a root process that moved
itself out of its cgroup. Only if the keeper is killed do we fall back to marks: the task key in the environment, the ranks' sessions,
processes seen before, all their descendants, and, while no other attempt runs here, all processes that the spawner adopted (`strays`).
While other attempts run such a stray is left for `sweep_node`: it could belong to one of them.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from phalanx.core.fleet.node import LimitKind
from phalanx.core.work.failure import MemoryOveruse
from phalanx.node.processes import cgroups, sweeps
from phalanx.node.processes.attempt_limits import AttemptLimits, JobLimits
from phalanx.node.processes.limits import LimitFactory, limit_mode
from phalanx.node.processes.proctable import (
    TICKS_PER_S,
    ProcessIdentity,
    descendants,
    read_table,
    unreclaimable_bytes,
)

CONTAINMENT_VARIABLE: Final = "PHALANX_CONTAINMENT"
_LAST_EXITS_LIMIT_S: Final = 1.0  # a keeper reaps and reports within milliseconds, unless it was stopped with its node
_JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]+")
_NODE_KEY: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """One generation of one attempt on one node. `node_key` is unique on the machine, over all PHALANX_HOMEs."""

    job_id: str
    epoch: int
    generation: int
    node_key: str

    def __post_init__(self) -> None:
        """Reject values that would be ambiguous in a marker or invalid as a folder name.

        Raises:
            ValueError: the job id or node key has other characters.
        """
        if not _JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"job id {self.job_id!r}: letters, digits, '-' and '_' only: it marks processes")
        if not _NODE_KEY.fullmatch(self.node_key):
            raise ValueError(f"node key {self.node_key!r}: letters, digits, '.', '-' and '_' only")

    @property
    def generation_name(self) -> str:
        """The name of the generation on its node: "<job>.<epoch>.<generation>"."""
        return f"{self.job_id}.{self.epoch}.{self.generation}"

    @property
    def marker(self) -> str:
        """The value of PHALANX_TASK_KEY: "<job>.<epoch>.<generation>.<nodekey>"."""
        return f"{self.generation_name}.{self.node_key}"

    @classmethod
    def parse(cls, marker: str) -> Self:
        """The key that has this marker.

        Raises:
            ValueError: malformed marker.
        """
        parts = marker.split(".", 3)
        if len(parts) != 4:
            raise ValueError(f"{marker!r} is not a task key; expected <job>.<epoch>.<generation>.<nodekey>")
        return cls(job_id=parts[0], epoch=int(parts[1]), generation=int(parts[2]), node_key=parts[3])


class ContainmentKind(enum.StrEnum):
    """How the processes are contained."""

    CGROUP = "cgroup"
    SESSION = "session"


class Containment:
    """The processes of one attempt generation. Calls may come from any thread, one at a time."""

    def __init__(
        self,
        key: AttemptKey,
        *,
        keeper: ProcessIdentity,
        cgroup: cgroups.Cgroup | None,
        limits: AttemptLimits,
        strays: Callable[[sweeps.Table], set[int]],
    ) -> None:
        self.key = key
        self.limits = limits
        self.kind = ContainmentKind.SESSION if cgroup is None else ContainmentKind.CGROUP
        self._keeper = keeper
        self._cgroup = cgroup
        self._strays = strays
        self._sessions: set[int] = set()
        self._seen: set[ProcessIdentity] = set()
        # Processes that the job itself had stopped before our freeze; None while not frozen by us.
        self._stopped_before: set[ProcessIdentity] | None = None
        self._continues_after_thaw = False
        self._settled = threading.Event()  # the keeper has no child
        self._settled.set()
        self._keeper_lost = False

    # Reports of the keeper, passed on by `processes`.

    def task_started(self, pid: int) -> None:
        """A task was started: it leads a session that has its pid as number."""
        self._sessions.add(pid)
        self._settled.clear()

    def keeper_empty(self) -> None:
        """The keeper has no child left."""
        self._settled.set()

    def keeper_lost(self) -> None:
        """The keeper is dead: from now on only marks identify the members."""
        self._keeper_lost = True
        self._settled.clear()

    # Calls of the supervisor.

    def members(self, read: Callable[[], sweeps.Table] = read_table) -> list[int]:
        """The pids of all live members, sorted; without the keeper."""
        table = read()
        return sorted(pid for pid in self._members(table) if not table[pid].dead)

    def empty(self) -> bool:
        """True if no process of it is left."""
        if self._keeper_lost:
            return not self.members()
        return self._certainly_empty()

    def signal(self, number: int) -> int:
        """Signal every member once; returns how many received it. A frozen member handles it when thawed (SIGKILL: at once)."""
        table = read_table()
        return sum(sweeps.signal_where_allowed(table[pid].identity, number) for pid in self._members(table))

    def terminate(self) -> None:
        """Send SIGTERM to every member, and continue those that are stopped: they could not handle it."""
        self.signal(signal.SIGTERM)
        self.continue_stopped()

    def continue_stopped(self) -> None:
        """Continue the members that the job itself has stopped (SIGSTOP), as Slurm's `scancel` does.

        A frozen member stays frozen, since it has no lease: it continues when it is thawed.
        """
        if self._stopped_before is not None:
            self._continues_after_thaw = True
            return
        table = read_table()
        for pid in self._members(table):
            if table[pid].state == "T":
                sweeps.signal_where_allowed(table[pid].identity, signal.SIGCONT)

    def freeze(self, timeout_s: float = 2.0) -> bool:
        """Stop every member; True once none of them executes. May be called again."""
        if self._stopped_before is None:
            table = read_table()
            self._stopped_before = {table[pid].identity for pid in self._members(table) if table[pid].state in "Tt"}
        still = self._cgroup is None or self._cgroup.freeze(timeout_s)
        return sweeps.stop_until_still(self._outside_cgroup, timeout_s) and still

    def thaw(self) -> None:
        """Resume every member. Those that the job itself had stopped stay so, unless `continue_stopped` was called meanwhile."""
        stopped_before, self._stopped_before = self._stopped_before or set(), None
        table = read_table()
        for pid in self._outside_cgroup(table):
            if table[pid].state in "Tt" and table[pid].identity not in stopped_before:
                sweeps.signal_where_allowed(table[pid].identity, signal.SIGCONT)
        if self._cgroup is not None:
            self._cgroup.thaw()
        if self._continues_after_thaw:
            self._continues_after_thaw = False
            for process in stopped_before:
                sweeps.signal_where_allowed(process, signal.SIGCONT)

    def frozen(self) -> bool:
        """True while frozen by `freeze` with every member stopped."""
        if self._stopped_before is None or (self._cgroup is not None and not self._cgroup.frozen()):
            return False
        table = read_table()
        return all(table[pid].state in "TtDZX" for pid in self._outside_cgroup(table))

    def kill(self, timeout_s: float = 5.0) -> list[int]:
        """SIGKILL until nothing is left, frozen or not. The caller must start no more tasks.

        Returns:
            Pids that did not die in time (in an uninterruptible call, or of another user); empty when done.
        """

        def doomed(table: sweeps.Table) -> set[int]:
            if self._cgroup is not None:
                self._cgroup.kill()
            return self._members(table)

        leftover = sweeps.kill_until_none(doomed, timeout_s, certain=self._certainly_empty, pause=self._pause)
        if not leftover and not self._keeper_lost:
            self._settled.wait(_LAST_EXITS_LIMIT_S)  # so that the exits are reported before this returns
        return leftover

    def close(self) -> bool:
        """Remove the cgroup and its descendants, and release the limits; False while a process lives in it."""
        self.limits.close()
        return self._cgroup is None or self._cgroup.remove()

    def memory_overuse(self, read: Callable[[], sweeps.Table] = read_table) -> MemoryOveruse | None:
        """What its processes used when the kernel stopped one at the limit of their memory, or what they use above it now; None for neither.

        `read` gives the processes of the machine; called only if the memory has to be measured.
        """
        limits = self.limits
        if not limits.measured or not limits.memory_bytes:
            return limits.memory_overuse()
        table = read()
        pids = self._members(table)
        if sum(table[pid].resident_bytes for pid in pids) <= limits.memory_bytes:
            return None
        # That counts shared pages several times, and files. The exact figure costs more, so only now.
        used_bytes = sum(unreclaimable_bytes(table[pid]) for pid in pids)
        if used_bytes <= limits.memory_bytes:
            return None
        return MemoryOveruse(used_bytes=used_bytes, asked_bytes=limits.memory_bytes)

    def memory_bytes(self, read: Callable[[], sweeps.Table] = read_table) -> int:
        """The memory of all members. Without the memory controller of a cgroup, pages that members share count for each of them."""
        counted = None if self._cgroup is None else self._cgroup.memory_bytes()
        if counted is not None:
            return counted
        table = read()
        return sum(table[pid].resident_bytes for pid in self._members(table))

    def cpu_seconds(self, read: Callable[[], sweeps.Table] = read_table) -> float:
        """CPU time of all members, including dead ones that their parents waited for."""
        if self._cgroup is not None:
            return self._cgroup.cpu_seconds()
        table = read()
        ticks = sum(table[pid].cpu_ticks for pid in self._members(table))
        keeper = table.get(self._keeper.pid)
        if keeper is not None and keeper.identity == self._keeper:
            ticks += keeper.waited_cpu_ticks
        return ticks / TICKS_PER_S

    def _pause(self, seconds: float) -> None:
        """Wait until the keeper reports that nothing is left; if it has and the cgroup is not empty yet, sleep."""
        if self._settled.is_set():
            time.sleep(seconds)
        else:
            self._settled.wait(seconds)

    def _certainly_empty(self) -> bool:
        return self._settled.is_set() and (self._cgroup is None or not self._cgroup.populated())

    def _outside_cgroup(self, table: sweeps.Table) -> set[int]:
        """The members that only signals reach: all without a cgroup, else those that moved out of it."""
        members = self._members(table)
        return members if self._cgroup is None else members - self._cgroup.members()

    def _members(self, table: sweeps.Table) -> set[int]:
        """The pids of the table that belong to this generation."""
        pids = set() if self._cgroup is None else self._cgroup.members() & table.keys()
        keeper = table.get(self._keeper.pid)
        if keeper is not None and keeper.identity == self._keeper and not keeper.dead:
            pids |= descendants(table, [self._keeper.pid])
        else:
            pids |= {row.pid for row in table.values() if row.session in self._sessions or row.identity in self._seen}
            pids |= sweeps.processes_with_marker(table, self.key.marker) | self._strays(table)
            pids |= descendants(table, pids)
        self._seen = {table[pid].identity for pid in pids}
        return pids


class ContainmentFactory:
    """Opens containments of the kind that works on this node."""

    def __init__(
        self, node_key: str, *, mode: str | None = None, limits: str | None = None, climb: bool = True
    ) -> None:
        """Detect what works here.

        Args:
            node_key: see AttemptKey.
            mode: "auto", "cgroup" or "session"; by default the value of PHALANX_CONTAINMENT, else "auto".
            limits: see LimitFactory.
            climb: see `cgroup_delegation.find_parent`.

        Raises:
            ValueError: another word, "cgroup" where none can be created, or limits that do not work here.
        """
        mode = mode or os.environ.get(CONTAINMENT_VARIABLE) or "auto"
        if mode not in {"auto", "cgroup", "session"}:
            raise ValueError(f"{CONTAINMENT_VARIABLE}={mode}: must be auto, cgroup or session")
        _, wanted = limit_mode(limits)
        reason = f"{CONTAINMENT_VARIABLE}=session"
        group = cgroups.NodeCgroup(folder=None, reason=reason, why_no_limits=reason)
        if mode != "session":
            controllers = wanted in (None, LimitKind.CGROUP_V2)
            group = cgroups.claim_node_cgroup(node_key, controllers=controllers, climb=climb)
        self._folder, self.reason = group.folder, group.reason
        if mode == "cgroup" and self._folder is None:
            raise ValueError(f"{CONTAINMENT_VARIABLE}=cgroup, but {self.reason}; use auto or session")
        self.kind = ContainmentKind.SESSION if self._folder is None else ContainmentKind.CGROUP
        self.limits = LimitFactory(node_key, group=group, mode=limits)

    def describe(self) -> str:
        """One line for the log: what is used here, and why nothing better."""
        contained = f"containment: {self.kind.value}{f' ({self.reason})' if self.reason else ''}"
        reasons = "; ".join(f"no {kind.value}: {why}" for kind, why in self.limits.reasons.items())
        return f"{contained}; limits: {self.limits.kind.value}{f' ({reasons})' if reasons else ''}"

    def prepare(self, key: AttemptKey, limits: JobLimits) -> tuple[cgroups.Cgroup | None, AttemptLimits]:
        """Create the cgroup of a generation before its keeper is forked (None without cgroups), and its limits.

        Raises:
            OSError: it could not be created, or the limits not set.
        """
        try:
            return self._prepare(key.generation_name, limits)
        except FileNotFoundError:  # the first attempt, or the keeper of the last one removed the node's groups
            if self._folder is not None:
                os.makedirs(self._folder, exist_ok=True)
            self.limits.create_node_groups()
            return self._prepare(key.generation_name, limits)

    def _prepare(self, name: str, limits: JobLimits) -> tuple[cgroups.Cgroup | None, AttemptLimits]:
        if self._folder is None:
            return None, self.limits.open(name, limits, None)
        cgroup = cgroups.Cgroup(f"{self._folder}/{name}")
        cgroup.create()
        try:
            return cgroup, self.limits.open(name, limits, cgroup)
        except OSError:
            cgroup.remove()
            raise

    def open(
        self,
        key: AttemptKey,
        *,
        keeper: ProcessIdentity,
        cgroup: cgroups.Cgroup | None,
        limits: AttemptLimits,
        strays: Callable[[sweeps.Table], set[int]],
    ) -> Containment:
        """The containment of a keeper that was just forked."""
        return Containment(key, keeper=keeper, cgroup=cgroup, limits=limits, strays=strays)

    def close(self) -> None:
        """Remove the node's own cgroups if no attempt is left in them."""
        self.limits.close()
        if self._folder is not None:
            cgroups.Cgroup(self._folder).remove()
