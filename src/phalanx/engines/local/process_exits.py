"""Waits for the end of supervisors by pidfds, without looking at them again and again. See pidfd_open(2)."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Collection
from typing import Final

from phalanx.node.processes.proctable import ProcessIdentity, alive

RETRY_S: Final = 0.05  # between two looks at a process without a pidfd, as when this process has no descriptor left


class ProcessExits:
    """One thread waits; any thread may wake it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pidfds: dict[ProcessIdentity, int] = {}
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def wake(self) -> None:
        """End the present or the next wait."""
        with self._guard:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wait(self, processes: Collection[ProcessIdentity], timeout_s: float | None) -> None:
        """Return once one of the processes has ended, after `wake`, or after `timeout_s`; None: no limit."""
        for process in self._pidfds.keys() - set(processes):
            self._forget(process)
        for process in processes:
            if process not in self._pidfds and not self._watch(process):
                timeout_s = RETRY_S if timeout_s is None else min(timeout_s, RETRY_S)
        ready = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        ended = {descriptor for descriptor, _ in ready}
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for process, pidfd in list(self._pidfds.items()):
            if pidfd in ended:
                self._forget(process)

    def close(self) -> None:
        """Close all descriptors."""
        for process in list(self._pidfds):
            self._forget(process)
        with self._guard:
            os.close(self._wake)
            self._wake = -1

    def _watch(self, process: ProcessIdentity) -> bool:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return False
        if not alive(process):  # it has ended, and the pid may be another process by now
            os.close(pidfd)
            return False
        self._poll.register(pidfd, select.POLLIN)
        self._pidfds[process] = pidfd
        return True

    def _forget(self, process: ProcessIdentity) -> None:
        pidfd = self._pidfds.pop(process)
        self._poll.unregister(pidfd)
        os.close(pidfd)
