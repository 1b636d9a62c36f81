"""Measures the CPU time and the host memory of each member, for the samples that go to the head. Reads /proc or cgroups; one thread calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from phalanx.node.logic.events import MemberKey
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.proctable import read_table
from phalanx.wire.supervisor import JobSample


class JobUsageProbe:
    """See the module. `members`: returns the members of the node."""

    def __init__(self, members: Callable[[], Iterable[MemberRuntime]]) -> None:
        self._members = members
        self._newest: dict[MemberKey, JobSample] = {}

    def sample(self) -> list[JobSample]:
        """One sample of each member that runs processes. Neither value falls while its generation lives."""
        read = cache(read_table)  # once for all members
        newest: dict[MemberKey, JobSample] = {}
        for member in self._members():
            if member.processes is None or not member.pids:
                continue
            key, containment = member.key, member.processes.containment
            before = self._newest.get(key)
            newest[key] = JobSample(
                job_id=key.job_id,
                epoch=key.epoch,
                generation=key.generation,
                # The time of a process disappears if its parent never waits for it.
                cpu_s=max(containment.cpu_seconds(read), 0.0 if before is None else before.cpu_s),
                memory_peak_bytes=max(
                    containment.memory_bytes(read), 0 if before is None else before.memory_peak_bytes
                ),
            )
        self._newest = newest
        return list(newest.values())
