"""The process table of /proc: parents, states, and a signal that cannot reach the wrong process.

Used by all code in `node/shell` that counts, freezes or kills, and by the spawner and the zygote, which load this file by path
under the *job's* interpreter: standard library only, Python >= 3.10, no import from phalanx.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessIdentity(NamedTuple):
    """Identifies a process: pids are reused, a pid with its start time (ticks since boot) is not."""

    pid: int
    started_ticks: int


class ProcessRow(NamedTuple):
    """One line of /proc/<pid>/stat. `cpu_ticks` counts the process and the children it waited for."""

    pid: int
    state: str
    parent: int
    session: int
    started_ticks: int
    cpu_ticks: int
    waited_cpu_ticks: int
    resident_bytes: int

    @property
    def identity(self) -> ProcessIdentity:
        """The pid with its start time."""
        return ProcessIdentity(self.pid, self.started_ticks)

    @property
    def dead(self) -> bool:
        """True for a zombie: it executes nothing and waits to be reaped."""
        return self.state in "ZX"


def read_small(path: str, size: int = 4096) -> bytes:
    """The first `size` bytes of a file of the kernel: three system calls, where `open` makes seven.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_row(pid: int) -> ProcessRow | None:
    """The row of one process; None if it does not exist."""
    try:
        text = read_small(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in parentheses and may contain spaces and parentheses: split only the text after the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 22:
        return None
    waited = int(fields[13]) + int(fields[14])
    return ProcessRow(
        pid=pid,
        state=chr(fields[0][0]),
        parent=int(fields[1]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]) + waited,
        waited_cpu_ticks=waited,
        resident_bytes=int(fields[21]) * PAGE_BYTES,
    )


def read_table() -> dict[int, ProcessRow]:
    """Every process that /proc shows, by pid; about 15 us each. Not one instant: processes come and go while it is read."""
    rows: dict[int, ProcessRow] = {}
    for name in os.listdir("/proc"):
        if name[0] in "123456789" and (row := read_row(int(name))) is not None:
            rows[row.pid] = row
    return rows


def read_below(roots: Iterable[int]) -> dict[int, ProcessRow]:
    """The processes below `roots`, by pid, without the roots; on a kernel that lists no children, every process.

    Costs time by the threads of the processes below, not by the processes of the machine. A child that begins or ends meanwhile may be missing.
    Source: proc(5), /proc/pid/task/tid/children (Linux 3.5, CONFIG_PROC_CHILDREN).
    """
    rows: dict[int, ProcessRow] = {}
    waiting = list(roots)
    while waiting:
        children = _children(waiting.pop())
        if children is None:
            return read_table()
        for pid in children:
            if pid not in rows and (row := read_row(pid)) is not None:
                rows[pid] = row
                waiting.append(pid)
    return rows


def _children(pid: int) -> list[int] | None:
    """The children of a process; none if it has ended; None if this kernel does not list them."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.isdir(f"/proc/{pid}/task/{thread}"):
                return None
        except ProcessLookupError:
            pass
    return found


def descendants(table: Mapping[int, ProcessRow], roots: Iterable[int]) -> set[int]:
    """The pids below `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: set[int] = set()
    frontier = list(roots)
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            if pid not in found:
                found.add(pid)
                frontier.append(pid)
    return found


def unreclaimable_bytes(row: ProcessRow) -> int:
    """The memory of a process without mapped files, which the kernel can drop; shared pages are divided among the processes that map them.

    Source: proc(5), smaps_rollup (Pss_Anon and Pss_Shmem: Linux 5.4). The resident memory if that cannot be read.
    """
    try:
        with open(f"/proc/{row.pid}/smaps_rollup", "rb") as rollup:
            parts = [line.split() for line in rollup if line.startswith((b"Pss_Anon:", b"Pss_Shmem:"))]
        if parts:
            return sum(int(part[1]) for part in parts) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    except (OSError, ValueError):
        pass
    return row.resident_bytes


def identity(pid: int) -> ProcessIdentity | None:
    """The identity of the process that has this pid now; None for no process and for a zombie."""
    row = read_row(pid)
    return None if row is None or row.dead else row.identity


def alive(process: ProcessIdentity) -> bool:
    """True while exactly this process runs (a zombie does not)."""
    return identity(process.pid) == process


def process_environment(pid: int) -> dict[bytes, bytes]:
    """The environment block of a process, from its memory; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as environ:
            block = environ.readall()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in block.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Signal exactly this process; False if it is gone. Another process that reuses the pid never gets the signal.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return False
        raise
    try:
        # The handle pins the process that has the pid now; the start time then identifies it.
        row = read_row(process.pid)
        if row is None or row.started_ticks != process.started_ticks:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True
