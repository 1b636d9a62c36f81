"""Passes answers from the controller's thread to the event loop: many answers with one wake-up.

`asyncio.wrap_future` wakes the loop once per future (a system call each); a group commit completes hundreds at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ControllerFutures:
    """Awaits futures that other threads complete. Make one per event loop, inside that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._woken = False
        self._wake = self.threadsafe_callback(self._deliver)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that awaits."""
        return self._loop

    async def result_of(self, future: Future[T]) -> T:
        """Return the result of a future of another thread, or raise its exception."""
        if future.done():
            return future.result()
        waiter: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(lambda done: self._ended(waiter, done))
        return await waiter

    def threadsafe_callback(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a function that other threads may call to run `act` on the loop; once the loop is closed it does nothing."""

        def call() -> None:
            try:
                self._loop.call_soon_threadsafe(act)
            except RuntimeError:  # the loop is closed
                pass

        return call

    def _ended(self, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        self._done.append((waiter, done))
        # This order rules out a lost wake-up: append before the test here, and in _deliver clear the flag before the loop.
        if not self._woken:
            self._woken = True
            self._wake()

    def _deliver(self) -> None:
        self._woken = False
        while self._done:
            waiter, done = self._done.popleft()
            if waiter.done():  # its request was cancelled
                continue
            error = done.exception()
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(done.result())
