"""How often nodes fail."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.recovery.failure_rate import node_mtbf_s

DAY_S = 86400.0


def test_new_fleet_fails_as_published_ones_do():
    assert node_mtbf_s(0, 0.0) == pytest.approx(DAY_S / 6.5e-3)


def test_first_failure_shifts_the_estimate_without_owning_it():
    assert node_mtbf_s(1, 3 * DAY_S) == pytest.approx(DAY_S * 1003 / 7.5)


def test_large_fleet_believes_what_it_saw():
    assert node_mtbf_s(1000, 100_000 * DAY_S) == pytest.approx(100 * DAY_S, rel=0.02)


@given(st.integers(0, 10**6), st.floats(-1e12, 1e15))
def test_estimate_is_positive_and_falls_with_failures(failures, node_seconds):
    assert 0 < node_mtbf_s(failures + 1, node_seconds) < node_mtbf_s(failures, node_seconds)
