"""A test of nodes: what fails against the model's figures and against the median of its kind, and what is not compared."""

# mypy: disable-error-code="arg-type"

from dataclasses import replace

import pytest

from phalanx.core.fleet.node_tests import TESTS_MAX, NodeRate, NodeTest, NodeTestHistory
from phalanx.planner.calibration.node_tests import judge_nodes, table_rates
from phalanx.planner.calibration.profile import NodeMeasurement, Profile

H100 = "NVIDIA H100 80GB HBM3"


def profile(**memory):
    """One virtual node each, with this memory rate."""
    nodes = [NodeMeasurement(node=n, gpu="v", devices=2, virtual=True, memory_bytes_per_s=r) for n, r in memory.items()]
    return Profile(at="", at_s=1e9, job="7", nodes=tuple(nodes))


def failing(found):
    return {name: test.why for name, test in found.items() if test.why}


def judge(measured, known=(), threshold=0.3):
    return judge_nodes(measured, known, threshold=threshold, by="op")


def test_node_far_below_the_median_of_three_fails():
    assert failing(judge(profile(n0=100.0, n1=60.0, n2=98.0))) == {"n1": "memory 39% below the median of 3 nodes"}
    assert failing(judge(profile(n0=100.0, n1=75.0, n2=98.0))) == {}
    assert failing(judge(profile(n0=100.0, n1=75.0, n2=98.0), threshold=0.2)) == {
        "n1": "memory 23% below the median of 3 nodes"
    }


def test_two_nodes_are_not_compared_because_either_may_be_at_fault():
    found = judge(profile(n0=100.0, n1=10.0))
    assert failing(found) == {}
    assert not any(test.compared for test in found.values())


def test_nodes_that_differ_widely_do_not_fail_for_it():
    # The median is 80; deviations are 0, 20, 40, 48 and 80, so 32 is usual here.
    assert failing(judge(profile(n0=160.0, n1=120.0, n2=80.0, n3=60.0, n4=32.0))) == {}


def test_two_nodes_that_differ_do_not_hide_a_third_that_nearly_stands_still():
    # The median is 140 and 60 a usual deviation, so that no rate at all would be unusual.
    assert failing(judge(profile(n0=200.0, n1=20.0, n2=140.0))) == {"n1": "memory 86% below the median of 3 nodes"}
    assert failing(judge(profile(n0=200.0, n1=40.0, n2=140.0))) == {}


def test_real_node_is_compared_with_its_model_and_with_earlier_tests_of_its_kind():
    table = table_rates(H100)
    half = table["memory"] * 0.49
    node = NodeMeasurement(node="g0", gpu=H100, devices=8, memory_bytes_per_s=half, worst_flops={"bf16": 7e14})
    alone = judge(replace(profile(), nodes=(node,)))
    assert failing(alone) == {"g0": "memory at 49% of the model's figure"}
    rates = (NodeRate(what="matmul bf16", value=1.2e15),)
    known = [replace(alone["g0"], rates=rates, at_s=at_s) for at_s in (1e9 - 60, 1e9 - 3600, 1e9 - 1e8)]
    assert "matmul" not in failing(judge(replace(profile(), nodes=(node,)), known[1:]))["g0"]
    found = failing(judge(replace(profile(), nodes=(node,)), known[:2]))["g0"]
    assert found == "matmul bf16 42% below the median of 3 nodes; memory at 49% of the model's figure"
    assert table_rates("an unknown GPU") == {}


def test_history_keeps_the_newest_tests_and_each_job_once():
    test = NodeTest(at_s=1.0, by="op", job="1", gpu="v", devices=2, threshold=0.3, peers=3, rates=())
    history = NodeTestHistory(id="n0").add(test).add(replace(test, at_s=2.0))
    assert [one.at_s for one in history.tests] == [2.0]
    for job in range(2, 40):
        history = history.add(replace(test, job=str(job)))
    assert [one.job for one in history.tests] == [str(job) for job in range(40 - TESTS_MAX, 40)]


@pytest.mark.parametrize("threshold", ["5%", "0.5", "95%"])
def test_share_is_read(threshold):
    from phalanx.cli.cluster.node_tests import _share

    assert 0.05 <= _share(threshold) <= 0.95
