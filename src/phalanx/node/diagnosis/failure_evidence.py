"""Collects evidence of a failed task: its last lines of output, XIDs of its devices, OOM kills.

Called when a task has failed by itself; the head's rules evaluate the evidence. Bounded in time and size.
"""

from __future__ import annotations

import contextlib
from typing import Final

from phalanx.core.work.failure import FailureEvidence, StuckPosition
from phalanx.node.logic.evidence import last_lines
from phalanx.node.member.member_runtime import MemberRuntime, rank_task_id
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.probes.kernel_log import KernelLog

TAIL_BYTES: Final = 16_384  # a traceback of a deep framework has some hundred lines; the last ones matter
_DRAIN_S: Final = 0.3  # for output left in the dead task's pipe, which its children may keep open
_FAILING_MAX: Final = 4  # tasks of one member whose evidence is collected: the first to die are not follow-on failures
_SIGKILL: Final = 9


def oom_kills() -> int | None:
    """Number of OOM kills on this machine; None if the kernel does not report it.

    Source: /proc/vmstat, `oom_kill` (Linux 4.13); includes kills in memory cgroups.
    """
    try:
        with open("/proc/vmstat", "rb", buffering=0) as stat:
            text = stat.read()
    except OSError:
        return None
    # Read before each start: parsing all 150 lines would take longer than reading them.
    _, name, value = text.partition(b"\noom_kill ")
    return int(value.split(maxsplit=1)[0]) if name else None


def collect_evidence(
    member: MemberRuntime,
    rank: int,
    *,
    signal: int | None,
    pid: int | None,
    began_ns: int,
    services: NodeServices,
    kernel: KernelLog,
) -> FailureEvidence:
    """Collect the evidence of this exit. Takes a fraction of a second."""
    kernel.poll()
    pids = [] if pid is None else [pid]
    use = member.find_memory_overuse()
    oom = use is not None or kernel.oom_killed(began_ns, pids)
    if not oom and signal == _SIGKILL:
        oom = _oom_count_grew(member)
    tail = b""
    if member.evidence_collected < _FAILING_MAX:
        member.evidence_collected += 1
        tail = _tail(member, rank, services)
    own = member.prepare.spec.env
    return FailureEvidence(
        lines=last_lines(tail, (value for _, value in own)),
        xids=kernel.xids(began_ns, member.grant.devices),
        oom_killed=oom,
        memory=use,
    )


def hang_evidence(member: MemberRuntime, rank: int) -> FailureEvidence | None:
    """The stuck position of a rank whose gang was stopped for a hang."""
    position: StuckPosition | None = member.stuck_positions.get(rank)
    return None if position is None else FailureEvidence(stuck_position=position)


def _oom_count_grew(member: MemberRuntime) -> bool:
    """Whether the count of OOM kills grew since the member's tasks started: of its own cgroup if available, else of the machine."""
    for before, now in (
        (member.oom_kills_before, None if member.processes is None else member.processes.oom_kills()),
        (member.machine_oom_kills_before, oom_kills()),
    ):
        if before is not None and now is not None:
            return now > before
    return False


def _tail(member: MemberRuntime, rank: int, services: NodeServices) -> bytes:
    with contextlib.suppress(KeyError, OSError):
        stream = services.stream_key(member, rank_task_id(rank))
        if not services.spool.closed(stream):
            services.spool.drain(stream, _DRAIN_S)
        return services.spool.tail(stream, TAIL_BYTES, member.stream_starts.get(rank, 0))
    return b""
