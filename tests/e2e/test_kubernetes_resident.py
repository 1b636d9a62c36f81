"""Resident pods on the fake cluster: nodes of a pool, with real heads, supervisors and ranks."""

import os
import signal

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_rig import kubernetes
from tests.kubernetes.fake_store import KINDS

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS, SECRETS, CONFIG_MAPS, NODES = (KINDS["", name] for name in ("pods", "secrets", "configmaps", "nodes"))
POOL = "resident-2gpu"


@pytest.fixture(scope="module")
def shared():
    words = ("--min-run", "1s", "--kubernetes-resident", "2x2", "--kubernetes-resident-idle", "1h")
    with kubernetes(words, wait_nodes=False) as made:
        yield made


@pytest.fixture
def rig(shared):
    yield shared
    if shared.head is None:
        return  # the last test has ended it
    shared.fake.away.clear()
    for job in shared.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            shared.call("POST", f"/v1/jobs/{job['id']}/cancel")
            shared.wait_for_state(job["id"], "cancelled", "failed", "succeeded")
    for name in ("n0", "n1", "n2"):
        shared.fake.store.merge(NODES, "", name, {"spec": {"unschedulable": None, "taints": None}})


def pods(rig):
    return {item["metadata"]["name"]: item for item in rig.fake.store.select(PODS, "default", "", "")[0]}


def story(rig, job):
    return " | ".join(line["text"] for line in rig.history(job))


def runs(rig, job):
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", f"job {job} runs")


def ends_well(rig, job):
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert view["state"] == "succeeded", story(rig, job)
    return view


def pod_of(rig, node):
    [found] = [name for name, item in pods(rig).items() if item["metadata"]["annotations"]["phalanx/node"] == node]
    return found


def causes(rig, job):
    return [attempt["cause"] for attempt in rig.call("GET", f"/v1/jobs/{job}/receipt")["attempts"]]


def set_idle(rig, idle):
    body = {"provider": "kubernetes", "node": "2", "min_nodes": 0, "max_nodes": 2, "price_per_h": 0.0}
    rig.call("PUT", f"/v1/pools/{POOL}", {**body, "idle": idle, "start_limit": "10m"})


def test_pods_come_for_a_job_stay_for_the_next_and_go_when_they_idle(rig):
    ends_well(rig, rig.submit(run="echo first", gpus="2x2", tasks_per_node=1, name="first"))
    names = set(pods(rig))
    assert len(names) == 2
    for _ in range(3):
        ends_well(rig, rig.submit(run="echo next", gpus="2x2", tasks_per_node=1, name="next"))
    assert set(pods(rig)) == names, "the same pods ran them"
    assert {node["id"].rpartition("-")[0] for node in rig.nodes()} == {POOL}
    set_idle(rig, "1s")
    wait_until(lambda: [name.partition("/")[0] for name in rig.objects()] == ["configmaps"], "idle pods are deleted")
    set_idle(rig, "1h")


def test_a_pod_that_is_killed_is_replaced_and_its_job_runs_again(rig):
    job = gated(rig, "killed", gpus="1x2")
    runs(rig, job)
    [node] = rig.job(job)["nodes"]
    name = pod_of(rig, node)
    [pid] = [pid for one in ("n0", "n1", "n2") for pod, pid in rig.fake_nodes.processes(one).items() if pod == name]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert rig.job(job)["nodes"] != [node]
    open_gate(rig, "killed")
    ends_well(rig, job)
    wait_until(lambda: name not in pods(rig), "the ended pod is deleted")


def test_a_pod_that_is_deleted_by_hand_is_drained_and_replaced(rig):
    job = gated(rig, "deleted", gpus="2x2")
    runs(rig, job)
    name = pod_of(rig, rig.job(job)["nodes"][0])
    rig.fake.store.delete(PODS, "default", name, {})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    open_gate(rig, "deleted")
    ends_well(rig, job)
    assert causes(rig, job) == ["drained", "succeeded"], "all ranks were stopped together, to save"


def test_pods_of_a_cordoned_node_move_with_their_jobs(rig):
    job = gated(rig, "cordoned", gpus="1x2")
    runs(rig, job)
    where = pods(rig)[pod_of(rig, rig.job(job)["nodes"][0])]["spec"]["nodeName"]
    rig.fake.store.merge(NODES, "", where, {"spec": {"taints": [{"key": "spot/ending", "effect": "NoExecute"}]}})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert pods(rig)[pod_of(rig, rig.job(job)["nodes"][0])]["spec"]["nodeName"] != where
    open_gate(rig, "cordoned")
    ends_well(rig, job)
    assert causes(rig, job) == ["drained", "succeeded"]


def test_a_head_that_comes_back_keeps_its_pods_and_deletes_strays(rig):
    job = gated(rig, "head", gpus="2x2")
    runs(rig, job)
    before = set(pods(rig))
    ours = pods(rig)[min(before)]
    idle = {"name": "phalanx", "image": "x", "command": ["sleep", "600"]}
    stray = {"metadata": {**ours["metadata"], "name": "stray"}, "spec": {**ours["spec"], "containers": [idle]}}
    for key in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace"):
        stray["metadata"].pop(key, None)
    rig.kill_head()
    rig.fake.store.create(PODS, "default", stray)
    rig.start(wait_nodes=False)
    wait_until(lambda: set(pods(rig)) == before, "the stray is deleted")
    runs(rig, job)
    open_gate(rig, "head")
    assert ends_well(rig, job)["attempts"] == 1, story(rig, job)


def test_an_api_server_that_is_away_is_not_noticed_by_jobs_in_resident_pods(rig):
    job = gated(rig, "away", gpus="2x2")
    runs(rig, job)
    rig.fake.away.set()
    rig.fake.cut_watches()
    open_gate(rig, "away")
    assert ends_well(rig, job)["attempts"] == 1, story(rig, job)
    ends_well(rig, rig.submit(run="true", gpus="2x2", tasks_per_node=1, name="meanwhile"))


def test_deleting_the_owner_removes_the_pods_and_the_next_job_has_new_ones(rig):
    job = gated(rig, "owned", gpus="2x2")
    runs(rig, job)
    before = set(pods(rig))
    [owner] = [name for kind, _, name in rig.fake.store.items if kind == CONFIG_MAPS]
    rig.fake.store.delete(CONFIG_MAPS, "default", owner, {})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert before.isdisjoint(rig.job(job)["nodes"])
    open_gate(rig, "owned")
    ends_well(rig, job)
    rig.stop()
    wait_until(lambda: rig.objects() == [], "the end of the head leaves nothing")
