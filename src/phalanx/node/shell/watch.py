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

    def heard(self, present: Present, report: RankReport) -> None:
        """A rank reported: learn its pace."""
        pace, step = present.pace, report.fields.get("step")
        if pace is None:
            return
        with self._paces:
            if report.kind is ReportKind.STEP and isinstance(step, int):
                pace.stepped(report.rank, step, boottime_ns())
            elif report.kind is ReportKind.BUSY:
                pace.busy()

    def halted(self, present: Present, action: Freeze | Thaw) -> None:
        """The member is frozen, or goes on: silence in between is our doing."""
        if present.pace is not None:
            with self._paces:
                if isinstance(action, Freeze):
                    present.pace.hold()
                else:
                    present.pace.go_on(boottime_ns())

    def look(self, presents: Callable[[], Iterable[Present]]) -> None:
        """Tell of members that hang. Harmless as often as one likes; it must be called every few seconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for present in presents():
            if present.pace is not None and present.pids and not present.ending:
                with self._paces:
                    silence = present.pace.look(boottime_ns())
                if silence is not None:
                    self._put(Hung(key=present.key, silence=silence))

    def take_stacks(self, present: Present, shop: Workshop) -> None:
        """Keep where every rank of a member stands."""
        with self._paces:
            steps = {} if present.pace is None else present.pace.steps
        stacks.take(present, shop, steps)

    def ended(self, present: Present | None, end: TaskEnded, pid: int | None, shop: Workshop) -> None:
        """A task ended: tell it, with what can be found of why if that was its own doing."""
        if present is None or end.code == 0:
            self._put(end)
        elif present.ending:
            self._put(replace(end, evidence=evidence.of_a_hang(present, end.rank)))
        else:
            try:
                self._finders.submit(end.key, lambda: self._find(present, end, pid, shop))
            except RuntimeError:  # no thread to be had: the end counts more than why
                self._put(end)

    def _find(self, present: Present, end: TaskEnded, pid: int | None, shop: Workshop) -> None:
        found = None
        try:
            found = evidence.collect(
                present,
                end.rank,
                signal=end.signal,
                pid=pid,
                began_ns=present.spawned_ns,
                shop=shop,
                kernel=self.kernel,
            )
        finally:  # whatever happens to the evidence, the end is told
            self._put(replace(end, evidence=found))

    def close(self, timeout_s: float) -> None:
        """Find nothing more."""
        self._finders.close(timeout_s)
        self.kernel.close()
