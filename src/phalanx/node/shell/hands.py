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
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._ready: deque[Hashable] = deque()
        self._lanes: dict[Hashable, deque[Callable[[], None]]] = {}
        self._wake = threading.Condition()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, lane: Hashable, work: Callable[[], None]) -> None:
        """Do `work` after everything submitted to this lane before. After `close` it is dropped."""
        with self._wake:
            if self._closed:
                return
            waiting = self._lanes.get(lane)
            if waiting is not None:
                waiting.append(work)
                return
            self._lanes[lane] = deque([work])
            self._ready.append(lane)
            if self._idle < len(self._ready) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Take nothing more, and wait for what is in hand."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._idle += 1
                while not self._ready and not self._closed:
                    self._wake.wait()
                self._idle -= 1
                if not self._ready:
                    return
                lane = self._ready.popleft()
                work = self._lanes[lane][0]
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
