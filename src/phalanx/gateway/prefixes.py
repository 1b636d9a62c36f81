"""Which replicas have read the beginning of a prompt before: hashes of chained blocks of bytes. Pure.

Bytes, not tokens: a tokenizer would cost more than the routing (llm-d's routers need cores for it), and engines cache by the beginning anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

import xxhash

FINE_BYTES: Final = 256  # about 64 tokens: short shared instructions differ in their blocks
FINE_BLOCKS: Final = 16
COARSE_BYTES: Final = 1024
COARSE_BLOCKS: Final = 64
LONG_BYTES: Final = (
    4096  # beyond 68 KiB: at most a sixteenth of the prompt is not compared, and a hash costs more than 4 KiB of it
)
BLOCKS_MAX: Final = 4096  # 16 MiB
KNOWN_MAX: Final = 400_000
"""Hashes of one generation. Two of them are about 60 MB, and hold the caches of 100 replicas of 2 MB of text each."""


def block_bytes(number: int) -> int:
    """Return how many bytes a block has, by its number."""
    if number < FINE_BLOCKS:
        return FINE_BYTES
    return COARSE_BYTES if number < FINE_BLOCKS + COARSE_BLOCKS else LONG_BYTES


def prefix_hashes(prompt: bytes) -> list[int]:
    """Return a hash for the end of each whole block; each covers everything before it."""
    state, at = xxhash.xxh3_64(), 0
    found: list[int] = []
    view = memoryview(prompt)
    while len(found) < BLOCKS_MAX:
        end = at + block_bytes(len(found))
        if end > len(view):
            break
        state.update(view[at:end])
        found.append(state.intdigest())
        at = end
    return found


class PrefixIndex:
    """The blocks that each replica of one service was given, the oldest forgotten first.

    Replicas are small numbers (`slot`). There are two generations: a full one becomes the older one, which is dropped when the next is full,
    so that blocks that are used go on. `changes`: how often it was changed.
    """

    def __init__(self, known_max: int = KNOWN_MAX) -> None:
        self._known_max = known_max
        self._recent: dict[int, int] = {}  # hash -> bits of slots
        self._older: dict[int, int] = {}
        self.changes = 0

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def add(self, hashes: Iterable[int], slot: int) -> None:
        """Note that the replica has read these blocks."""
        bit, recent = 1 << slot, self._recent
        self.changes += 1
        for one in hashes:
            recent[one] = recent.get(one, 0) | bit
        if len(recent) > self._known_max:
            self._older, self._recent = recent, {}

    def matches(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return how many of the first blocks each replica has read, by slot; replicas with none are left out."""
        found: dict[int, int] = {}
        alive, recent, older = -1, self._recent, self._older
        for number, one in enumerate(hashes):
            here = (recent.get(one, 0) | older.get(one, 0)) & alive
            if here != alive:
                _put(found, 0 if alive == -1 else alive & ~here, number)
            if not here:
                return found
            alive = here
        _put(found, 0 if alive == -1 else alive, len(hashes))
        return found

    def forget(self, slots: Iterable[int]) -> None:
        """Drop all of replicas that have gone: their slots may be given to others."""
        gone = sum(1 << slot for slot in set(slots))
        self.changes += 1
        for known in (self._recent, self._older):
            for one in [one for one, bits in known.items() if bits & gone]:
                left = known[one] & ~gone
                if left:
                    known[one] = left
                else:
                    del known[one]

    def copies(self) -> list[dict[int, int]]:
        """Return the bits of slots by hash, in both generations, the older one first."""
        return [self._older.copy(), self._recent.copy()]

    def merge(self, generations: Sequence[Mapping[int, int]]) -> None:
        """Take over what `copies` returned, here or elsewhere, as far as there is room."""
        self.changes += 1
        for mine, other in zip((self._older, self._recent), generations, strict=True):
            if not mine:
                mine.update(islice(other.items(), max(0, len(other) - self._known_max), None))
                continue
            for one, bits in other.items():
                if one in mine or len(mine) < self._known_max:
                    mine[one] = mine.get(one, 0) | bits


def _put(found: dict[int, int], bits: int, blocks: int) -> None:
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = blocks
        bits ^= lowest
