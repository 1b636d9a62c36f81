"""Pods wait for a node that an autoscaler starts. The API server and its nodes are the fake of `tests/kubernetes`; the test is the autoscaler."""

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_rig import kubernetes
from tests.kubernetes.fake_store import KINDS

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS, NODES = KINDS["", "pods"], KINDS["", "nodes"]
WORDS = ("--min-run", "1s", "--kubernetes-nodes", "3x2", "--kubernetes-node-wait", "10m")


def pods(rig):
    return rig.fake.store.select(PODS, "default", "", "")[0]


def why(rig, job):
    return rig.call("GET", f"/v1/jobs/{job}/why")["headline"]


def test_a_gang_keeps_its_pods_until_an_autoscaler_has_started_the_missing_node():
    with kubernetes(WORDS) as rig:
        kept = rig.fake.store.get(NODES, "", "n2")
        rig.fake.store.delete(NODES, "", "n2", {})
        job = gated(rig, "grows", gpus="3x2")
        wait_until(lambda: "no node in Kubernetes yet" in why(rig, job), "it says what it waits for")
        assert "given up in 9m" in why(rig, job)
        assert len(pods(rig)) == 3, "an autoscaler sees the pod without a node"
        cancelled = rig.submit(run="true", gpus="3x2", tasks_per_node=1, name="second")
        assert rig.job(cancelled)["state"] == "pending", "the places are taken"
        rig.call("POST", f"/v1/jobs/{cancelled}/cancel")

        rig.fake.store.create(NODES, "", {"metadata": {"name": "n2", "labels": kept["metadata"]["labels"]}, "spec": {}})
        rig.fake.store.merge(NODES, "", "n2", {"status": kept["status"]}, part="status")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        open_gate(rig, "grows")
        view = rig.wait_for_state(job, "succeeded", "failed")
        assert (view["state"], view["attempts"]) == ("succeeded", 1), rig.history(job)

        rig.fake.store.delete(NODES, "", "n2", {})
        job = gated(rig, "leaves", gpus="3x2")
        wait_until(lambda: "no node in Kubernetes yet" in why(rig, job), "it waits")
        rig.call("POST", f"/v1/jobs/{job}/cancel")
        assert rig.wait_for_state(job, "cancelled", "failed")["state"] == "cancelled"
        wait_until(lambda: not pods(rig), "its pods are gone, also those that ran")
