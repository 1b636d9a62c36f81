"""From the controller's thread to the event loop: many answers, one wake-up.

`asyncio.wrap_future` wakes the loop once for each future (a system call each); a group commit ends hundreds at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Answers:
    """Futures of other threads, awaited here. One for each event loop; made inside it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._woken = False
        self._wake = self.soon(self._deliver)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that awaits."""
        return self._loop

    async def of(self, future: Future[T]) -> T:
        """What the other thread answers, or its refusal raised."""
        if future.done():
            return future.result()
        waiter: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(lambda done: self._ended(waiter, done))
        return await waiter

    def soon(self, act: Callable[[], None]) -> Callable[[], None]:
        """What another thread may call to have `act` done on the loop; nothing happens once the loop is closed."""

        def call() -> None:
            try:
                self._loop.call_soon_threadsafe(act)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        return call

    def _ended(self, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        self._done.append((waiter, done))
        # The order is what makes a lost wake-up impossible: append before the test here, clear before the emptying in _deliver.
        if not self._woken:
            self._woken = True
            self._wake()

    def _deliver(self) -> None:
        self._woken = False
        while self._done:
            waiter, done = self._done.popleft()
            if waiter.done():  # its request was given up
                continue
            error = done.exception()
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(done.result())
