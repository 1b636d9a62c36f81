"""Amounts as texts for users."""

import pytest

from phalanx.core.resources import amount_time_text, quantity_text


@pytest.mark.parametrize(
    ("name", "amount_s", "expected"),
    [
        ("cpus", 43_200.0, "12.0 CPU-hours"),
        ("cpus", 7_200_000_000.0, "2000000.0 CPU-hours"),  # a large fleet: a count, however large it is
        ("gpus", 2.0**31, "596523.2 GPU-hours"),
        ("memory", 3600.0 * 2**30, "1.0 GiB-hours of memory"),
        ("scratch", 3600.0 * 2**31, "2.0 GiB-hours of scratch"),
        ("matlab", 8.0, "8.0 seconds of matlab"),
    ],
)
def test_amount_seconds_have_the_unit_of_their_resource(name, amount_s, expected):
    assert amount_time_text(name, amount_s) == expected


@pytest.mark.parametrize(("value", "expected"), [(2_560_000, "2560000 CPUs"), (1, "1 CPU"), (0.25, "0.25 CPUs")])
def test_large_counts_are_written_out(value, expected):
    assert quantity_text("cpus", value) == expected
