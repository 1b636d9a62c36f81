"""Topology pays, without a clock: what must cross the link between two hosts under each order of the ranks, by formula and for real."""

import pytest

from benchmarks.rank_order import (
    SHAPE,
    OrderCase,
    cases,
    traffic_bytes,
    train,
)
from benchmarks.rank_order_plan import planned_s
from tests.lab.lab import Lab
from tests.lab.needs import why_not


def named(name: str, devices: int = 2) -> OrderCase:
    return next(case for case in cases(devices) if case.name == name)


def crossing(case: OrderCase, devices: int = 2) -> tuple[float, float]:
    return traffic_bytes(case.planned, case.seats_planned, devices), traffic_bytes(
        case.naive, case.seats_naive, devices
    )


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["tp_dp", "tp_pp", "tp_dp_dealt"])
def test_the_planned_order_sends_less_between_hosts_than_the_naive_one(name, devices):
    planned, naive = crossing(named(name, devices), devices)
    assert 0 < planned < naive / 2


def test_a_host_file_that_deals_out_the_hosts_is_as_bad_as_data_innermost():
    assert crossing(named("tp_dp_dealt")) == crossing(named("tp_dp"))


@pytest.mark.parametrize("name", ["tp_dp", "tp_pp", "tp_dp_dealt"])
def test_the_planners_formula_prefers_the_planned_order(name):
    slow_between = {"flops": 1e10, "memory_bytes_per_s": 1e9, "within_bytes_per_s": 2e8, "between_bytes_per_s": 1e7}
    case = named(name)
    planned, naive = (
        planned_s(layout, SHAPE, slow_between, hosts=2, devices=2) for layout in (case.planned, case.naive_seen)
    )
    assert naive > 1.5 * planned


@pytest.mark.serial
@pytest.mark.e2e
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_real_ranks_send_what_the_formula_says_and_learn_the_same_in_both_orders():
    case = named("tp_dp")
    with Lab(size=2, gpus=2, rate_mbit=1000.0) as lab:
        ranks = train(lab, [case], devices=2, rounds=1)
    for arm, expected in zip(("planned", "naive"), crossing(case), strict=True):
        rows = [row for rank in ranks for row in rank if row["arm"] == f"tp_dp/{arm}"]
        assert len(rows) == 4
        # Headers and acknowledgements are some per cent, and more under a window that never fills.
        assert max(row["sent_bytes"] for row in rows) == pytest.approx(expected, rel=0.1)
    by_arm = {row["arm"]: row["loss"] for row in ranks[0] if row["arm"] != "rates"}
    assert by_arm["tp_dp/planned"] == pytest.approx(by_arm["tp_dp/naive"], rel=1e-4)
