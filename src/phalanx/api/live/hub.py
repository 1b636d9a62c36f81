"""Wakes followers of logs and events on the event loop when their job changes.

Changes made by API routes wake followers at once; other changes are seen at the next check (`Limits.recheck_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from phalanx.core.ids import JobId


class FollowerWakeup:
    """One follower's wake-up. `wait` returns if it was rung since the last call, at the timeout, or when the head closes."""

    def __init__(self, hub: FollowerHub, key: object) -> None:
        self._hub = hub
        self._key = key
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._hub.add(self, self._key)
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.remove(self, self._key)

    def notify(self) -> None:
        """Wake the follower."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until it is rung, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()


class Broadcast:
    """Wakes all its waiters each time it is rung. Use it on the event loop only."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        """Wake the current waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until it is rung, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


class FollowerHub:
    """All followers, by what they follow. Use it on the event loop only."""

    def __init__(self) -> None:
        self._watches: dict[object, set[FollowerWakeup]] = {}
        self.closing = False
        self.follower_count = 0

    def follow(self, job_id: JobId | None) -> FollowerWakeup:
        """Return a wake-up for changes of one job, or of any job with None; use it as a context manager."""
        return FollowerWakeup(self, job_id)

    def private_wakeup(self) -> FollowerWakeup:
        """Return a wake-up that only its owner and the closing of the head ring."""
        return FollowerWakeup(self, object())

    def notify(self, job_ids: Iterable[JobId]) -> None:
        """Wake the followers of these jobs."""
        for job_id in set(job_ids):
            for watch in self._watches.get(job_id, ()):
                watch.notify()
        for watch in self._watches.get(None, ()):
            watch.notify()

    def close(self) -> None:
        """Wake every follower so that it ends, since the head stops."""
        self.closing = True
        for watches in self._watches.values():
            for watch in watches:
                watch.notify()

    def add(self, watch: FollowerWakeup, key: object) -> None:
        """Add a follower."""
        self._watches.setdefault(key, set()).add(watch)
        self.follower_count += 1

    def remove(self, watch: FollowerWakeup, key: object) -> None:
        """Remove a follower."""
        watches = self._watches[key]
        watches.discard(watch)
        if not watches:
            del self._watches[key]
        self.follower_count -= 1
