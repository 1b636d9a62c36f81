"""Moments to begin at: with a zone for the head, by the wall clock for the command line."""

import time
from datetime import datetime

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.cli.jobs.request.begin_time import format_time, with_zone
from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.begin_time import parse_begin_s

FIRST, LAST = datetime.fromisoformat("1970-01-02"), datetime.fromisoformat("9999-12-30")
NOW = 1_764_580_000.0  # 1 December 2025, 10:06:40 in Berlin


@pytest.fixture
def berlin(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("2h", NOW + 7200),
        ("now+1h30m", NOW + 5400),
        ("now", NOW),
        ("90m", NOW + 5400),
        (1_764_547_200, 1_764_547_200.0),
        ("1764547200.5", 1_764_547_200.5),
        ("1970-01-02T00:00Z", 86400.0),
        ("2020-01-01T00:00+01:00", 1_577_833_200.0),
    ],
)
def test_moments_that_need_no_wall_clock(text, at_s):
    assert parse_begin_s(text, now_s=NOW) == at_s


@given(st.datetimes(FIRST, LAST), st.integers(-14 * 60, 14 * 60))
def test_dates_mean_what_the_calendar_says(moment, offset_min):
    sign, minutes = "-" if offset_min < 0 else "+", abs(offset_min)
    text = moment.replace(microsecond=0).isoformat() + f"{sign}{minutes // 60:02d}:{minutes % 60:02d}"
    assert parse_begin_s(text, now_s=None) == datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-01T08:00",
        "16:00",
        "17",
        "1764547200000",
        True,
        None,
        "2026-02-30T00:00Z",
        "2026-12-01T24:00Z",
        "-2h",
        "tomorrow",
    ],
)
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(BadRequest, match="begin:"):
        parse_begin_s(text, now_s=NOW)


def test_a_span_needs_somebody_who_knows_the_time():
    with pytest.raises(BadRequest, match="give an absolute time"):
        parse_begin_s("2h", now_s=None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("16:00", "16:00"),
        ("10:00", "2025-12-02 10:00"),
        ("2026-07-01", "2026-07-01 00:00"),
        ("2026-07-01T08:30", "2026-07-01 08:30"),
        ("2026-12-01 8:00", "2026-12-01 08:00"),
    ],
)
def test_the_clock_on_the_wall_is_this_zones(berlin, text, told):
    at_s = parse_begin_s(with_zone(text, NOW), now_s=None)
    assert format_time(at_s, NOW) == told


def test_summer_time_is_the_systems(berlin):
    assert parse_begin_s(with_zone("2026-07-01T08:00", NOW), now_s=None) == parse_begin_s(
        "2026-07-01T08:00+02:00", now_s=None
    )
    assert parse_begin_s(with_zone("2026-12-01T08:00", NOW), now_s=None) == parse_begin_s(
        "2026-12-01T08:00+01:00", now_s=None
    )


@pytest.mark.parametrize("text", ["2h", "now+2h", "now", "2026-12-01T08:00Z"])
def test_what_needs_no_zone_goes_to_the_head_as_it_is(text):
    assert with_zone(text, NOW) == text


@pytest.mark.parametrize("text", ["25:00", "2026-02-30", "soon", "17"])
def test_nonsense_is_refused_here(text):
    with pytest.raises(BadRequest, match="begin:"):
        with_zone(text, NOW)
