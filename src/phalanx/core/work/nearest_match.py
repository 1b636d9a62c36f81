"""The nearest match to a mistyped word, shared by the head and the command line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

_WORD_MAX: Final = 64  # longer words are not typos of a key or verb; the cost is the product of the lengths


def nearest_match(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was most likely meant to be, or None if none is near.

    Case and `-` against `_` do not count. One typo (a letter inserted, missing, replaced, or two swapped) is allowed for every three letters; a
    choice that begins with `word` counts as near too. Ties are resolved to the smaller choice.
    """
    typed = _normalized(word)
    if not typed or len(typed) > _WORD_MAX:
        return None
    allowed = max(1, len(typed) // 3)
    best: tuple[int, str] | None = None
    for choice in choices:
        normalized = _normalized(choice)
        distance = _distance(typed, normalized)
        if distance > allowed and not (len(typed) >= 2 and normalized.startswith(typed)):
            continue
        if best is None or (distance, choice) < best:
            best = (distance, choice)
    return None if best is None else best[1]


def suggestion(word: str, choices: Iterable[str], otherwise: str = "", *, form: str = "{}") -> str:
    """The hint for an unknown word: `did you mean X?` with the nearest choice in this form, or `otherwise` if none is near."""
    near = nearest_match(word, choices)
    return f"did you mean {form.format(near)}?" if near else otherwise


def unknown_key_hint(key: str, known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """The hint for an unknown key: the known key that was most likely meant, else all known keys.

    `synonyms` maps names of the keys in other tools, in lower case without `-` and `_`, to the known keys.
    """
    synonym = synonyms.get(key.lower().replace("_", "").replace("-", ""))
    near = synonym if synonym in known else nearest_match(key, known)
    return f"did you mean {near!r}?" if near else f"known keys: {' '.join(known)}"


def _normalized(word: str) -> str:
    return word.strip().lower().replace("_", "-").lstrip("-")


def _distance(left: str, right: str) -> int:
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
