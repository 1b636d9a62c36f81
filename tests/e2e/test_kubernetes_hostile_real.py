"""Hostile states that a real API server, scheduler and controllers bring about: quotas, limits, finalizers, the garbage collector, preemption, lost rights."""

import contextlib
import json

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_real_rig import grant, real_kubernetes
from tests.kubernetes.real_cluster import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def shared():
    with real_kubernetes(("--min-run", "1s")) as made:
        yield made


@pytest.fixture
def rig(shared):
    yield shared
    for job in shared.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            shared.call("POST", f"/v1/jobs/{job['id']}/cancel")
            shared.wait_for_state(job["id"], "cancelled", "failed", "succeeded")
    wait_until(lambda: not pods(shared), "no pod is left")


def pods(rig):
    return [item["metadata"]["name"] for item in rig.real.get(PODS)[1]["items"]]


def apply(rig, *objects):
    rig.real.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


@contextlib.contextmanager
def having(rig, item):
    """An object exists for a while."""
    apply(rig, item)
    try:
        yield
    finally:
        rig.real.kubectl("delete", item["kind"], item["metadata"]["name"], "--grace-period=1", check=False)


def story(rig, job):
    return " | ".join(line["text"] for line in rig.history(job))


def runs(rig, job, attempt=1):
    wait_until(
        lambda: (view := rig.job(job))["attempt_state"] == "running" and view["attempts"] == attempt,
        f"attempt {attempt} of job {job} runs",
    )


def test_a_quota_lets_the_whole_gang_wait(rig):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    with having(rig, quota):
        wait_until(
            lambda: rig.real.get("/api/v1/namespaces/default/resourcequotas/q")[1].get("status", {}).get("hard"),
            "the quota is known",
        )
        job = rig.submit(run="true", gpus="2x1", tasks_per_node=1, name="quota")
        wait_until(lambda: "exceeded quota: q" in story(rig, job), "the reason is told")
        assert rig.job(job)["state"] == "pending"
        wait_until(lambda: not pods(rig), "the pod that was created is gone")


def test_a_limit_range_fails_a_job_with_its_words(rig):
    limit = {"type": "Container", "max": {"memory": "1Mi"}}
    item = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": [limit]}}
    with having(rig, item):
        job = rig.submit(run="true", gpus="1", memory="1GiB", name="limit")
        assert rig.wait_for_state(job, "failed", "succeeded")["state"] == "failed"
        assert "maximum memory usage per Container is 1Mi" in story(rig, job)


def test_a_pod_that_a_finalizer_keeps_does_not_keep_its_job(rig):
    job = gated(rig, "finalizer", gpus="1")
    runs(rig, job)
    [name] = pods(rig)
    change = json.dumps({"metadata": {"finalizers": ["example.com/audit"]}})
    rig.real.kubectl("patch", "pod", name, "--type=merge", "-p", change)
    try:
        rig.real.kubectl("delete", "pod", name, "--wait=false")
        runs(rig, job, attempt=2)
        assert name in pods(rig)
        open_gate(rig, "finalizer")
        assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"
    finally:
        rig.real.kubectl("patch", "pod", name, "--type=merge", "-p", json.dumps({"metadata": {"finalizers": None}}))


def test_the_garbage_collector_removes_everything_with_the_owner(rig):
    job = gated(rig, "owner", gpus="2x1")
    runs(rig, job)
    [owner] = [
        item["metadata"]["name"]
        for item in rig.real.get("/api/v1/namespaces/default/configmaps")[1]["items"]
        if item["metadata"]["name"].startswith("phalanx-")
    ]
    rig.real.kubectl("delete", "configmap", owner)
    runs(rig, job, attempt=2)
    open_gate(rig, "owner")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_pod_of_a_higher_priority_preempts_a_job_which_waits_and_runs_again(rig):
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    main = {
        "name": "main",
        "image": "here",
        "command": ["sleep", "300"],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    }
    spec = {"priorityClassName": "urgent", "restartPolicy": "Never", "containers": [main]}
    job = gated(rig, "preempted", gpus="3x2")
    runs(rig, job)
    with having(rig, urgent):
        with having(rig, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": spec}):
            running = lambda: rig.real.get(f"{PODS}/theirs")[1].get("status", {}).get("phase") == "Running"  # noqa: E731
            wait_until(running, "their pod runs in place of one of ours")
            wait_until(lambda: "theirs" in json.dumps(rig.call("GET", f"/v1/jobs/{job}/why")), "the reason names it")
        runs(rig, job, attempt=rig.job(job)["attempts"] + 1)
    open_gate(rig, "preempted")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_right_that_is_taken_away_lets_new_jobs_wait_and_running_ones_run(rig):
    first = gated(rig, "rights", gpus="1")
    runs(rig, first)
    role = rig.real.kubectl("get", "role", "phalanx", "-o", "json")
    without = json.loads(role)
    without["rules"] = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if not ("pods" in rule["resources"] and verb == "create")]}
        for rule in without["rules"]
    ]
    for key in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
        without["metadata"].pop(key, None)
    apply(rig, without)
    try:
        job = rig.submit(run="true", gpus="1", name="denied")
        wait_until(lambda: 'cannot create resource "pods"' in story(rig, job), "the reason is told")
        assert rig.job(job)["state"] == "pending"
        assert rig.job(first)["attempt_state"] == "running"
    finally:
        grant(rig.real)
    open_gate(rig, "rights")
    assert rig.wait_for_state(first, "succeeded", "failed")["attempts"] == 1
