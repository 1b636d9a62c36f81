"""What a calibration found slow is used last, and the operator sees it."""

import json

import pytest

from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import PutCalibration
from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from tests.harness import Harness


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4 n2=4")


def calibrate(cluster, **tflops):
    nodes = tuple(
        NodeMeasurement(
            node=name, gpu="h100", devices=4, flops={"bf16": rate * 1e12}, worst_flops={"bf16": rate * 1e12}
        )
        for name, rate in tflops.items()
    )
    profile = Profile(at="2026-11-21T15:00:00Z", at_s=1.0, nodes=nodes)
    text = json.dumps(encode_record(profile))
    cluster.request(PutCalibration(calibration=FleetDocument(text=text, by=UserId("op"), at_s=1.0)))


def slow(cluster):
    return {node.id: node.slow_reason for node in cluster.store.nodes() if node.slow_reason}


def where(cluster, job_id):
    return [str(grant.node_id) for grant in cluster.live(job_id).allocation.grants]


def test_a_node_far_under_its_peers_is_marked_with_its_evidence(cluster):
    calibrate(cluster, n0=400, n1=700, n2=710)
    assert list(slow(cluster)) == ["n0"]
    assert "43%" in slow(cluster)[NodeId("n0")]


def test_work_goes_elsewhere_first_and_there_when_nothing_else_fits(cluster):
    calibrate(cluster, n0=400, n1=700, n2=710)
    jobs = [cluster.submit(gpus=4) for _ in range(3)]
    for job in jobs:
        cluster.runs(job)
    assert sorted(where(cluster, jobs[0]) + where(cluster, jobs[1])) == ["n1", "n2"]
    assert where(cluster, jobs[2]) == ["n0"]


def test_a_node_that_was_mended_takes_work_as_before(cluster):
    calibrate(cluster, n0=400, n1=700, n2=710)
    calibrate(cluster, n0=705, n1=700, n2=710)
    assert slow(cluster) == {}
    job = cluster.submit(gpus=4)
    cluster.runs(job)
    assert where(cluster, job) == ["n0"]


def test_the_mark_outlives_the_node_s_supervisor(cluster):
    calibrate(cluster, n0=400, n1=700, n2=710)
    cluster.kill_node("n0")
    cluster.run(5.0)
    cluster.revive_node("n0")
    cluster.run(5.0)
    assert list(slow(cluster)) == ["n0"]
