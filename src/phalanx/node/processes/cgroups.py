"""Control groups (version 2): where this process can create them; freeze, kill, and check that one is empty.

Uses the core files only (cgroup.procs, .freeze, .kill, .events, and cpu.stat): no controller has to be delegated, and the rule against
processes in inner groups does not apply. Works in a pure and in a hybrid mount. Called by `containment` and `sweeps`, which decide which
process belongs in which group.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from dataclasses import dataclass

_PROBE_LIMIT_S = 5.0  # `sh` writing one line; milliseconds
_REMOVE_LIMIT_S = 2.0  # the kernel removes the last task from a group shortly after it died


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup2Mount:
    """A cgroup2 file system: its folder, and the cgroup of the hierarchy that is mounted there."""

    folder: str
    root: str


def parse_mount(mountinfo: str) -> Cgroup2Mount | None:
    """The first writable cgroup2 mount in the text of /proc/self/mountinfo; see proc(5) for its columns."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        columns = before.split()
        if after.split()[:1] == ["cgroup2"] and "rw" in columns[5].split(","):
            return Cgroup2Mount(folder=_unescape(columns[4]), root=_unescape(columns[3]))
    return None


def _unescape(path: str) -> str:
    """Undo the octal escapes of mountinfo (space, tab, newline, backslash)."""
    return path.encode().decode("unicode_escape") if "\\" in path else path


def own_cgroup_folder(mount: Cgroup2Mount, membership: str) -> str | None:
    """The folder of this process's cgroup; `membership` is the text of /proc/self/cgroup. None: outside the mount."""
    for line in membership.splitlines():
        if line.startswith("0::"):
            path = line[3:]
            if path.startswith("/.."):  # outside this cgroup namespace
                return None
            if mount.root != "/":
                if path != mount.root and not path.startswith(f"{mount.root}/"):
                    return None
                path = path[len(mount.root) :]
            return os.path.normpath(f"{mount.folder}/{path}")
    return None


def node_cgroup_name(node_key: str) -> str:
    """The name of the cgroup that holds the attempts of one node."""
    return f"phalanx-{node_key}"


def claim_node_cgroup(node_key: str) -> tuple[str | None, str]:
    """Create the node's cgroup and verify that processes can be moved into it, frozen and killed.

    Returns:
        The folder and "", or None and the reason why cgroups cannot be used here.
    """
    with open("/proc/self/mountinfo") as mountinfo, open("/proc/self/cgroup") as membership:
        mount = parse_mount(mountinfo.read())
        if mount is None:
            return None, "no writable cgroup2 mount"
        own = own_cgroup_folder(mount, membership.read())
    if own is None:
        return None, f"this process's cgroup is not below {mount.folder}"
    folder = f"{own}/{node_cgroup_name(node_key)}"
    probe = f"{folder}/probe.{os.getpid()}"
    try:
        os.makedirs(probe, exist_ok=True)
    except OSError as error:
        return None, f"cannot make {probe}: {error.strerror}"
    try:
        missing = [name for name in ("cgroup.freeze", "cgroup.kill") if not os.access(f"{probe}/{name}", os.W_OK)]
        if missing:
            return None, f"{probe} has no writable {' and '.join(missing)} (Linux 5.14 or newer has both)"
        # Only a real move is conclusive: the kernel also checks permissions on the common ancestor.
        moved = subprocess.run(
            ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', probe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
        if moved.returncode != 0:
            return None, f"no process can be moved into {probe}: {moved.stderr.decode(errors='replace').strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"cannot try {probe}: {error}"
    finally:
        Cgroup(probe).remove()
    return folder, ""


def find_node_cgroups(node_key: str) -> list[str]:
    """Every cgroup of this node on the machine, whichever supervisor created it."""
    with open("/proc/self/mountinfo") as mountinfo:
        mount = parse_mount(mountinfo.read())
    if mount is None:
        return []
    wanted = node_cgroup_name(node_key)
    found: list[str] = []
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
        """Create the folder; one left by a dead supervisor of the same key is reused, thawed.

        Raises:
            OSError: it cannot be created.
        """
        os.makedirs(self.folder, exist_ok=True)
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

    def remove(self) -> bool:
        """Remove it with all descendants; False if a process still lives in it."""
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
            with open(f"{self.folder}/cgroup.events") as events:
                return _parse_events(events.read())
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
