"""Replaces the values of secrets in the output of a task, before any of it is written or sent.

Pure. Output arrives in pieces: the end of a piece that may be the beginning of a value is held until more arrives or the output ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.work.secret import VALUE_CHARS_MIN

MASK: Final = b"***"


class OutputMasker:
    """The masks of one pipe. `values`: of the secrets; of a value with several lines, each line of at least 8 characters is masked by itself too."""

    def __init__(self, values: Iterable[str]) -> None:
        self._needles = _needles(values)
        self._held = b""
        self._covered = 0  # bytes at the beginning of `_held` for which a mask was already returned

    def feed(self, piece: bytes) -> bytes:
        """Return what can be written after this piece."""
        data = self._held + piece
        return self._take(data, self._possible_start(data))

    def finish(self) -> bytes:
        """Return the rest, at the end of the output."""
        return self._take(self._held, len(self._held))

    def mask(self, text: bytes) -> bytes:
        """Return a complete text with its values masked; independent of the output."""
        if not any(needle in text for needle in self._needles):
            return text
        return _replace(text, _found(text, self._needles), len(text), 0)

    def _take(self, data: bytes, end: int) -> bytes:
        """Return `data` up to `end` with masks, and hold the rest."""
        found = _found(data, self._needles)
        written = _replace(data, found, end, self._covered)
        past = next((stop - end for start, stop in found if start < end < stop), 0)
        self._covered = max(past, self._covered - end, 0)
        self._held = data[end:]
        return written

    def _possible_start(self, data: bytes) -> int:
        """Return the first place from which the rest of `data` is the beginning of a value, but not all of it."""
        first = len(data)
        for needle in self._needles:
            at = data.find(needle[:1], max(0, len(data) - len(needle) + 1))
            while 0 <= at < first:
                if needle.startswith(data[at:]):
                    first = at
                    break
                at = data.find(needle[:1], at + 1)
        return first


def _needles(values: Iterable[str]) -> tuple[bytes, ...]:
    found: set[str] = set()
    for value in values:
        parts = [value, value.strip(), *(line.strip() for line in value.splitlines())]
        found.update(part for part in parts if len(part) >= VALUE_CHARS_MIN)
    return tuple(sorted((one.encode(errors="surrogateescape") for one in found), key=lambda one: (-len(one), one)))


def _found(data: bytes, needles: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """Return where values are, in order; overlapping places are one."""
    places: list[tuple[int, int]] = []
    for needle in needles:
        at = data.find(needle)
        while at >= 0:
            places.append((at, at + len(needle)))
            at = data.find(needle, at + 1)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _replace(data: bytes, found: list[tuple[int, int]], end: int, covered: int) -> bytes:
    """Return `data` up to `end` with a mask for each place; for the first `covered` bytes it was already written."""
    pieces: list[bytes] = []
    at = min(covered, end)
    for start, stop in found:
        if start >= end:
            break
        if stop <= at:
            continue
        if start >= at:
            pieces += [data[at:start], MASK]
        at = min(stop, end)
    return b"".join([*pieces, data[at:end]])
