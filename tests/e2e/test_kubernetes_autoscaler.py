"""Pods wait for a node that an autoscaler starts. The API server and its nodes are the fake of `tests/kubernetes`; the test is the autoscaler."""

import time

import msgspec
import pytest

from benchmarks.cluster import wait_until
from phalanx.cli.cluster.nodes import node_lines
from phalanx.cli.terminal import Terminal
from phalanx.wire.api.nodes import NodeList
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


def nodes_table(rig):
    """The lines of `phalanx nodes`."""
    found = msgspec.convert(rig.call("GET", "/v1/nodes"), NodeList)
    return node_lines(
        found.nodes,
        Terminal(width=400, height=40, interactive=False, colour=False, blocks=False),
        time.time(),
        found.ordered,
    )


def add_node(rig, like):
    """An autoscaler has started a node."""
    name = like["metadata"]["name"]
    rig.fake.store.create(NODES, "", {"metadata": {"name": name, "labels": like["metadata"]["labels"]}, "spec": {}})
    rig.fake.store.merge(NODES, "", name, {"status": like["status"]}, part="status")


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
        [awaited] = [one for one in rig.nodes() if one.get("provisioning")]
        assert awaited["provisioning"] == f"no node in Kubernetes yet for job {job}"
        printed = nodes_table(rig)
        states = sorted(line.split()[1] for line in printed[1:-1])
        assert states == ["provisioning", "up", "up"], printed
        assert printed[-1] == "6 of 6 devices in use; 1 node on the way"
        cancelled = rig.submit(run="true", gpus="3x2", tasks_per_node=1, name="second")
        assert rig.job(cancelled)["state"] == "pending", "the places are taken"
        rig.call("POST", f"/v1/jobs/{cancelled}/cancel")

        add_node(rig, kept)
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        wait_until(
            lambda: not any(one.get("provisioning") for one in rig.nodes()), "a machine stands behind each place"
        )
        open_gate(rig, "grows")
        view = rig.wait_for_state(job, "succeeded", "failed")
        assert (view["state"], view["attempts"]) == ("succeeded", 1), rig.history(job)

        rig.fake.store.delete(NODES, "", "n2", {})
        job = gated(rig, "leaves", gpus="3x2")
        wait_until(lambda: "no node in Kubernetes yet" in why(rig, job), "it waits")
        rig.call("POST", f"/v1/jobs/{job}/cancel")
        assert rig.wait_for_state(job, "cancelled", "failed")["state"] == "cancelled"
        wait_until(lambda: not pods(rig), "its pods are gone, also those that ran")


def test_a_job_that_waits_for_resident_pods_says_what_an_autoscaler_says_of_them():
    words = ("--min-run", "1s", "--kubernetes-resident", "0-2x2", "--kubernetes-node-wait", "10m")
    with kubernetes(words, wait_nodes=False) as rig:
        kept = {name: rig.fake.store.get(NODES, "", name) for name in ("n0", "n1", "n2")}
        for name in kept:
            rig.fake.store.delete(NODES, "", name, {})
        job = gated(rig, "resident", gpus="2x2")
        wait_until(lambda: len(pods(rig)) == 2, "both pods wait")
        says(rig, "karpenter", "Nominated", "Pod should schedule on: nodeclaim/gpu-7", 1)
        nominated = (
            "karpenter starts a node: Pod should schedule on: nodeclaim/gpu-7; given up after 10m00s without one"
        )
        wait_until(lambda: nominated in why(rig, job), "its why says that a node comes")
        assert "pool resident-2gpu is starting 2 nodes for it; no node in Kubernetes yet: 0/0 nodes are" in why(
            rig, job
        )
        assert rig.job(job)["state"] == "pending"
        assert nominated in "\n".join(nodes_table(rig))
        [pool] = rig.call("GET", "/v1/pools")["pools"]
        assert {one["state"] for one in pool["nodes"]} == {"provisioning"}
        assert any(nominated in one["problem"] for one in pool["nodes"])
        for item in kept.values():
            add_node(rig, item)
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        [pool] = rig.call("GET", "/v1/pools")["pools"]
        assert [(one["state"], one["problem"]) for one in pool["nodes"]] == [("up", "")] * 2
        open_gate(rig, "resident")
        assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", rig.history(job)
