"""Watches whether the processes of a member need more memory than its job asked for on this node.

Where cgroups enforce the limit, the kernel has killed a process at it: the others must not continue without it, and the job ends with the figures. Where
nothing enforces it, this is the enforcement: a job over its limit for OVER_S ends. So does a job that uses more of a shared device's memory than its share: MPS limits
what a program allocates, not what the driver adds to it. Runs on a thread of its own; measuring reads /proc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Final

from phalanx.core.work.failure import MemoryOveruse
from phalanx.core.work.share import ShareKind
from phalanx.node.logic.events import MemberKey, MemoryExceeded
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.probes.devices import DeviceReading
from phalanx.node.processes.attempt_processes import AttemptProcesses
from phalanx.node.processes.proctable import ProcessRow, read_table

CHECK_EVERY_S: Final = 0.5
_IDLE_S: Final = 5.0  # a member ends this wait; so the thread also ends with its supervisor
OVER_S: Final = 2.0
"""A peak as short as this passes, as while a process forks and executes: then its memory is counted twice for a moment."""
_log = logging.getLogger(__name__)


class MemoryWatch:
    """See the module.

    Args:
        members: the members of the node.
        on_event: receives a MemoryExceeded for each member that is over, once.
        ended: set when the supervisor ends.
        devices: returns the latest samples of the node's devices, by index.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        members: Callable[[], Collection[MemberRuntime]],
        on_event: Callable[[MemoryExceeded], None],
        ended: threading.Event,
        *,
        devices: Callable[[], Mapping[int, DeviceReading]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._put, self._ended, self._clock = members, on_event, ended, clock
        self._devices = devices
        self._over_since_s: dict[MemberKey, float] = {}
        self._some = threading.Event()

    def wake(self) -> None:
        """Begin to check: a member was added."""
        self._some.set()

    def run(self) -> None:
        """Check until the supervisor ends."""
        while not self._ended.is_set():
            if not self._members():
                self._some.wait(_IDLE_S)
                self._some.clear()
                continue
            if self._ended.wait(CHECK_EVERY_S):
                return
            try:
                self.check()
            except Exception:  # noqa: BLE001  one odd process must not end the watch over all jobs
                _log.exception("a check of the memory of jobs failed")

    def check(self) -> None:
        """Check every member once."""
        over: dict[MemberKey, float] = {}
        read = cache(read_table)  # once for all members
        devices = self._devices()
        for member in self._members():
            use, enforced = _overuse(member, read, devices)
            if use is None:
                continue
            over[member.key] = self._over_since_s.get(member.key, self._clock())
            if not enforced and self._clock() - over[member.key] < OVER_S:
                continue
            member.memory_overuse = use  # first, so that the ends of its tasks carry it
            self._put(MemoryExceeded(key=member.key, use=use))
        self._over_since_s = over


def _overuse(
    member: MemberRuntime, read: Callable[[], Mapping[int, ProcessRow]], devices: Mapping[int, DeviceReading]
) -> tuple[MemoryOveruse | None, bool]:
    """What a member uses above a limit, and whether the kernel enforced it. None: it is within its limits, runs nothing, or was reported."""
    if member.processes is None or member.memory_overuse is not None:
        return None, False
    if member.start is not None and not member.pids:  # its tasks have ended
        return None, False
    limited = member.prepare.spec.role_of(member.grant).memory_bytes
    use = member.processes.memory_overuse(read) if limited else None
    if use is not None:
        return use, not member.processes.containment.limits.measured
    return _gpu_overuse(member, member.processes, read, devices), False


def _gpu_overuse(
    member: MemberRuntime,
    processes: AttemptProcesses,
    read: Callable[[], Mapping[int, ProcessRow]],
    devices: Mapping[int, DeviceReading],
) -> MemoryOveruse | None:
    """What its processes use of a shared device above its share. Time slices have no limit."""
    share = member.grant.share
    if share is None or share.kind is not ShareKind.MPS:
        return None
    index = member.grant.devices[0]
    reading = devices.get(index)
    if reading is None or not reading.process_bytes:
        return None
    used_bytes = sum(reading.process_bytes.get(pid, 0) for pid in processes.members(read))
    if used_bytes <= share.memory_bytes or used_bytes > (reading.memory_total_bytes or used_bytes):
        return None
    return MemoryOveruse(used_bytes=used_bytes, asked_bytes=share.memory_bytes, gpu=index)
