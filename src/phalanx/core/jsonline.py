"""Parsing of untrusted JSON and numbers: lines that ranks report, request bodies."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_INT_MIN: Final = -(2**63)  # the range of databases, msgspec and floats
_INT_MAX: Final = 2**63 - 1
_INT_CHARS_MAX: Final = 20


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if it is not an object or contains an integer of more than 64 bits. Floats may be nan or infinite."""
    try:
        found = json.loads(line, parse_int=int64)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def finite_float(value: object) -> float | None:
    """The value as a finite float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def int64(text: str) -> int:
    """Parse an integer.

    Raises:
        ValueError: not an integer, or of more than 64 bits.
    """
    value = int(text) if len(text) <= _INT_CHARS_MAX else _INT_MAX + 1
    if not _INT_MIN <= value <= _INT_MAX:
        raise ValueError("an integer has more than 64 bits")
    return value
