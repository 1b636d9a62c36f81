"""Who waits for news of what: followers of logs and events, woken on the event loop.

News that pass through our own routes wake at once; anything else is seen at the next look (`Limits.recheck_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from phalanx.core.ids import JobId


class Watch:
    """One follower's bell. `wait` returns when it rang since the last call, when time is up, or when the head closes."""

    def __init__(self, hub: Hub, key: object) -> None:
        self._hub = hub
        self._key = key
        self._bell = asyncio.Event()

    def __enter__(self) -> Self:
        self._hub.enter(self, self._key)
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.leave(self, self._key)

    def ring(self) -> None:
        """Wake the follower."""
        self._bell.set()

    async def wait(self, timeout_s: float) -> None:
        """Until the bell rings, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()


class Bell:
    """Wakes everybody who waits for it, as often as it is rung. Used on the event loop alone."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake those who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it is rung, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


class Hub:
    """All followers. Used on the event loop alone."""

    def __init__(self) -> None:
        self._watches: dict[object, set[Watch]] = {}
        self.closing = False
        self.followers = 0

    def watch(self, job_id: JobId | None) -> Watch:
        """A bell for one job, or for all of them with None; use it as a context manager."""
        return Watch(self, job_id)

    def bell(self) -> Watch:
        """A bell that only its owner and the head's closing ring."""
        return Watch(self, object())

    def tell(self, job_ids: Iterable[JobId]) -> None:
        """Something happened to these jobs."""
        for job_id in set(job_ids):
            for watch in self._watches.get(job_id, ()):
                watch.ring()
        for watch in self._watches.get(None, ()):
            watch.ring()

    def close(self) -> None:
        """The head stops: every follower is woken and told to end."""
        self.closing = True
        for watches in self._watches.values():
            for watch in watches:
                watch.ring()

    def enter(self, watch: Watch, key: object) -> None:
        """Add a follower."""
        self._watches.setdefault(key, set()).add(watch)
        self.followers += 1

    def leave(self, watch: Watch, key: object) -> None:
        """Take a follower out."""
        watches = self._watches[key]
        watches.discard(watch)
        if not watches:
            del self._watches[key]
        self.followers -= 1
