"""Parses the earliest start of a job: `2h` from now, Unix seconds, or a date and time with its zone. Local times without a zone are
resolved by the command line (`cli.jobs.request.begin_time`): core has no clock.
"""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s

BEGIN_MAX_S: Final = 253_402_300_800.0  # the year 10000; also rejects milliseconds since 1970
_AFTER: Final = re.compile(r"(?:now)?\+?((?:[0-9.]+[smhdw])+)", re.IGNORECASE)
_ZONED: Final = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[T ](\d{2}):(\d{2})(?::(\d{2})(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})", re.IGNORECASE | re.ASCII
)
_HINT: Final = "write 2h for two hours from now, or 2026-12-01T08:00+01:00"


def parse_begin_s(value: object, *, now_s: float | None) -> float:
    """Unix seconds of the earliest start. A time in the past means at once, as in sbatch.

    Args:
        value: Unix seconds, `2h`, `now`, `now+2h`, or `2026-12-01T08:00Z` with any offset.
        now_s: Unix time from which `2h` counts; None if the caller has no clock.

    Raises:
        BadRequest: none of these.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRequest(f"begin: {value!r} is not a time", hint=_HINT)
    text = str(value).strip()
    if re.fullmatch(r"[0-9]{9,}(\.[0-9]+)?", text, re.ASCII):
        return _bounded(float(text), text)
    if (zoned := _ZONED.fullmatch(text)) is not None:
        return _bounded(_unix_s(zoned, text), text)
    after = _AFTER.fullmatch(text)
    if after is None and text.lower() != "now":
        raise BadRequest(f"begin: {text[:40]!r} is not a time with a zone", hint=_HINT)
    if now_s is None:
        raise BadRequest(
            f"begin: {text[:40]!r} is relative to now, which is not accepted here; give an absolute time", hint=_HINT
        )
    return _bounded(now_s + (parse_duration_s(after.group(1), what="begin") if after is not None else 0.0), text)


def begin_text(at_s: float) -> str:
    """The time as a date in UTC that `parse_begin_s` reads back; a fraction of a second as Unix seconds."""
    if not at_s.is_integer():
        return repr(at_s)
    day, second = divmod(int(at_s), 86400)
    year = 1971 + day * 400 // 146_097  # that year or the one before: 400 years have 146,097 days
    while _days_since_1970(year, 1, 1) > day:
        year -= 1
    month = next(month for month in range(12, 0, -1) if _days_since_1970(year, month, 1) <= day)
    of_month = day - _days_since_1970(year, month, 1) + 1
    return f"{year}-{month:02}-{of_month:02}T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"


def _unix_s(zoned: re.Match[str], text: str) -> float:
    year, month, day, hour, minute, second = (int(part or 0) for part in zoned.groups()[:6])
    if not (year >= 1970 and 1 <= month <= 12 and 1 <= day <= _days_in(year, month)):
        raise BadRequest(f"begin: {text!r} is not a valid date", hint=_HINT)
    if hour > 23 or minute > 59 or second > 59:
        raise BadRequest(f"begin: {text!r} is not a valid time of day", hint=_HINT)
    offset_s = 0
    if (zone := zoned.group(8)) not in ("Z", "z"):
        hours, minutes = int(zone[1:3]), int(zone[-2:])
        offset_s = (hours * 3600 + minutes * 60) * (-1 if zone[0] == "-" else 1)
    seconds = _days_since_1970(year, month, day) * 86400 + hour * 3600 + minute * 60 + second - offset_s
    return seconds + float(zoned.group(7) or 0)


def _days_in(year: int, month: int) -> int:
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return (31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]


def _days_since_1970(year: int, month: int, day: int) -> int:
    before = year - 1
    of_years = before * 365 + before // 4 - before // 100 + before // 400 - 719_162  # days of the years 1 to 1969
    return of_years + sum(_days_in(year, earlier) for earlier in range(1, month)) + day - 1


def _bounded(at_s: float, text: str) -> float:
    if not 0.0 <= at_s < BEGIN_MAX_S:
        raise BadRequest(f"begin: {text[:40]!r} is past the year 9999", hint=_HINT)
    return at_s
