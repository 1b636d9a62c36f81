"""Events on their way to the head: numbered in order, kept until the head says they are durable."""

from __future__ import annotations

from collections import deque
from typing import Final

from phalanx.core.state.events import MemberStopped, Report

KEPT_MAX: Final = (
    100_000  # without a lease nothing runs and nothing new happens, so this holds far more than an outage can make
)
BATCH_MAX: Final = 512  # events in one request


class Outgoing:
    """The queue. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Report]] = deque()
        self._last = 0
        self.dropped = 0

    def put(self, event: Report) -> int:
        """Number an event and keep it.

        Past KEPT_MAX the oldest goes that is no MemberStopped: those the head waits for, the others it can do without.
        """
        self._last += 1
        self._kept.append((self._last, event))
        if len(self._kept) > KEPT_MAX:
            oldest = next((item for item in self._kept if not isinstance(item[1], MemberStopped)), self._kept[0])
            self._kept.remove(oldest)
            self.dropped += 1
        return self._last

    def batch(self, limit: int = BATCH_MAX) -> list[tuple[int, Report]]:
        """The oldest events not acknowledged, in order."""
        return [self._kept[index] for index in range(min(limit, len(self._kept)))]

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` is durable. An older or repeated acknowledgement changes nothing."""
        while self._kept and self._kept[0][0] <= seq:
            self._kept.popleft()

    def discard(self, seq: int) -> None:
        """Give up one event that the head refuses for good."""
        self._kept = deque(item for item in self._kept if item[0] != seq)

    def __len__(self) -> int:
        return len(self._kept)
