"""When threads with a period wake: all at the same moments."""

from __future__ import annotations


def until_tick_s(period_s: float, now_s: float) -> float:
    """Return the seconds until `now_s` is the next multiple of the period; the whole period if it is one now.

    Threads of one process that wait so wake together. What a wake-up of an idle process costs is mostly what it must load into the caches
    again, and threads that wake together load it once.

    Args:
        period_s: of the thread.
        now_s: of a steady clock, the same for all threads.
    """
    return period_s - now_s % period_s
