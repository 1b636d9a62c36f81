"""`--begin` as people write it at their own clock. The head takes a moment with its zone; the zone of the wall clock is known here alone."""

from __future__ import annotations

import re
import time
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.begin import parse_begin_s

_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_DATE: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{1,2}:\d{2}(?::\d{2})?))?", re.IGNORECASE)
_HINT: Final = "write 2h for two hours from now, 16:00, or 2026-12-01T08:00"


def with_zone(text: str, now_s: float) -> str:
    """Unix seconds, where the moment is one of the local clock; what needs no zone as it is.

    `16:00` is the next time the clock shows it, as sbatch has it; a date alone is its midnight.

    Raises:
        BadRequest: no moment.
    """
    words = text.strip()
    try:
        local_s = _local_s(words, now_s)
    except (ValueError, OverflowError):  # the 30th of February, or a year that the C library does not know
        raise BadRequest(f"begin: {words[:40]!r} names no day or time", hint=_HINT) from None
    if local_s is not None:
        return f"{local_s:.0f}"
    try:
        parse_begin_s(words, now_s=now_s)
    except BadRequest as error:
        raise BadRequest(error.message.replace(" with a zone", ""), hint=_HINT) from None
    return words


def shown(at_s: float, now_s: float) -> str:
    """A moment on the local clock, with the date where it is not today's."""
    then, now = time.localtime(at_s), time.localtime(now_s)
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def _local_s(words: str, now_s: float) -> float | None:
    if (clock := _CLOCK.fullmatch(words)) is not None:
        today = time.strftime("%Y-%m-%d", time.localtime(now_s))
        at_s = _unix_s(today, clock[0])
        if at_s > now_s:
            return at_s
        tomorrow = time.strftime(
            "%Y-%m-%d", time.localtime(_unix_s(today, "12:00") + 86400)
        )  # noon: a day may have 23 hours
        return _unix_s(tomorrow, clock[0])
    if (date := _DATE.fullmatch(words)) is not None:
        return _unix_s(date[1], date[2] or "00:00")
    return None


def _unix_s(day: str, clock: str) -> float:
    """Of a day and time on the local clock, summer time as the system knows it."""
    return time.mktime(
        time.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S" if clock.count(":") == 2 else "%Y-%m-%d %H:%M")
    )
