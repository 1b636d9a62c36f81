"""Answers that use the CPU for a while, as plans and forecasts: on a thread, one at a time, and only a few may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from phalanx.api.runtime import run_in_thread
from phalanx.core.errors import TryLater

T = TypeVar("T")

PENDING_MAX: Final = 8  # answers being computed or waiting for it
_one_at_a_time = threading.Lock()
_asking = threading.BoundedSemaphore(PENDING_MAX)


async def in_turn(work: Callable[[], T]) -> T:
    """Compute an answer when no other is computed.

    Raises:
        TryLater: too many requests wait.
    """
    return await run_in_thread(_when_free, work)


def _when_free(work: Callable[[], T]) -> T:
    if not _asking.acquire(blocking=False):
        raise TryLater(f"{PENDING_MAX} such requests are already being answered", hint="try again in a moment")
    try:
        with _one_at_a_time:
            return work()
    finally:
        _asking.release()
