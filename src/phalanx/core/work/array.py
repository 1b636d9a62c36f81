"""Element numbers of a job array, in Slurm's grammar: `0-99`, `0-99%8` (at most eight at once), `1,3,7-20:2%4`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

ELEMENTS_MAX: Final = 10_000  # all are stored in one commit; ten times Slurm's default (MaxArraySize 1001)
INDEX_MAX: Final = 4_000_000  # the largest MaxArraySize that Slurm accepts
_TEXT_MAX: Final = 80_000  # characters; the longest list of ELEMENTS_MAX single numbers has fewer
_PART: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
_HINT: Final = "write 0-99, 0-99%8 for at most 8 at once, or 1,3,7-20:2"


@dataclass(frozen=True, slots=True)
class ArrayRequest:
    """The elements requested. `indices` ascend, each once; `running_max` is how many may run at once, None for all."""

    indices: tuple[int, ...]
    running_max: int | None = None

    def __str__(self) -> str:
        """The shortest text that means the same, without `running_max`."""
        return format_indices(self.indices)


def parse_array(text: object) -> ArrayRequest:
    """The elements that a text names, in any order; duplicates count once.

    Raises:
        BadRequest: outside the grammar, no element, more than ELEMENTS_MAX of them, or a number past INDEX_MAX.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise BadRequest(f"array: {text!r} is not a list of elements", hint=_HINT)
    words = str(text).replace(" ", "")
    if len(words) > _TEXT_MAX:
        raise BadRequest(f"array: {len(words)} characters are too many", hint=_HINT)
    numbers, percent, most = words.partition("%")
    if percent and not re.fullmatch(r"[0-9]{1,10}", most):
        raise BadRequest(f"array: {most[:40]!r} after % is not a number of elements", hint=_HINT)
    if percent and int(most) == 0:
        raise BadRequest("array: no element could run with %0", hint="leave %0 out, or submit it held")
    found: set[int] = set()
    for part in numbers.split(","):
        found.update(_numbers(part))
        if len(found) > ELEMENTS_MAX:
            raise BadRequest(f"array: more than {ELEMENTS_MAX} elements", hint="submit it in several parts")
    return ArrayRequest(indices=tuple(sorted(found)), running_max=int(most) if percent else None)


def format_indices(indices: Iterable[int]) -> str:
    """Numbers as a text in the same grammar: `0-3,7,10-16:2`; steps are used from three numbers on."""
    left = sorted(set(indices))
    parts: list[str] = []
    place = 0
    while place < len(left):
        end = _run_end(left, place)
        step = left[place + 1] - left[place] if end > place else 1
        if end - place == 1 and step > 1:  # two numbers are not a pattern
            end, step = place, 1
        first, last = left[place], left[end]
        parts.append(str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        place = end + 1
    return ",".join(parts)


def _run_end(numbers: list[int], place: int) -> int:
    """The last position of the evenly spaced run that begins at `place`."""
    end = place + 1
    if end >= len(numbers):
        return place
    step = numbers[end] - numbers[place]
    while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == step:
        end += 1
    return end


def _numbers(part: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise BadRequest(f"array: {part[:40]!r} is neither a number nor a range", hint=_HINT)
    first, last, step = (int(number) if number else None for number in match.groups())
    assert first is not None  # guaranteed by the grammar
    last, step = first if last is None else last, 1 if step is None else step
    if last > INDEX_MAX or first > INDEX_MAX:
        raise BadRequest(f"array: element {max(first, last)} is past {INDEX_MAX}", hint="number them from 0")
    if last < first:
        raise BadRequest(f"array: {part} ends before it begins", hint=f"write {last}-{first}")
    if step == 0:
        raise BadRequest(f"array: {part} has a step of 0", hint=_HINT)
    numbers = range(first, last + 1, step)
    if len(numbers) > ELEMENTS_MAX:
        raise BadRequest(
            f"array: {part} has {len(numbers)} elements; at most {ELEMENTS_MAX}", hint="submit it in several parts"
        )
    return numbers
