"""Pods wait for a node that an autoscaler starts. The API server and its nodes are the fake of `tests/kubernetes`; the test is the autoscaler."""

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_rig import kubernetes
from tests.kubernetes.fake_store import KINDS

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS, NODES, EVENTS = KINDS["", "pods"], KINDS["", "nodes"], KINDS["", "events"]
WORDS = ("--min-run", "1s", "--kubernetes-nodes", "3x2", "--kubernetes-node-wait", "10m")


def pods(rig):
    return rig.fake.store.select(PODS, "default", "", "")[0]


def why(rig, job):
    return rig.call("GET", f"/v1/jobs/{job}/why")["headline"]


def says(rig, component, reason, message, at):
    """An autoscaler writes an event about the pod without a node."""
    pod = next(one for one in pods(rig) if not one["spec"].get("nodeName"))
    about = {"kind": "Pod", "namespace": "default", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    item = {"metadata": {"name": f"{about['name']}.{reason.lower()}"}, "involvedObject": about, "reason": reason}
    item |= {"message": message, "source": {"component": component}, "lastTimestamp": f"2026-11-29T01:00:{at:02}Z"}
    rig.fake.store.create(EVENTS, "default", item)


def test_a_gang_keeps_its_pods_until_an_autoscaler_has_started_the_missing_node():
    with kubernetes(WORDS) as rig:
        kept = rig.fake.store.get(NODES, "", "n2")
        rig.fake.store.delete(NODES, "", "n2", {})
        job = gated(rig, "grows", gpus="3x2")
        wait_until(
            lambda: len(pods(rig)) == 3 and sum(bool(one["spec"].get("nodeName")) for one in pods(rig)) == 2, "pods"
        )
        says(
            rig,
            "cluster-autoscaler",
            "NotTriggerScaleUp",
            "pod didn't trigger scale-up: 1 max node group size reached",
            1,
        )
        says(rig, "default-scheduler", "FailedScheduling", "0/2 nodes are available", 2)
        wait_until(lambda: "no node in Kubernetes yet" in why(rig, job), "it says what it waits for")
        refused = (
            "cluster-autoscaler starts none: pod didn't trigger scale-up: 1 max node group size reached; given up in 9m"
        )
        assert refused in why(rig, job)
        says(rig, "karpenter", "Nominated", "Pod should schedule on: nodeclaim/gpu-v278f", 3)
        nominated = "karpenter starts a node: Pod should schedule on: nodeclaim/gpu-v278f; given up in 9m"
        wait_until(lambda: nominated in why(rig, job), "it says that a node comes")
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
