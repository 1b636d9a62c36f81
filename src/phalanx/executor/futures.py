"""Futures of an Executor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any

from phalanx.core.errors import PhalanxError


class ExecutorBroken(BrokenExecutor, PhalanxError):
    """The Executor's job has ended: by its user, its time limit, or too many failures. Its tasks will never run."""

    code = "executor_broken"

    def __init__(self, message: str, *, hint: str = "") -> None:
        PhalanxError.__init__(self, message, hint=hint)


class WorkerDied(BrokenExecutor, PhalanxError):
    """The worker ended twice while it ran this task. The other tasks go on."""

    code = "worker_died"

    def __init__(self, message: str, *, hint: str = "") -> None:
        PhalanxError.__init__(self, message, hint=hint)


class RemoteTraceback(Exception):
    """The traceback on the worker, as the cause of an exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class TaskFuture(Future[Any]):
    """A `concurrent.futures.Future` that also knows where it ran.

    Attributes:
        number: of the task in its Executor.
        node: name of the node that made the result; empty before.
        worker: number of the worker there; -1 before.
        seconds: how long the function ran; 0 before.
    """

    def __init__(self, number: int, on_cancel: Callable[[int], None]) -> None:
        super().__init__()
        self.number = number
        self.node, self.worker, self.seconds = "", -1, 0.0
        self._on_cancel = on_cancel

    def start(self) -> None:
        """A worker has the task: it cannot be cancelled any more."""
        with self._condition:
            if not self.running() and not self.done():
                self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the task unless a worker has it. Return whether it is cancelled."""
        before = self.cancelled()
        if not super().cancel():
            return False
        if not before:
            self.set_running_or_notify_cancel()  # tell those who wait
            self._on_cancel(self.number)
        return True
