"""Parse and format amounts in plans: tokens, Gbit/s, dollars, bytes, seconds. Pure."""

from __future__ import annotations

import math
import re
from typing import Final

from phalanx.core.errors import BadRequest

_TOKENS: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmbt])?", re.IGNORECASE)
_TIMES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_USD: Final = re.compile(r"\$?\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)")
TOKENS_MAX: Final = 1e16  # 1,000 times the largest training run; bounds a typo
SEQUENCES_MAX: Final = 1 << 30  # positions or sequences; bounds a typo
_DAY_S: Final = 86_400.0


def parse_tokens(text: object) -> float:
    """Parse a number of tokens: `300B`, `1.5T`, `20000000`.

    Raises:
        BadRequest: not a number, below 1, or above `TOKENS_MAX`.
    """
    match = _TOKENS.fullmatch(str(text).strip())
    count = float(match[1]) * _TIMES[(match[2] or "").lower()] if match else 0.0
    if not 1 <= count <= TOKENS_MAX:
        raise BadRequest(f"tokens: {text!r} is not a number of tokens", hint="example: 300B or 1.5T")
    return count


def parse_switch(text: object, *, what: str) -> bool | None:
    """Parse `on` or `off`; None is not stated.

    Raises:
        BadRequest: neither.
    """
    if text is None:
        return None
    word = str(text).strip().lower()
    if word not in {"on", "off"}:
        raise BadRequest(f"{what}: {str(text)[:60]!r} must be on or off")
    return word == "on"


def parse_count(text: object, *, what: str) -> int:
    """Parse a number of positions or sequences.

    Raises:
        BadRequest: not a positive integer.
    """
    words = str(text).strip()
    if not re.fullmatch(r"[0-9]{1,10}", words) or not 1 <= int(words) <= SEQUENCES_MAX:
        raise BadRequest(f"{what}: {words[:40]!r} is not a positive integer")
    return int(words)


def parse_usd(text: object) -> float:
    """Parse US dollars per GPU-hour.

    Raises:
        BadRequest: not an amount.
    """
    match = _USD.fullmatch(str(text).strip())
    if match is None:
        raise BadRequest(f"price: {text!r} is not an amount in US dollars", hint="example: 2.69 per GPU-hour")
    return float(match[1])


# ---- format ---------------------------------------------------------------------------------------------------------


def format_tokens(count: float) -> str:
    """Format tokens: `300B`, `1.5T`."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """Format a step time: `1.92 s`, `34.1 ms`, `90 µs`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_decimal_bytes(count: float) -> str:
    """Format bytes in decimal units, as the planner's sources do: `1.12 TB`, `74.3 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{_three_digits(count / 1e6)} MB"


def format_span(seconds: float, like_s: float | None = None) -> str:
    """Format a training time: `23 days`, `5.2 days`, `3.1 hours`, `12 minutes`; in the unit that `like_s` would have."""
    for unit, size in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if (seconds if like_s is None else like_s) >= 2 * size:
            return f"{format_rounded(seconds / size)} {unit}"
    return f"{seconds:.3g} seconds"


def format_usd(usd: float) -> str:
    """Format dollars with two significant digits: `$49,000`, `$3.20`."""
    return f"${usd:.2f}" if usd < 10 else f"${format_rounded(usd)}"


def format_rounded(value: float) -> str:
    """Round to two or three significant digits: `540`, `12,300`, `3.4M`."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    for letter, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{_rounded(value / size)}{letter}"
    return _rounded(value)


def format_parameters(count: float) -> str:
    """Format a number of parameters: `124M`, `70.6B`, `1.01T`."""
    return format_tokens(count)


def _rounded(value: float) -> str:
    digits = 1 - math.floor(math.log10(value))
    if value >= 100 and str(value)[0] == "1":
        digits += 1  # 1,240 rather than 1,200: a leading 1 carries little precision
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def _three_digits(value: float) -> str:
    """Format three significant digits with trailing zeros: `7.20`, `12.5`, `1,240`."""
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
