"""Parsing and formatting of durations, memory sizes and byte counts."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest

GIB: Final = 1 << 30
MIB: Final = 1 << 20
_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
# Digits are bounded: above 4,300 of them Python's int() raises, and above 308 a float is infinite.
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([smhdw])")
_CLOCK: Final = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,3}):([0-9]{2})(?::([0-9]{2}))?")
_MEMORY: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:(k|m|g|t)(?:i?b)?)?", re.IGNORECASE)
_MEMORY_UNIT: Final = {"k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40}


def parse_duration_s(text: object, *, what: str = "time") -> float:
    """Parse `2h`, `90m`, `1h30m`, `HH:MM`, `HH:MM:SS` or `D-HH:MM:SS` into seconds.

    Raises:
        BadRequest: not a duration, or a bare number (ambiguous: minutes in Slurm, seconds elsewhere).
    """
    if isinstance(text, (int, float)) or (isinstance(text, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip())):
        raise BadRequest(
            f"{what}: {text!r} has no unit", hint=f"write {text}m for minutes, {text}h for hours or {text}s for seconds"
        )
    if not isinstance(text, str):
        raise BadRequest(f"{what}: {text!r} is not a duration", hint="write 90m, 2h, 1-12:00:00")
    words = text.strip().lower()
    if clock := _CLOCK.fullmatch(words):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        if minutes > 59 or seconds > 59:
            raise BadRequest(
                f"{what}: {text!r} has more than 59 minutes or seconds", hint="write HH:MM:SS or D-HH:MM:SS"
            )
        return days * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds
    parts = _PART.findall(words)
    if not parts or "".join(number + unit for number, unit in parts) != words.replace(" ", ""):
        raise BadRequest(f"{what}: {text!r} is not a duration", hint="write 90m, 2h, 1h30m, HH:MM:SS or D-HH:MM:SS")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """Format seconds with at most two units: `43s`, `12m08s`, `3h05m`, `2d04h`."""
    whole = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_latency(seconds: float) -> str:
    """Format a short time: `85ms`, `2.4s`."""
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else format_duration(seconds)


def exact_duration(seconds: float) -> str:
    """Format seconds so that `parse_duration_s` gives them again: `2h`, `1h30m`, `1d12h`, `2.5s`."""
    if not seconds.is_integer():
        return f"{seconds:.9f}".rstrip("0") + "s"
    left, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_UNIT_S[unit]))
        parts.append(f"{count}{unit}" if count else "")
    return "".join(parts) or "0s"


def parse_memory_bytes(text: object, *, what: str = "memory") -> int:
    """Parse `64`, `64G`, `64GiB` or `512M` into bytes; a bare number is GiB (DESIGN 4).

    Raises:
        BadRequest: not an amount of memory.
    """
    match = (
        _MEMORY.fullmatch(str(text).strip())
        if isinstance(text, (int, float, str)) and not isinstance(text, bool)
        else None
    )
    if match is None:
        raise BadRequest(f"{what}: {text!r} is not an amount of memory", hint="write 64 for 64 GiB, or 512M")
    number, unit = match.groups()
    return int(float(number) * _MEMORY_UNIT[(unit or "g").lower()])


def format_bytes(count: float) -> str:
    """Format a byte count in the largest binary unit that gives at least 1: `512 B`, `3.2 MiB`, `80 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            text = f"{count:.0f}" if unit == "B" or abs(count) >= 100 else f"{count:.1f}"
            return f"{text.removesuffix('.0')} {unit}"
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + " TiB"
