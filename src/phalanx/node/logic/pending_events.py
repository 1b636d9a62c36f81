"""Events on their way to the head, numbered in order and stored until the head acknowledges that they are durable."""

from __future__ import annotations

from collections import deque
from typing import Final

from phalanx.core.state.reports import MemberStopped, Report

PENDING_MAX: Final = 100_000  # far more than an outage can produce: without a lease nothing runs, so no new events come
BATCH_MAX: Final = 512  # events in one request


class PendingEvents:
    """The queue. Not thread-safe: the caller locks."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Report]] = deque()
        self._last = 0
        self.dropped = 0

    def put(self, event: Report) -> int:
        """Number an event and store it.

        Past KEPT_MAX the oldest event is dropped that is not a MemberStopped, because the head waits for those.
        """
        self._last += 1
        self._events.append((self._last, event))
        if len(self._events) > PENDING_MAX:
            oldest = next((item for item in self._events if not isinstance(item[1], MemberStopped)), self._events[0])
            self._events.remove(oldest)
            self.dropped += 1
        return self._last

    def batch(self, limit: int = BATCH_MAX) -> list[tuple[int, Report]]:
        """Return the oldest unacknowledged events, in order."""
        return [self._events[index] for index in range(min(limit, len(self._events)))]

    def acknowledge(self, seq: int) -> None:
        """Remove everything up to `seq`, which is durable. An older or repeated acknowledgement changes nothing."""
        while self._events and self._events[0][0] <= seq:
            self._events.popleft()

    def discard(self, seq: int) -> None:
        """Remove one event that the head permanently refuses."""
        self._events = deque(item for item in self._events if item[0] != seq)

    def __len__(self) -> int:
        return len(self._events)
