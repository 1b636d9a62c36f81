"""Months of UTC, by arithmetic: core has no clock and no calendar."""

from __future__ import annotations

from typing import Final

DAY_S: Final = 86400
_DAYS_OF_400_YEARS: Final = 146_097
_DAYS_TO_1970: Final = 719_468  # from 1 March of the year 0, with which the calendar's cycle of 400 years begins


def month_of(at_s: float) -> str:
    """The month of a Unix time, as `2026-11`. Source: Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days."""
    days = int(at_s // DAY_S) + _DAYS_TO_1970
    era, day = divmod(days, _DAYS_OF_400_YEARS)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day_of_year = day - (365 * year + year // 4 - year // 100)
    march_month = (5 * day_of_year + 2) // 153
    month = march_month + 3 if march_month < 10 else march_month - 9
    return f"{400 * era + year + (month <= 2):04d}-{month:02d}"


def month_bounds_s(month: str) -> tuple[int, int]:
    """The beginning of a month and of the next one, in Unix seconds."""
    year, number = (int(part) for part in month.split("-"))
    following = (year, number + 1) if number < 12 else (year + 1, 1)
    first, last = (_first_day(*each) * DAY_S for each in ((year, number), following))
    return first, last


def _first_day(year: int, month: int) -> int:
    """Days from 1970 to the first day of a month."""
    year -= month <= 2
    day_of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5
    return (
        year // 400 * _DAYS_OF_400_YEARS
        + year % 400 * 365
        + year % 400 // 4
        - year % 400 // 100
        + day_of_year
        - _DAYS_TO_1970
    )
