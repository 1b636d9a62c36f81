"""The period of a report: `--since`, `--until` and `--month`, as Unix seconds. Reports count whole hours, and months are those of UTC."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from phalanx.cli.option_types import GrammarType
from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s
from phalanx.core.work.job_file.begin_time import parse_begin_s

_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_MONTH: Final = re.compile(r"(\d{4})-(\d{2})", re.ASCII)
_YEAR_MAX: Final = 9998  # the month after the last one must be a date too


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """From `since_s` up to `until_s`; None for now."""

    since_s: float
    until_s: float | None = None


def parse_moment_s(text: str, *, now_s: float) -> float:
    """Return the Unix seconds of `30d` before now, of `2026-11-01` (UTC) or of a date and time with its zone.

    Raises:
        BadRequest: none of these.
    """
    if "-" in text and text[:4].isdecimal():
        return parse_begin_s(f"{text}T00:00Z" if _DATE.fullmatch(text) else text, now_s=None)
    return max(0.0, now_s - parse_duration_s(text))


def parse_month(text: str) -> Period:
    """Return the period of a month such as `2026-11`, in UTC.

    Raises:
        BadRequest: it is no month.
    """
    found = _MONTH.fullmatch(text)
    year, month = (int(part) for part in found.groups()) if found is not None else (0, 0)
    if not (1970 <= year <= _YEAR_MAX and 1 <= month <= 12):
        raise BadRequest(f"{text[:40]!r} is not a month", hint="write 2026-11")
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    first, last = (datetime(*each, 1, tzinfo=UTC).timestamp() for each in ((year, month), following))
    return Period(since_s=first, until_s=last)


def resolve_period(since: str | None, until: str | None, month: str | None, *, default: str = "30d") -> Period:
    """Return the period that the options name.

    Raises:
        BadRequest: `--month` together with another one, or a period that ends before it begins.
    """
    if month is not None:
        if since is not None or until is not None:
            raise BadRequest("--month is a whole period", hint="leave out --since and --until")
        return parse_month(month)
    now_s = time.time()
    begin_s = parse_moment_s(since or default, now_s=now_s)
    end_s = None if until is None else parse_moment_s(until, now_s=now_s)
    if end_s is not None and end_s <= begin_s:
        raise BadRequest(f"--until {until} is not after --since {since or default}")
    return Period(since_s=begin_s, until_s=end_s)


def utc_text(at_s: float) -> str:
    """A moment to the minute, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


MOMENT: Final = GrammarType("TIME", lambda text: parse_moment_s(text, now_s=0.0))
MONTH: Final = GrammarType("YYYY-MM", parse_month)
