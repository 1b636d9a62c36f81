"""JSON and numbers of strangers, as a line that a rank reported or a body: whoever reads one reads what may have been written to harm."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_INT_MIN: Final = -(2**63)  # what databases, msgspec and floats take
_INT_MAX: Final = 2**63 - 1
_INT_CHARS_MAX: Final = 20


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none, or one with an integer of more than 64 bits. Floats may be nan or infinite."""
    try:
        found = json.loads(line, parse_int=int64)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def finite(value: object) -> float | None:
    """A number that is one; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def int64(text: str) -> int:
    """The integer that a text is.

    Raises:
        ValueError: it is none, or has more than 64 bits.
    """
    value = int(text) if len(text) <= _INT_CHARS_MAX else _INT_MAX + 1
    if not _INT_MIN <= value <= _INT_MAX:
        raise ValueError("an integer of more than 64 bits")
    return value
