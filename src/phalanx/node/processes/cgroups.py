"""Control groups (version 2): where this process can create them; freeze, kill, and check that one is empty.

Containment needs the core files only (cgroup.procs, .freeze, .kill, .events, and cpu.stat): no controller has to be delegated, and the rule
against processes in inner groups does not apply. Works in a pure and in a hybrid mount. `cgroup_delegation` finds a place that has the cpu and
memory controllers too, which `limits` needs. Called by `containment` and `sweeps`, which decide which process belongs in which group.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from dataclasses import dataclass

from phalanx.node.processes import cgroup_delegation, cgroup_mounts
from phalanx.node.processes.proctable import read_small

_PROBE_LIMIT_S = 5.0  # `sh` writing one line; milliseconds
_REMOVE_LIMIT_S = 2.0  # the kernel removes the last task from a group shortly after it died


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCgroup:
    """The group of a node, below which each attempt gets its own.

    Attributes:
        folder: None if cgroups of version 2 cannot be used here; `reason` says why.
        limits: the attempts' groups have the cpu and memory controllers; else `why_no_limits` says why not.
    """

    folder: str | None
    reason: str = ""
    limits: bool = False
    why_no_limits: str = ""


def node_cgroup_name(node_key: str) -> str:
    """The name of the cgroup that holds the attempts of one node."""
    return f"phalanx-{node_key}"


def claim_node_cgroup(node_key: str, *, controllers: bool = True, climb: bool = True) -> NodeCgroup:
    """Find where the node's cgroup can be, and verify that processes can be moved into it, frozen and killed.

    The cgroup does not exist afterwards, unless attempts of a dead supervisor live in it: a supervisor that is killed leaves none behind.

    Args:
        node_key: see AttemptKey.
        controllers: prefer a place that has the cpu and memory controllers.
        climb: see `cgroup_delegation.find_parent`.
    """
    with open("/proc/self/mountinfo") as mountinfo, open("/proc/self/cgroup") as membership:
        mount = cgroup_mounts.find_v2(mountinfo.read())
        if mount is None:
            return NodeCgroup(
                folder=None, reason="no writable cgroup2 mount", why_no_limits="no writable cgroup2 mount"
            )
        own = cgroup_mounts.own_folder(mount, membership.read())
    if own is None:
        why = f"this process's cgroup is not below {mount.folder}"
        return NodeCgroup(folder=None, reason=why, why_no_limits=why)
    why_no_limits = "not requested"
    if controllers:
        parent, why_no_limits = cgroup_delegation.find_parent(mount.folder, own, climb=climb)
        if parent is not None:
            folder = f"{parent}/{node_cgroup_name(node_key)}"
            why_no_limits = _try(folder) or cgroup_delegation.distribute(folder)
            Cgroup(folder).remove()
            if not why_no_limits:
                return NodeCgroup(folder=folder, limits=True)
    folder = f"{own}/{node_cgroup_name(node_key)}"
    reason = _try(folder)
    Cgroup(folder).remove()
    return NodeCgroup(folder=None if reason else folder, reason=reason, why_no_limits=why_no_limits)


def _try(folder: str) -> str:
    """Create the node's cgroup and try one below it; returns why it cannot be used, or ""."""
    probe = f"{folder}/probe.{os.getpid()}"
    try:
        os.makedirs(probe, exist_ok=True)
    except OSError as error:
        return f"cannot make {probe}: {error.strerror}"
    try:
        missing = [name for name in ("cgroup.freeze", "cgroup.kill") if not os.access(f"{probe}/{name}", os.W_OK)]
        if missing:
            return f"{probe} has no writable {' and '.join(missing)} (Linux 5.14 or newer has both)"
        return why_no_entry(probe)
    finally:
        Cgroup(probe).remove()


def why_no_entry(folder: str) -> str:
    """Why no process can be moved into a group, of either version; "" if one can.

    Only a real move is conclusive: the kernel also checks permissions on the common ancestor.
    """
    try:
        moved = subprocess.run(
            ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', folder],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot try {folder}: {error}"
    if moved.returncode != 0:
        return f"no process can be moved into {folder}: {moved.stderr.decode(errors='replace').strip()}"
    return ""


def find_node_cgroups(node_key: str) -> list[str]:
    """Every cgroup of this node on the machine, whichever supervisor created it: those of version 2 first."""
    with open("/proc/self/mountinfo") as mountinfo:
        mounts = sorted(cgroup_mounts.find_all(mountinfo.read()), key=lambda mount: mount.controllers is not None)
    wanted = node_cgroup_name(node_key)
    found: list[str] = []
    for mount in mounts:
        for folder, inner, _ in os.walk(mount.folder):
            if wanted in inner:
                found.append(f"{folder}/{wanted}")
                inner.remove(wanted)
    return found


class Cgroup:
    """One group by its folder. Every call tolerates a removed folder: it counts as empty."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def create(self) -> None:
        """Create the folder below an existing one; one left by a dead supervisor of the same key is reused, thawed.

        Raises:
            FileNotFoundError: the group above does not exist.
            OSError: it cannot be created.
        """
        try:
            os.mkdir(self.folder)
        except FileExistsError:
            self.thaw()

    def members(self) -> set[int]:
        """The pids in this group and its descendants. The kernel lists zombies until they are reaped."""
        pids: set[int] = set()
        for folder, _, _ in os.walk(self.folder):
            with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs") as procs:
                pids.update(int(line) for line in procs)
        return pids

    def populated(self) -> bool:
        """True while a live process is in it or its descendants."""
        return self._events().get("populated") == "1"

    def frozen(self) -> bool:
        """True once every process in it is frozen."""
        return self._events().get("frozen") == "1"

    def freeze(self, timeout_s: float) -> bool:
        """Freeze and wait; False if some process did not freeze in time (the kernel keeps trying)."""
        if not self._write("cgroup.freeze", b"1"):
            return True
        return self._wait("frozen", "1", timeout_s)

    def thaw(self) -> None:
        """Let its processes run again."""
        self._write("cgroup.freeze", b"0")

    def kill(self) -> None:
        """SIGKILL everything in it and its descendants atomically: no process can escape by forking."""
        self._write("cgroup.kill", b"1")

    def cpu_seconds(self) -> float:
        """CPU time used in it since it was created, by dead processes too."""
        try:
            with open(f"{self.folder}/cpu.stat") as stat:
                for line in stat:
                    name, value = line.split()
                    if name == "usage_usec":
                        return int(value) / 1e6
        except OSError:
            pass
        return 0.0

    def memory_bytes(self) -> int | None:
        """The memory of its processes without files, which the kernel can drop; None without the memory controller.

        Source: Documentation/admin-guide/cgroup-v2.rst, memory.stat: `anon` and `shmem`.
        """
        try:
            with open(f"{self.folder}/memory.stat") as stat:
                found = dict(line.split() for line in stat)
            return int(found["anon"]) + int(found["shmem"])
        except (OSError, KeyError, ValueError):
            return None

    def remove(self) -> bool:
        """Remove it with all descendants; False if a process still lives in it."""
        with contextlib.suppress(OSError):  # the usual case: it is empty
            os.rmdir(self.folder)
            return True
        limit = time.monotonic() + _REMOVE_LIMIT_S
        while True:
            for folder, _, _ in os.walk(self.folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if not os.path.isdir(self.folder):
                return True
            if self.populated() or time.monotonic() > limit:
                return False
            time.sleep(0.002)

    def _events(self) -> dict[str, str]:
        try:
            return _parse_events(read_small(f"{self.folder}/cgroup.events").decode())
        except OSError:
            return {}

    def _wait(self, name: str, value: str, timeout_s: float) -> bool:
        """Wait for a line of cgroup.events; the kernel wakes pollers on each change."""
        limit = time.monotonic() + timeout_s
        try:
            with open(f"{self.folder}/cgroup.events") as events:
                poll = select.poll()
                poll.register(events.fileno(), select.POLLPRI)
                while True:
                    events.seek(0)
                    if _parse_events(events.read()).get(name) == value:
                        return True
                    left_s = limit - time.monotonic()
                    if left_s <= 0:
                        return False
                    poll.poll(left_s * 1000)
        except OSError:  # removed meanwhile, so it is empty
            return True

    def _write(self, name: str, text: bytes) -> bool:
        """Write a control file; False when the group is gone."""
        try:
            descriptor = os.open(f"{self.folder}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            os.write(descriptor, text)
        except OSError:  # ENODEV: removed between open and write
            if os.path.isdir(self.folder):
                raise
            return False
        finally:
            os.close(descriptor)
        return True


def _parse_events(text: str) -> dict[str, str]:
    return dict(line.split() for line in text.splitlines())
