"""The goodput benchmark counts right, the real policy reaches its bars in it, and a worse policy does not."""

import pytest

from benchmarks import goodput
from benchmarks.goodput import (
    GoodputCase,
    best_fixed_goodput,
    cases,
    fixed_goodput,
    measure_case,
    policy_goodput,
    spans_of,
)
from phalanx.core.recovery import failure_rate

pytestmark = pytest.mark.torch
HOUR_S = 3600.0


def case(**fields):
    return GoodputCase(
        **{
            "name": "c",
            "nodes": 8,
            "mtbf_s": HOUR_S,
            "stall_s": 10.0,
            "restart_s": 60.0,
            "least": None,
            "days": 1.0,
            **fields,
        }
    )


def test_gang_computes_between_failures_and_a_failure_within_a_restart_begins_it_anew():
    one = case(days=1000.0 / goodput.DAY_S)
    assert spans_of(one, [100.0, 130.0, 500.0]) == [(0.0, 100.0, True), (190.0, 500.0, True), (560.0, 1000.0, False)]
    assert spans_of(one, [100.0, 950.0]) == [(0.0, 100.0, True), (160.0, 950.0, True)]


def test_fixed_interval_keeps_what_was_durable_and_loses_the_rest():
    one = case(days=1000.0 / goodput.DAY_S)
    # Up to the failure at 500 s three cycles of 100 s and 10 s are whole, and their writes; after it four, and what is left of the last.
    assert fixed_goodput(one, [500.0], 100.0) == pytest.approx((400.0 + 3 * 100.0 + 100.0) / 1000.0)


def test_without_failures_saves_alone_cost():
    one = case(mtbf_s=1e12, days=1.0)
    assert best_fixed_goodput(one, 0)[0] > 0.999
    assert 0.98 < policy_goodput(one, 0) < 1.0


@pytest.mark.parametrize("name", ["llama_16384_stall10_60s", "llama_16384_stall1_60s", "rsc_8192_stall10_60s"])
def test_real_policy_reaches_its_bar_and_keeps_near_the_best_fixed_interval(name):
    (one,) = [one for one in cases() if one.name == name]
    found = measure_case(one, 3)
    assert found["met"], found
    assert found["points_behind_worst"] <= goodput.WITHIN_POINTS


def test_policy_that_saves_eight_times_too_rarely_is_caught(monkeypatch):
    (one,) = [one for one in cases() if one.name == "llama_16384_stall10_60s"]
    usual = failure_rate.gang_mtbf_s
    monkeypatch.setattr(goodput, "gang_mtbf_s", lambda *given, **how: 64.0 * usual(*given, **how))
    assert not measure_case(one, 2)["met"]
