"""Watches the ranks of a node: learns their pace and notices hangs while they run, and finds out why one ended badly.

The loop passes on what it hears; whatever may take a moment is done by hands of its own, so that the end of a task is not told behind a
checkpoint being verified. What is found goes back into the loop's inbox.
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
LOOK_EVERY_S: Final = 0.5  # for hangs, which are minutes


class Watch:
    """See the module. Thread-safe.

    Args:
        devices: the node's GPUs.
        put: where happenings go.
    """

    def __init__(self, devices: Iterable[DeviceFacts], put: Callable[[Happening], None]) -> None:
        self.kernel = KernelLog(devices)
        self._put = put
        self._finders = Hands("evidence", HANDS)
        self._paces = threading.Lock()
        self._looked_s = time.monotonic()

    def heard(self, member: Present, report: RankReport) -> None:
        """A rank reported: learn its pace."""
        pace, step = member.pace, report.fields.get("step")
        if pace is None:
            return
        with self._paces:
            if report.kind is ReportKind.STEP and isinstance(step, int):
                pace.stepped(report.rank, step, boottime_ns())
            elif report.kind is ReportKind.BUSY:
                pace.busy()

    def halted(self, member: Present, action: Freeze | Thaw) -> None:
        """The member is frozen, or goes on: silence in between is our doing."""
        if member.pace is not None:
            with self._paces:
                if isinstance(action, Freeze):
                    member.pace.hold()
                else:
                    member.pace.go_on(boottime_ns())

    def look(self, presents: Callable[[], Iterable[Present]]) -> None:
        """Tell of members that hang. Harmless as often as one likes; it must be called every few seconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for member in presents():
            if member.pace is not None and member.pids and not member.ending:
                with self._paces:
                    silence = member.pace.look(boottime_ns())
                if silence is not None:
                    self._put(Hung(key=member.key, silence=silence))

    def take_stacks(self, member: Present, services: Workshop) -> None:
        """Keep where every rank of a member stands."""
        with self._paces:
            steps = {} if member.pace is None else member.pace.steps
        stacks.take(member, services, steps)

    def ended(self, member: Present | None, end: TaskEnded, pid: int | None, services: Workshop) -> None:
        """A task ended: tell it, with what can be found of why if that was its own doing."""
        if member is None or end.code == 0:
            self._put(end)
        elif member.ending:
            self._put(replace(end, evidence=evidence.of_a_hang(member, end.rank)))
        else:
            try:
                self._finders.submit(end.key, lambda: self._find(member, end, pid, services))
            except RuntimeError:  # no thread to be had: the end counts more than why
                self._put(end)

    def _find(self, member: Present, end: TaskEnded, pid: int | None, services: Workshop) -> None:
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
        finally:  # whatever happens to the evidence, the end is told
            self._put(replace(end, evidence=found))

    def close(self, timeout_s: float) -> None:
        """Find nothing more."""
        self._finders.close(timeout_s)
        self.kernel.close()
