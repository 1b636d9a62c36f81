"""What an engine observes, from its own threads, until the head takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Observations(Generic[T]):
    """A queue of events that wakes the head. Any thread may append; the head alone takes."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._wake: Callable[[], None] = lambda: None

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each event."""
        self._wake = wake

    def append(self, event: T) -> None:
        """Add an event."""
        self._waiting.append(event)
        self._wake()

    def extend(self, events: Iterable[T]) -> None:
        """Add events; the head is woken if there are any."""
        before = len(self._waiting)
        self._waiting.extend(events)
        if len(self._waiting) != before:
            self._wake()

    def take(self) -> list[T]:
        """Return and remove the events, in order. Never blocks."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken
