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

from phalanx.core.work.failure import FailureEvidence
from phalanx.node.diagnosis import failure_evidence, stack_dumps
from phalanx.node.logic.actions import FreezeMember, ThawMember
from phalanx.node.logic.events import HangDetected, SupervisorEvent, TaskEnded
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.rank_reports import RankReport
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.probes.devices import DeviceFacts
from phalanx.node.probes.kernel_log import KernelLog
from phalanx.node.processes.thread_pool import KeyedThreadPool
from phalanx.wire.rank import ReportKind, boottime_ns

EVIDENCE_THREADS: Final = 2
CHECK_EVERY_S: Final = 0.5  # hang limits are minutes


class RankMonitor:
    """See the module. Thread-safe.

    Args:
        devices: the node's GPUs.
        put: receives the happenings.
    """

    def __init__(self, devices: Iterable[DeviceFacts], on_event: Callable[[SupervisorEvent], None]) -> None:
        self.kernel_log = KernelLog(devices)
        self._put = on_event
        self._pool = KeyedThreadPool("evidence", EVIDENCE_THREADS)
        self._pace_lock = threading.Lock()
        self._checked_s = time.monotonic()

    def on_report(self, member: MemberRuntime, report: RankReport) -> None:
        """Update the pace from a rank's report."""
        pace, step = member.pace, report.fields.get("step")
        if pace is None:
            return
        with self._pace_lock:
            if report.kind is ReportKind.STEP and isinstance(step, int):
                pace.record_step(report.rank, step, boottime_ns())
            elif report.kind is ReportKind.BUSY:
                pace.mark_busy()

    def on_freeze_or_thaw(self, member: MemberRuntime, action: FreezeMember | ThawMember) -> None:
        """The member was frozen or thawed: silence in between is our doing."""
        if member.pace is not None:
            with self._pace_lock:
                if isinstance(action, FreezeMember):
                    member.pace.pause()
                else:
                    member.pace.resume(boottime_ns())

    def check_for_hangs(self, presents: Callable[[], Iterable[MemberRuntime]]) -> None:
        """Report members that hang. Call it every few seconds or more often."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        for member in presents():
            if member.pace is not None and member.pids and not member.asked_to_end:
                with self._pace_lock:
                    silence = member.pace.check(boottime_ns())
                if silence is not None:
                    self._put(HangDetected(key=member.key, hang=silence))

    def take_stacks(self, member: MemberRuntime, services: NodeServices) -> None:
        """Take the stacks of every rank of a member."""
        with self._pace_lock:
            steps = {} if member.pace is None else member.pace.steps
        stack_dumps.take_stacks(member, services, steps)

    def on_task_end(
        self, member: MemberRuntime | None, end: TaskEnded, pid: int | None, services: NodeServices
    ) -> None:
        """Report a task's end, with evidence if it failed by itself."""
        if member is None or end.code == 0:
            self._put(end)
        elif member.memory_overuse is not None:
            # Without a look at its output: the kill that follows must not be reported as done before this end.
            self._put(replace(end, evidence=FailureEvidence(oom_killed=True, memory=member.memory_overuse)))
        elif member.asked_to_end:
            self._put(replace(end, evidence=failure_evidence.hang_evidence(member, end.rank)))
        else:
            try:
                self._pool.submit(end.key, lambda: self._collect_and_report(member, end, pid, services))
            except RuntimeError:  # no thread available: the end matters more than its evidence
                self._put(end)

    def _collect_and_report(
        self, member: MemberRuntime, end: TaskEnded, pid: int | None, services: NodeServices
    ) -> None:
        found = None
        try:
            found = failure_evidence.collect_evidence(
                member,
                end.rank,
                signal=end.signal,
                pid=pid,
                began_ns=member.spawned_ns,
                services=services,
                kernel=self.kernel_log,
            )
        finally:  # report the end in any case
            self._put(replace(end, evidence=found))

    def close(self, timeout_s: float) -> None:
        """Stop collecting evidence."""
        self._pool.close(timeout_s)
        self.kernel_log.close()
