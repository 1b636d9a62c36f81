"""How often nodes fail."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.recovery.failure_rate import gang_mtbf_s, node_mtbf_s

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


FLEET_S = node_mtbf_s(0, 0.0)


def test_gang_in_bad_surroundings_believes_them_after_two_losses():
    calm = gang_mtbf_s(FLEET_S, nodes=3, losses=0, exposure_s=30 * DAY_S)
    hit = gang_mtbf_s(FLEET_S, nodes=3, losses=2, exposure_s=1800.0)
    assert calm == pytest.approx(FLEET_S / 3, rel=0.1)
    assert hit < 3600.0


def test_gang_forgets_bad_surroundings_once_nothing_fails_for_long():
    hit = gang_mtbf_s(FLEET_S, nodes=3, losses=2, exposure_s=1800.0)
    after = gang_mtbf_s(FLEET_S, nodes=3, losses=2, exposure_s=20 * DAY_S)
    assert after > 100 * hit


@given(st.integers(1, 4096), st.integers(0, 200), st.floats(0, 1e8))
def test_gang_estimate_is_finite_and_falls_with_losses(nodes, losses, exposure_s):
    estimate = gang_mtbf_s(FLEET_S, nodes=nodes, losses=losses, exposure_s=exposure_s)
    assert 0 < gang_mtbf_s(FLEET_S, nodes=nodes, losses=losses + 1, exposure_s=exposure_s) <= estimate < float("inf")
