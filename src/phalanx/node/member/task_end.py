"""The end of a rank's process, as the logic of the supervisor takes it."""

from __future__ import annotations

import time

from phalanx.node.logic.events import TaskEnded
from phalanx.node.logic.images import command_exit
from phalanx.node.logic.lease import NS_PER_S
from phalanx.node.member.member_runtime import MemberRuntime, member_key, rank_of
from phalanx.node.processes.attempt_processes import TaskProcessExit
from phalanx.wire.rank import boottime_ns


def task_end(exit: TaskProcessExit, member: MemberRuntime | None) -> tuple[TaskEnded, int | None]:
    """Return the end of a rank and its pid, if its member knows it, and note in the member that it has ended.

    In a container the exit code is that of the command, not of the program that started the container.
    """
    rank = rank_of(exit.task_id)
    assert rank is not None
    code, signal, pid = exit.code, exit.signal, None
    if member is not None:
        if member.container is not None:
            code, signal = command_exit(exit.code, exit.signal)
        pid = member.pids.pop(rank, None)
        member.crashed = member.crashed or signal is not None
    end = TaskEnded(
        key=member_key(exit.key),
        rank=rank,
        code=code,
        signal=signal,
        ended_ns=exit.ended_ns,
        at_s=time.time() - (boottime_ns() - exit.ended_ns) / NS_PER_S,
        status_unknown=exit.lost,
    )
    return end, pid
