"""Threads that do what may take long, so that the loop never waits: in order for each key, side by side over keys."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

_log = logging.getLogger(__name__)


class Hands:
    """A few threads over lanes. One lane (a key) is never worked by two threads, and keeps its order.

    Args:
        name: of the threads.
        count: how many; each starts when there is first something for it to do.
        more: how many may join them, each for as long as one of them is at slow work.
    """

    def __init__(self, name: str, count: int, more: int = 0) -> None:
        self._name = name
        self._count, self._more = count, more
        self._ready: deque[Hashable] = deque()
        self._lanes: dict[Hashable, deque[tuple[Callable[[], None], bool]]] = {}
        self._wake = threading.Condition()
        self._idle = self._slow = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def begin(self) -> None:
        """Have a thread from now on: when it is needed the system may give none."""
        self.submit("first", lambda: None)

    def submit(self, lane: Hashable, work: Callable[[], None], *, slow: bool = False) -> None:
        """Do `work` after everything submitted to this lane before. After `close` it is dropped. `slow`: for minutes, as what a user asks for.

        Raises:
            RuntimeError: there is no thread yet, and none to be had; the work is not done.
        """
        with self._wake:
            if self._closed:
                return
            waiting = self._lanes.get(lane)
            if waiting is not None:
                waiting.append((work, slow))
                return
            self._lanes[lane] = deque([(work, slow)])
            self._ready.append(lane)
            try:
                self._call_one()
            except RuntimeError:
                self._ready.remove(lane)
                del self._lanes[lane]
                raise

    def _call_one(self) -> None:
        if self._idle < len(self._ready) and len(self._threads) < self._count + min(self._slow, self._more):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no thread more
                if not self._threads:
                    raise
                _log.warning("%s goes on with %d threads: %s", self._name, len(self._threads), error)
                self._wake.notify()
            else:
                self._threads.append(thread)  # it looks at this once we let go of the lock
        else:
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Take nothing more, and wait for what is in hand."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in list(self._threads):
            thread.join(timeout_s)

    def _too_many(self) -> bool:
        return len(self._threads) > self._count + min(self._slow, self._more)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._idle += 1
                while not (self._ready or self._closed or self._too_many()):
                    self._wake.wait()
                self._idle -= 1
                if self._too_many() and not self._closed:
                    self._threads.remove(threading.current_thread())
                    self._wake.notify()  # what called this one calls another
                    return
                if not self._ready:
                    return
                lane = self._ready.popleft()
                work, slow = self._lanes[lane][0]
                self._slow += slow
                if slow and self._ready:
                    self._call_one()
            try:
                work()
            except Exception:  # noqa: BLE001  one lane's failure must not take a thread from all others; it is logged whole
                _log.exception("work for %s failed", lane)
            with self._wake:
                waiting = self._lanes[lane]
                waiting.popleft()
                if waiting:
                    self._ready.append(lane)
                    self._wake.notify()
                else:
                    del self._lanes[lane]
                if slow:
                    self._slow -= 1
                    self._wake.notify_all()
