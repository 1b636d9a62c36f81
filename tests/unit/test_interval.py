"""The checkpoint interval: against the figures Daly printed, and against the cost it is meant to minimise."""

from __future__ import annotations

import pytest

from phalanx.core.recovery.interval import (
    DEVICE_MTBF_S,
    daly_interval_s,
    expected_wall_s,
    gang_mtbf_s,
    young_interval_s,
)

MINUTE_S = 60.0
HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("mtbf_s", "printed_minutes", "digits"),
    [(24 * HOUR_S, 117, 0), (6 * HOUR_S, 57, 0), (15 * MINUTE_S, 9.1, 1)],
)
def test_interval_equals_the_captions_of_dalys_figures_3_to_5(mtbf_s, printed_minutes, digits):
    interval_s = daly_interval_s(stall_s=5 * MINUTE_S, mtbf_s=mtbf_s)
    assert round(interval_s / MINUTE_S, digits) == printed_minutes


@pytest.mark.parametrize("mtbf_s", [15 * MINUTE_S, HOUR_S, 24 * HOUR_S])
@pytest.mark.parametrize("stall_s", [0.05, 3.0, 60.0, 300.0])
def test_no_other_interval_is_noticeably_cheaper(stall_s, mtbf_s):
    def wall_s(interval_s):
        return expected_wall_s(
            work_s=500 * HOUR_S, interval_s=interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=10 * MINUTE_S
        )

    chosen_s = daly_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    cheapest = min(wall_s(chosen_s * factor / 100) for factor in range(20, 500))
    assert wall_s(chosen_s) <= cheapest * 1.001


def test_higher_order_meets_first_order_where_failures_are_rare():
    young_s = young_interval_s(stall_s=0.1, mtbf_s=1e6)
    assert daly_interval_s(stall_s=0.1, mtbf_s=1e6) == pytest.approx(young_s, rel=1e-3)


def test_stall_longer_than_twice_the_mtbf_gives_the_mtbf():
    assert daly_interval_s(stall_s=100.0, mtbf_s=50.0) == 50.0


def test_free_checkpoint_may_be_made_always():
    assert daly_interval_s(stall_s=0.0, mtbf_s=HOUR_S) == 0.0


def test_twice_the_devices_halve_the_mtbf():
    assert gang_mtbf_s(devices=16) == gang_mtbf_s(devices=8) / 2
    # Llama 3: one interruption about every three hours on 16,384 GPUs.
    assert gang_mtbf_s(devices=16_384) / HOUR_S == pytest.approx(3.1, abs=0.05)
    assert gang_mtbf_s(devices=1) == DEVICE_MTBF_S


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(-1.0, 10.0), (1.0, 0.0), (float("nan"), 10.0), (1.0, float("nan"))])
def test_nonsense_is_refused_with_the_value_named(stall_s, mtbf_s):
    with pytest.raises(ValueError, match=r"of -?(1|0|nan)"):
        daly_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)


def test_gang_without_devices_and_interval_of_nothing_are_refused():
    with pytest.raises(ValueError, match="a gang of 0 devices"):
        gang_mtbf_s(devices=0)
    with pytest.raises(ValueError, match=r"an interval of 0\.0 s"):
        expected_wall_s(work_s=1.0, interval_s=0.0, stall_s=1.0, mtbf_s=1.0, restart_s=0.0)
