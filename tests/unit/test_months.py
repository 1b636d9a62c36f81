"""Months of UTC against the calendar of the standard library."""

from datetime import UTC, datetime, timedelta

from phalanx.core.months import DAY_S, month_bounds_s, month_of


def test_months_are_those_of_the_calendar():
    first = datetime(1970, 1, 1, tzinfo=UTC)
    for day in range(0, 60_000, 7):
        at = first + timedelta(days=day)
        assert month_of(day * DAY_S + DAY_S - 1) == at.strftime("%Y-%m")
        begin_s, end_s = month_bounds_s(at.strftime("%Y-%m"))
        assert begin_s == at.replace(day=1).timestamp()
        assert month_of(end_s - 1) == at.strftime("%Y-%m") != month_of(end_s)
