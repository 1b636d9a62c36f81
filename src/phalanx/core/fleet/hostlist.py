"""Host lists such as `gpu[001-004,007]`, accepted wherever nodes are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from phalanx.core.errors import BadRequest

_BRACKET: Final = re.compile(r"([^\[\],]*)\[([^\[\]]+)\]([^\[\],]*)")
_HOSTS_MAX: Final = 100_000  # more than any fleet; bounds a typo like [0-999999999]
_TEXT_MAX: Final = 1 << 20  # characters: _HOSTS_MAX names of ten
_NUMBER: Final = re.compile(r"[0-9]{1,9}")  # ASCII digits only: "²".isdigit() is true, but int("²") fails
_TRAILING: Final = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Names in the order written, duplicates dropped.

    Raises:
        BadRequest: unbalanced brackets, an empty or descending range, or more than 100,000 names.
    """
    if len(text) > _TEXT_MAX:
        raise BadRequest(f"host list {text[:60]!r} ... is longer than {_TEXT_MAX} characters")
    names: dict[str, None] = {}
    seen = 0
    for word in _split(text):
        for name in _expand_word(word.strip()):
            names[name] = None
            seen += 1  # duplicates count too: [0-99999,0-99999, ...] must not exceed the limit on work
            if seen > _HOSTS_MAX:
                raise BadRequest(f"host list {text[:60]!r} names more than {_HOSTS_MAX} nodes")
    if not names:
        raise BadRequest("the host list is empty", hint="write gpu[001-004,007] or n0,n1")
    return tuple(names)


def _split(text: str) -> list[str]:
    words, depth, current = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            words.append(current)
            current = ""
        else:
            current += char
    if depth != 0:
        raise BadRequest(f"host list {text[:60]!r}: brackets do not match", hint="write gpu[001-004,007]")
    return [word for word in [*words, current] if word.strip()]


def _expand_word(word: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(word)
    if match is None:
        if "[" in word or "]" in word:
            raise BadRequest(
                f"host list entry {word[:60]!r}: only one [...] is allowed in a name", hint="write gpu[001-004,007]"
            )
        yield word
        return
    head, inside, tail = match.groups()
    for part in inside.split(","):
        first, dash, last = part.strip().partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise BadRequest(f"host list entry {word[:60]!r}: {part[:30]!r} is neither a number nor a range")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low >= _HOSTS_MAX:
            raise BadRequest(f"host list entry {word[:60]!r}: range {part!r} is descending or too long")
        for number in range(low, high + 1):
            yield f"{head}{number:0{len(first)}d}{tail}"


def fold_hostlist(names: list[str]) -> str:
    """The shortest host list for sorted names that differ in a trailing number: `gpu[001-004,007]`."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = _TRAILING.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((match.group(1), len(match.group(2))), []).append(int(match.group(2)))
    words = plain
    for (head, width), numbers in groups.items():
        runs = _runs(sorted(set(numbers)))
        if len(runs) == 1 and runs[0][0] == runs[0][1]:
            words.append(f"{head}{runs[0][0]:0{width}d}")
        else:
            inside = ",".join(f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs)
            words.append(f"{head}[{inside}]")
    return ",".join(words)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
