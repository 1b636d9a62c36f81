"""Monitors the ranks of a node: tracks their pace, detects hangs, and collects evidence when one fails.

The loop passes on reports; slow work runs on a pool of its own, so that the report of a task's end does not wait for a checkpoint
verification. Findings go into the loop's inbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from phalanx.node.logic.actions import Freeze, Thaw
from phalanx.node.logic.happenings import Happening, Hung, TaskEnded
from phalanx.node.shell import evidence, stacks
from phalanx.node.shell.hands import Hands
from phalanx.node.shell.kernel_log import KernelLog
from phalanx.node.shell.preparation import Workshop
from phalanx.node.shell.present import Present
from phalanx.node.shell.probes import DeviceFacts
from phalanx.node.shell.reports import RankReport
from phalanx.wire.rank import ReportKind, boottime_ns

HANDS: Final = 2
LOOK_EVERY_S: Final = 0.5  # hang limits are minutes


class Watch:
    """See the module. Thread-safe.

    Args:
        devices: the node's GPUs.
        put: receives the happenings.
    """

    def __init__(self, devices: Iterable[DeviceFacts], put: Callable[[Happening], None]) -> None:
        self.kernel = KernelLog(devices)
        self._put = put
        self._pool = Hands("evidence", HANDS)
        self._pace_lock = threading.Lock()
        self._checked_s = time.monotonic()

    def heard(self, member: Present, report: RankReport) -> None:
        """Update the pace from a rank's report."""
        pace, step = member.pace, report.fields.get("step")
        if pace is None:
            return
        with self._pace_lock:
            if report.kind is ReportKind.STEP and isinstance(step, int):
                pace.stepped(report.rank, step, boottime_ns())
            elif report.kind is ReportKind.BUSY:
                pace.busy()

    def halted(self, member: Present, action: Freeze | Thaw) -> None:
        """The member was frozen or thawed: silence in between is our doing."""
        if member.pace is not None:
            with self._pace_lock:
                if isinstance(action, Freeze):
                    member.pace.hold()
                else:
                    member.pace.go_on(boottime_ns())

    def look(self, presents: Callable[[], Iterable[Present]]) -> None:
        """Report members that hang. Call it every few seconds or more often."""
        now_s = time.monotonic()
        if now_s - self._checked_s < LOOK_EVERY_S:
            return
        self._checked_s = now_s
        for member in presents():
            if member.pace is not None and member.pids and not member.ending:
                with self._pace_lock:
                    silence = member.pace.look(boottime_ns())
                if silence is not None:
                    self._put(Hung(key=member.key, silence=silence))

    def take_stacks(self, member: Present, services: Workshop) -> None:
        """Take the stacks of every rank of a member."""
        with self._pace_lock:
            steps = {} if member.pace is None else member.pace.steps
        stacks.take(member, services, steps)

    def ended(self, member: Present | None, end: TaskEnded, pid: int | None, services: Workshop) -> None:
        """Report a task's end, with evidence if it failed by itself."""
        if member is None or end.code == 0:
            self._put(end)
        elif member.ending:
            self._put(replace(end, evidence=evidence.of_a_hang(member, end.rank)))
        else:
            try:
                self._pool.submit(end.key, lambda: self._collect_and_report(member, end, pid, services))
            except RuntimeError:  # no thread available: the end matters more than its evidence
                self._put(end)

    def _collect_and_report(self, member: Present, end: TaskEnded, pid: int | None, services: Workshop) -> None:
        found = None
        try:
            found = evidence.collect(
                member,
                end.rank,
                signal=end.signal,
                pid=pid,
                began_ns=member.spawned_ns,
                services=services,
                kernel=self.kernel,
            )
        finally:  # report the end in any case
            self._put(replace(end, evidence=found))

    def close(self, timeout_s: float) -> None:
        """Stop collecting evidence."""
        self._pool.close(timeout_s)
        self.kernel.close()
