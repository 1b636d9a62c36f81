"""Collects the evidence of a task's bad end: the last lines it printed, XIDs of its devices, kills for want of memory.

Called by the loop's hands when a task has failed by itself; what was found is judged by the head's rules. Bounded in time and size.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from phalanx.core.work.failure import Evidence, Stance
from phalanx.node.logic.evidence import last_lines
from phalanx.node.shell.kernel_log import KernelLog
from phalanx.node.shell.preparation import Workshop
from phalanx.node.shell.present import Present, task_id

TAIL_BYTES: Final = 16_384  # a traceback of a deep framework has some hundred lines; the last ones are what counts
_DRAIN_S: Final = 0.3  # for what the dead task left in its pipe, which its children may hold open for ever
_FAILING_MAX: Final = 4  # tasks of one member whose evidence is collected: the first to die are not the echo
_SIGKILL: Final = 9


def oom_kills() -> int | None:
    """How many processes the kernel has killed on this machine for want of memory; None where it does not say.

    Source: /proc/vmstat, `oom_kill` (Linux 4.13); memory cgroups count into it too.
    """
    try:
        with open("/proc/vmstat", encoding="ascii") as stat:
            return next((int(line.split()[1]) for line in stat if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def oom_events(folder: str | None) -> int | None:
    """The same of one cgroup and those inside it; None where the memory controller is not on there."""
    if folder is None:
        return None
    with (
        contextlib.suppress(OSError, ValueError),
        open(os.path.join(folder, "memory.events"), encoding="ascii") as events,
    ):
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), None)
    return None


def collect(
    member: Present,
    rank: int,
    *,
    signal: int | None,
    pid: int | None,
    began_ns: int,
    services: Workshop,
    kernel: KernelLog,
) -> Evidence:
    """What can be found of this end. Takes a fraction of a second."""
    kernel.poll()
    pids = [] if pid is None else [pid]
    oom = kernel.oom_killed(began_ns, pids)
    if not oom and signal == _SIGKILL:
        oom = _counted(member)
    tail = b""
    if member.failed < _FAILING_MAX:
        member.failed += 1
        tail = _tail(member, rank, services)
    own = member.prepare.spec.env
    return Evidence(
        lines=last_lines(tail, (value for _, value in own)),
        xids=kernel.xids(began_ns, member.grant.devices),
        oom_killed=oom,
    )


def of_a_hang(member: Present, rank: int) -> Evidence | None:
    """Where a rank stood when its gang was ended for a hang."""
    stance: Stance | None = member.stances.get(rank)
    return None if stance is None else Evidence(stance=stance)


def _counted(member: Present) -> bool:
    """Whether a count of such kills grew since the member's tasks began: of its own cgroup where that counts, else of the machine."""
    for before, now in (
        (member.oom_before, oom_events(member.cgroup)),
        (member.oom_before_here, oom_kills()),
    ):
        if before is not None and now is not None:
            return now > before
    return False


def _tail(member: Present, rank: int, services: Workshop) -> bytes:
    with contextlib.suppress(KeyError, OSError):
        stream = services.stream(member, task_id(rank))
        if not services.spool.closed(stream):
            services.spool.drain(stream, _DRAIN_S)
        end = services.spool.end(stream)
        begin = max(member.spawned_at.get(rank, 0), end - TAIL_BYTES)
        return services.spool.read(stream, begin, end - begin)
    return b""
