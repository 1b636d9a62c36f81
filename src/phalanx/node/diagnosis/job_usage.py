"""Measures the CPU time and the host memory of each member, for the samples that go to the head. Reads /proc or cgroups; one thread calls it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from phalanx.node.logic.events import MemberKey
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.containment import Containment
from phalanx.node.processes.proctable import ProcessRow, read_table
from phalanx.wire.supervisor import JobSample

EVERY_S: Final = (
    2.0  # between two looks: without cgroups, one reads the whole process table, about 15 us for each process
)
_log = logging.getLogger(__name__)


class JobUsageProbe:
    """See the module.

    Args:
        members: returns the members of the node.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, members: Callable[[], Iterable[MemberRuntime]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._members, self._clock = members, clock
        self._looked_s = -math.inf
        self._newest: dict[MemberKey, JobSample] = {}

    def sample(self) -> list[JobSample]:
        """One sample of each member that runs processes, at most EVERY_S old. Neither value falls while its generation lives."""
        if self._clock() - self._looked_s < EVERY_S:
            return list(self._newest.values())
        self._looked_s = self._clock()
        read = cache(read_table)  # once for all members
        newest: dict[MemberKey, JobSample] = {}
        for member in self._members():
            if member.processes is None or not member.pids:
                continue
            try:
                newest[member.key] = self._measure(member.key, member.processes.containment, read)
            except Exception:  # noqa: BLE001  one odd process must not end the samples of all devices
                _log.exception("the processes of job %s cannot be measured", member.key.job_id)
        self._newest = newest
        return list(newest.values())

    def _measure(
        self, key: MemberKey, containment: Containment, read: Callable[[], dict[int, ProcessRow]]
    ) -> JobSample:
        before = self._newest.get(key)
        return JobSample(
            job_id=key.job_id,
            epoch=key.epoch,
            generation=key.generation,
            # The time of a process disappears if its parent never waits for it.
            cpu_s=max(containment.cpu_seconds(read), 0.0 if before is None else before.cpu_s),
            memory_peak_bytes=max(containment.memory_bytes(read), 0 if before is None else before.memory_peak_bytes),
        )
