"""Durations, memory and byte counts, as people write them and as they are shown."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadRequest, ExitCode
from phalanx.core.units import GIB, MIB, format_bytes, format_duration, parse_duration_s, parse_memory_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1w", 604800),
        ("2:00:00", 7200),
        ("02:30", 9000),
        ("1-12:00:00", 129600),
        ("1-02:30", 95400),
        ("100:00:00", 360000),
        (" 2H ", 7200),
        ("0s", 0),
        ("00:00:59", 59),
    ],
)
def test_duration_is_read(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["90", 90, 7200.0, " 12 ", "1.5", True])
def test_bare_number_is_refused_with_a_hint_that_names_units(text):
    with pytest.raises(BadRequest, match="has no unit") as refused:
        parse_duration_s(text)
    assert "m for minutes" in refused.value.hint
    assert refused.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "2x",
        "-5m",
        "2h-30m",
        "1:60:00",
        "00:75",
        "1-",
        "2h30",
        "1:2:3:4",
        "1e3s",
        "٣h",
        "5m6",
        None,
        ["2h"],
        {},
        "9" * 5000 + "h",
        "9" * 5000 + "-00:00",
        "1:00:00:",
        "\x00",
    ],
    ids=lambda text: repr(text)[:24],
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(BadRequest):
        parse_duration_s(text, what="time")


@given(st.text(max_size=30))
def test_any_text_is_a_finite_duration_or_a_refusal(text):
    try:
        seconds = parse_duration_s(text)
    except BadRequest:
        return
    assert 0 <= seconds < float("inf")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (2.34, "2.3s"),
        (43, "43s"),
        (728, "12m08s"),
        (11100, "3h05m"),
        (187200, "2d04h"),
        (59.9, "59s"),
        (3600, "1h00m"),
    ],
)
def test_duration_is_shown_in_two_units_at_most(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64", 64 * GIB),
        (64, 64 * GIB),
        (0.5, GIB // 2),
        ("64G", 64 * GIB),
        ("64GiB", 64 * GIB),
        ("64gb", 64 * GIB),
        ("512M", 512 * MIB),
        ("1.5T", 1536 * GIB),
        ("8 GiB", 8 * GIB),
        ("100k", 102400),
        ("0", 0),
    ],
)
def test_memory_is_read_and_a_bare_number_is_gib(text, count):
    assert parse_memory_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1e30", "64X", "64GG", True, None, [], "nan", "inf", "9" * 400, "512B", "5 iB"]
)
def test_what_is_no_memory_is_refused(text):
    with pytest.raises(BadRequest):
        parse_memory_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (512, "512 B"),
        (0, "0 B"),
        (3.2 * MIB, "3.2 MiB"),
        (80 * GIB, "80 GiB"),
        (1536 * GIB, "1.5 TiB"),
        (150.4 * MIB, "150 MiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit(count, text):
    assert format_bytes(count) == text
