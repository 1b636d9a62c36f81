"""Takes the stacks of a member's ranks before it is stopped for a hang: from `faulthandler` in ranks with phalanx.torch, py-spy, and /proc.

Each rank's stacks go into a stream of the attempt (`stacks-<rank>`), which `phalanx logs JOB --stacks` prints; its stuck position goes to
the head with its exit. Bounded: some seconds, and 64 KiB per rank. A rank that is stopped by a signal cannot answer, and /proc shows that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from typing import Final

from phalanx.core.work.failure import StuckPosition
from phalanx.node.logic.evidence import stack_position
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.processes.proctable import (
    ProcessIdentity,
    descendants,
    identity,
    read_row,
    read_table,
    send_signal,
)
from phalanx.wire.rank import STACK_SIGNAL, stack_file

STACK_BYTES_MAX: Final = 65_536
_ANSWER_S: Final = 1.0  # the dump is written in the signal handler: milliseconds, if the process runs at all
_SETTLE_S: Final = 0.05
_SPY_S: Final = 2.0
_ALL_S: Final = 6.0  # for all ranks together: a kill of the member waits for it
_STOPPED: Final = "Tt"
_PROC_FILES: Final = ("wchan", "syscall", "stack")  # the last is readable by root only


def take_stacks(member: MemberRuntime, services: NodeServices, steps: Mapping[int, int]) -> None:
    """Store the stacks of every live rank, and its stuck position in `member.stuck_positions`."""
    until_s = time.monotonic() + _ALL_S
    pids = dict(sorted(member.pids.items()))
    table = read_table()
    inside = {rank: _python_of(member, rank, pid, descendants(table, [pid])) for rank, pid in pids.items()}
    before = {rank: _size(member, rank, pid) for rank, pid in inside.items()}
    for rank, pid in inside.items():
        if before[rank] is not None:
            _signal(pid)
    for rank, pid in inside.items():
        dump = _answer(member, rank, pid, before[rank], min(until_s, time.monotonic() + _ANSWER_S))
        if not dump and time.monotonic() < until_s - _SPY_S:
            dump = _py_spy_dump(pid, services.base.get("PATH", os.defpath))
        row = read_row(pid)
        where, waits = stack_position(dump)
        member.stuck_positions[rank] = StuckPosition(
            state="" if row is None else row.state, frame=where, in_collective=waits, step=steps.get(rank)
        )
        _keep(member, services, rank, pid, dump)


def _python_of(member: MemberRuntime, rank: int, task: int, below: set[int]) -> int:
    """The process, out of a task and its descendants, that dumps its stack on a signal; the task itself if none does."""
    family = {task, *below}
    with contextlib.suppress(OSError):
        for name in os.listdir(member.scratch.path):
            kind, _, number = name.rpartition(".")
            if kind == f"stack-{rank}" and number.isdecimal() and int(number) in family:
                return int(number)
    return task


def _size(member: MemberRuntime, rank: int, pid: int) -> int | None:
    """The size of its dump so far; None for a process that does not handle the signal, and would die of it."""
    try:
        found = os.lstat(stack_file(member.scratch.path, rank, pid))
    except OSError:
        return None
    return found.st_size if _belongs_to_job(member, found) else None


def _belongs_to_job(member: MemberRuntime, found: os.stat_result) -> bool:
    """Whether it is a regular file of the job's account: a link, or another account's file, would be read with our rights."""
    account = member.account
    return stat.S_ISREG(found.st_mode) and (account is None or found.st_uid == account.uid)


def _signal(pid: int) -> None:
    process: ProcessIdentity | None = identity(pid)
    if process is not None:
        with contextlib.suppress(OSError):
            send_signal(process, STACK_SIGNAL)


def _answer(member: MemberRuntime, rank: int, pid: int, before: int | None, until_s: float) -> str:
    """The rank's dump, once it has stopped growing; "" if none arrives in time."""
    if before is None:
        return ""
    path, size = stack_file(member.scratch.path, rank, pid), before
    while time.monotonic() < until_s:
        row = read_row(pid)
        if row is None or row.state in _STOPPED:
            return ""
        time.sleep(_SETTLE_S)
        now = _size(member, rank, pid) or 0
        if now > before and now == size:
            break
        size = now
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _belongs_to_job(member, os.fstat(file)):
                return os.pread(file, STACK_BYTES_MAX, before).decode("utf-8", "replace")
        finally:
            os.close(file)
    return ""


def _py_spy_dump(pid: int, path: str) -> str:
    """A dump by py-spy, if it is installed and permitted; "" otherwise."""
    program = shutil.which("py-spy", path=path)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:STACK_BYTES_MAX].decode("utf-8", "replace") if done.returncode == 0 else ""


def _keep(member: MemberRuntime, services: NodeServices, rank: int, pid: int, dump: str) -> None:
    position = member.stuck_positions[rank]
    step = "no step yet" if position.step is None else f"last step {position.step}"
    lines = [f"generation {member.key.generation}: rank {rank}, pid {pid}, state {position.state or 'gone'}, {step}"]
    lines += [f"{name}: {text}" for name in _PROC_FILES if (text := _proc(pid, name))]
    if position.state in _STOPPED:
        lines.append("no stack: the process is stopped by a signal and cannot answer")
    elif not dump:
        lines.append("no stack: the process does not use phalanx.torch, and py-spy is not installed")
    text = "\n".join([*lines, dump.rstrip()])[:STACK_BYTES_MAX]
    with contextlib.suppress(OSError, KeyError):
        services.spool.write(services.stream_key(member, f"stacks-{rank}"), f"{text}\n\n".encode())


def _proc(pid: int, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return " <- ".join(file.read(4096).decode("utf-8", "replace").split("\n")).strip(" <-")
    return ""
