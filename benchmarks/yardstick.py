"""A fixed piece of work of the interpreter, to divide other figures by: machines, and minutes on one machine, differ by a factor of two.

The work is what a scheduler in Python mostly does: reads and writes of a dict, small tuples, comparisons and additions. It must never
change: figures of different commits are compared by it, and a test holds its digest.
"""

from __future__ import annotations

import time
from typing import Final

TURNS: Final = 5_000_000
KEYS: Final = 10_000
DIGEST: Final = 0xE084_CD3C  # of TURNS turns


def turn(turns: int = TURNS) -> int:
    """Do so many turns on 10,000 keys; return a digest of the result, of 32 bits."""
    table = {key: (key, key ^ 0x5BD1, 0) for key in range(KEYS)}
    at = digest = 0
    for number in range(turns):
        key = at % KEYS
        low, high, count = table[key]
        if low < high:
            low += number & 0xFF
        else:
            high += number & 0x7F
        table[key] = (low, high, count + 1)
        at = at * 1_103_515_245 + 12_345 & 0x7FFF_FFFF
    for low, high, count in table.values():
        digest = (digest * 31 + low * 7 + high * 3 + count) & 0xFFFF_FFFF
    return digest


def yardstick_s() -> float:
    """Return the processor seconds that the work takes now.

    Raises:
        AssertionError: the work has changed.
    """
    begun_s = time.process_time()
    assert turn() == DIGEST, "the yardstick has changed: figures can no longer be compared with earlier ones"
    return time.process_time() - begun_s
