"""Periods that end together."""

import pytest

from phalanx.core.ticks import until_tick_s


@pytest.mark.parametrize(
    ("period_s", "now_s", "left_s"), [(1.0, 10.25, 0.75), (2.0, 11.0, 1.0), (2.0, 12.0, 2.0), (1.0, 0.0, 1.0)]
)
def test_a_period_ends_at_its_next_multiple(period_s, now_s, left_s):
    assert until_tick_s(period_s, now_s) == pytest.approx(left_s)


def test_each_second_end_of_a_period_of_one_second_is_one_of_two_seconds():
    assert [now + until_tick_s(2.0, now) for now in (0.4, 1.9)] == [2.0, 2.0]
    assert [now + until_tick_s(1.0, now) for now in (0.4, 1.9)] == pytest.approx([1.0, 2.0])
