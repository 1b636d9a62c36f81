"""The end of the history."""

from __future__ import annotations

from phalanx.ports.store import Store


def newest_seq(store: Store) -> int:
    """Return the seq of the newest line of the history. Seqs are dense and the store pages forward, so bisect: about 40 short reads."""
    history = store.history
    low, high = 0, 1
    while history(after=high, limit=1):
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if history(after=middle, limit=1):
            low = middle + 1
        else:
            high = middle
    return low
