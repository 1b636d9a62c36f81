"""The nearest match to a mistyped word. Pure, so that the head and the command line suggest the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WORD_MAX: Final = 64  # longer words are no typo of a key or verb, and the distance costs their product


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was most likely meant to be, or None when none is near.

    Case and `-` against `_` do not count. One slip (a letter more, less, other, or two swapped) is allowed for every three
    letters; a choice that begins with `word` counts as near too. Ties end in the smaller choice.
    """
    typed = _plain(word)
    if not typed or len(typed) > _WORD_MAX:
        return None
    allowed = max(1, len(typed) // 3)
    best: tuple[int, str] | None = None
    for choice in choices:
        plain = _plain(choice)
        slips = _slips(typed, plain)
        if slips > allowed and not (len(typed) >= 2 and plain.startswith(typed)):
            continue
        if best is None or (slips, choice) < best:
            best = (slips, choice)
    return None if best is None else best[1]


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-").lstrip("-")


def _slips(left: str, right: str) -> int:
    """Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours, each 1."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        last, before, row = before, row, [i] + [0] * len(right)
        for j, b in enumerate(right, start=1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]
