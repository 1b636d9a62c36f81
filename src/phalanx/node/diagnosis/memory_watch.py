"""Watches whether the processes of a member need more memory than its job asked for on this node.

Where cgroups enforce the limit, the kernel has killed a process at it: the others must not continue without it, and the job must be told. Where
nothing enforces it, this is the enforcement: a job over its limit for OVER_S ends. Runs on a thread of its own; measuring reads /proc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Final

from phalanx.core.work.failure import MemoryOveruse
from phalanx.node.logic.events import MemberKey, MemoryExceeded
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.proctable import ProcessRow, read_table

CHECK_EVERY_S: Final = 0.5
OVER_S: Final = 2.0
"""A peak as short as this passes, as while a process forks and executes: then its memory is counted twice for a moment."""
_log = logging.getLogger(__name__)


class MemoryWatch:
    """See the module.

    Args:
        members: the members of the node.
        on_event: receives a MemoryExceeded for each member that is over, once.
        ended: set when the supervisor ends.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[MemberRuntime]],
        on_event: Callable[[MemoryExceeded], None],
        ended: threading.Event,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._put, self._ended, self._clock = members, on_event, ended, clock
        self._over_since_s: dict[MemberKey, float] = {}

    def run(self) -> None:
        """Check until the supervisor ends."""
        while not self._ended.wait(CHECK_EVERY_S):
            try:
                self.check()
            except Exception:  # noqa: BLE001  one odd process must not end the watch over all jobs
                _log.exception("a check of the memory of jobs failed")

    def check(self) -> None:
        """Check every member once."""
        over: dict[MemberKey, float] = {}
        read = cache(read_table)  # once for all members
        for member in self._members():
            use = _overuse(member, read)
            if use is None or member.processes is None:
                continue
            over[member.key] = self._over_since_s.get(member.key, self._clock())
            if member.processes.containment.limits.measured and self._clock() - over[member.key] < OVER_S:
                continue
            member.memory_overuse = use  # first, so that the ends of its tasks carry it
            self._put(MemoryExceeded(key=member.key, use=use))
        self._over_since_s = over


def _overuse(member: MemberRuntime, read: Callable[[], Mapping[int, ProcessRow]]) -> MemoryOveruse | None:
    """What a member uses above its limit; None for one that is within it, runs nothing, or was reported."""
    if member.processes is None or member.memory_overuse is not None or not member.prepare.spec.role.memory_bytes:
        return None
    if member.start is not None and not member.pids:  # its tasks have ended
        return None
    return member.processes.memory_overuse(read)
