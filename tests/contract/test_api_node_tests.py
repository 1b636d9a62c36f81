"""Tests of nodes over the API: stored, judged, and nodes that fail are cordoned."""

# mypy: disable-error-code="no-untyped-def"

import time

import pytest

from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from tests.contract.api_head import Supervisor

RATES = {"n0": 100.0, "n1": 30.0, "n2": 99.0}


@pytest.fixture
def put(call):
    for number, name in enumerate(RATES):
        Supervisor(call, name, f"s{number}").hello()

    def send(role="operator", **changed):
        nodes = [
            NodeMeasurement(node=name, gpu="v", devices=2, virtual=True, memory_bytes_per_s=rate)
            for name, rate in (RATES | changed.pop("rates", {})).items()
        ]
        tested = Profile(at="", at_s=time.time(), job="7", nodes=tuple(nodes))
        return call(role, "POST", "/v1/node-tests", {"profile": encode_record(tested), **changed})

    return send


def cordons(call):
    nodes = call("viewer", "GET", "/v1/nodes").json()["nodes"]
    return {node["id"]: (node["cordon"]["by"], node["cordon"]["why"]) for node in nodes if node.get("cordon")}


def test_node_that_fails_is_cordoned_and_the_test_stays(call, put):
    found = {one["node"]: one for one in put().json()["nodes"]}
    why = "memory 70% below the median of 3 nodes"
    assert [found[name]["tests"][0]["passed"] for name in RATES] == [True, False, True]
    assert cordons(call) == {"n1": ("node-test", f"test: {why}")}
    (view,) = call("viewer", "GET", "/v1/nodes/n1/tests").json()["nodes"]
    assert (view["cordoned"], view["tests"][0]["why"], view["tests"][0]["by"]) == (
        f"test: {why} (node-test)",
        why,
        "opal",
    )
    put()
    (view,) = call("viewer", "GET", "/v1/nodes/n1/tests").json()["nodes"]
    assert len(view["tests"]) == 1  # of one job


def test_without_drain_it_is_only_stored(call, put):
    assert put(drain=False).json()["nodes"][1]["tests"][0]["passed"] is False
    assert cordons(call) == {}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"threshold": 0.0}, 400),
        ({"threshold": 1.0}, 400),
        ({"rates": {"n1": -1.0}}, 400),
        ({"rates": {"n9": 5.0}}, 404),
    ],
)
def test_wrong_result_is_refused_whole(call, put, changed, status):
    assert put(**changed).status_code == status
    assert call("viewer", "GET", "/v1/nodes/n1/tests").json()["nodes"][0].get("tests", []) == []
    assert cordons(call) == {}


def test_only_operators_store_tests(put):
    assert put(role="viewer").status_code == 403
