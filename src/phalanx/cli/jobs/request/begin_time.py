"""Parses begin times in local time. The head needs a time with a zone, and only this side knows the local one."""

from __future__ import annotations

import re
import time
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.begin_time import parse_begin_s

_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_DATE: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{1,2}:\d{2}(?::\d{2})?))?", re.IGNORECASE)
_HINT: Final = "write 2h for two hours from now, 16:00, or 2026-12-01T08:00"


def with_zone(text: str, now_s: float) -> str:
    """Convert a local time to Unix seconds; return other texts unchanged.

    `16:00` is the next time the clock shows it, as in sbatch; a date alone is its midnight.

    Raises:
        BadRequest: the text is not a time.
    """
    words = text.strip()
    try:
        local_s = _local_s(words, now_s)
    except (ValueError, OverflowError):  # 30 February, or a year outside the range of the C library
        raise BadRequest(f"begin: {words[:40]!r} is not a valid day or time", hint=_HINT) from None
    if local_s is not None:
        return f"{local_s:.0f}"
    try:
        parse_begin_s(words, now_s=now_s)
    except BadRequest as error:
        raise BadRequest(error.message.replace(" with a zone", ""), hint=_HINT) from None
    return words


def format_time(at_s: float, now_s: float) -> str:
    """Format a local time, with the date unless it is today."""
    then, now = time.localtime(at_s), time.localtime(now_s)
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def _local_s(words: str, now_s: float) -> float | None:
    if (clock := _CLOCK.fullmatch(words)) is not None:
        today = time.strftime("%Y-%m-%d", time.localtime(now_s))
        at_s = _unix_s(today, clock[0])
        if at_s > now_s:
            return at_s
        noon_s = _unix_s(today, "12:00")  # a day may have 23 hours
        return _unix_s(time.strftime("%Y-%m-%d", time.localtime(noon_s + 86400)), clock[0])
    if (date := _DATE.fullmatch(words)) is not None:
        return _unix_s(date[1], date[2] or "00:00")
    return None


def _unix_s(day: str, clock: str) -> float:
    """Return the Unix seconds of a local day and time, with daylight saving time of the system."""
    return time.mktime(
        time.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S" if clock.count(":") == 2 else "%Y-%m-%d %H:%M")
    )
