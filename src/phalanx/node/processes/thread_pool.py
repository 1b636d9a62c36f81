"""Thread pool for slow work, so that the loop never waits: in order for each key, in parallel across keys."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

_log = logging.getLogger(__name__)


class KeyedThreadPool:
    """A small thread pool. Work with the same key (lane) runs in order, never on two threads.

    Args:
        name: prefix of the thread names.
        count: number of threads; each starts when it is first needed.
        more: how many extra threads may start, one for each that runs slow work.
    """

    def __init__(self, name: str, threads: int, extra_threads: int = 0) -> None:
        self._name = name
        self._count, self._more = threads, extra_threads
        self._ready: deque[Hashable] = deque()
        self._lanes: dict[Hashable, deque[tuple[Callable[[], None], bool]]] = {}
        self._wake = threading.Condition()
        self._idle = self._slow = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start_first_thread(self) -> None:
        """Start a first thread now: later the system may refuse one."""
        self.submit("first", lambda: None)

    def submit(self, lane: Hashable, work: Callable[[], None], *, slow: bool = False) -> None:
        """Run `work` after all earlier work of this lane. After `close` it is dropped. `slow`: may take minutes, as work that a user defines.

        Raises:
            RuntimeError: there is no thread, and none can be started; the work is not done.
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
                self._wake_or_start_thread()
            except RuntimeError:
                self._ready.remove(lane)
                del self._lanes[lane]
                raise

    def _wake_or_start_thread(self) -> None:
        if self._idle < len(self._ready) and len(self._threads) < self._count + min(self._slow, self._more):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system refuses another thread
                if not self._threads:
                    raise
                _log.warning("%s continues with %d threads: %s", self._name, len(self._threads), error)
                self._wake.notify()
            else:
                self._threads.append(thread)  # it checks the queue once we release the lock
        else:
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Accept no more work, and wait for the current work."""
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
                    self._wake.notify()  # pass the wake-up on to another thread
                    return
                if not self._ready:
                    return
                lane = self._ready.popleft()
                work, slow = self._lanes[lane][0]
                self._slow += slow
                if slow and self._ready:
                    self._wake_or_start_thread()
            try:
                work()
            except Exception:  # noqa: BLE001  a failure in one lane must not end a thread that all lanes share
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
