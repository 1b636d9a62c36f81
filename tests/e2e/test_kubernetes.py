"""A head on Kubernetes in hostile states of its cluster. The API server and its nodes are the fake of `tests/kubernetes`; head and pods are real processes."""

import base64
import contextlib
import dataclasses
import json
import os
import signal
from functools import partial

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_rig import kubernetes
from tests.kubernetes.fake_store import KINDS, Refused

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS, SECRETS, CONFIG_MAPS, NODES, EVENTS = (
    KINDS["", name] for name in ("pods", "secrets", "configmaps", "nodes", "events")
)


@pytest.fixture(scope="module")
def shared():
    with kubernetes(("--min-run", "1s", "--kubernetes-image", "registry.example/phalanx:1")) as made:
        yield made


@pytest.fixture
def rig(shared):
    yield shared
    shared.fake.faults.clear()
    shared.fake.away.clear()
    shared.fake.silent.clear()
    shared.fake.double_events = False
    shared.fake.store.admission.clear()
    shared.fake_nodes.unscheduled.clear()
    for job in shared.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            shared.call("POST", f"/v1/jobs/{job['id']}/cancel")
            shared.wait_for_state(job["id"], "cancelled", "failed", "succeeded")
    for item in pods(shared):
        if not item["metadata"].get("labels", {}).get("phalanx/head"):
            shared.fake.store.delete(PODS, "default", item["metadata"]["name"], {"gracePeriodSeconds": 0})
    wait_until(lambda: not pods(shared), "no pod is left")
    wait_until(lambda: all(node["state"] == "up" for node in shared.nodes()), "all nodes are up")


def pods(rig):
    return rig.fake.store.select(PODS, "default", "", "")[0]


def story(rig, job):
    return " | ".join(line["text"] for line in rig.history(job))


def runs(rig, job):
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", f"job {job} runs")


def causes(rig, job):
    return [attempt["cause"] for attempt in rig.call("GET", f"/v1/jobs/{job}/receipt")["attempts"]]


def why(rig, job):
    return json.dumps(rig.call("GET", f"/v1/jobs/{job}/why"))


def test_a_pod_whose_processes_are_killed_runs_again_without_waiting_for_a_lease(rig):
    job = gated(rig, "killed", gpus="2x1")
    runs(rig, job)
    node = rig.job(job)["nodes"][0]
    [pid] = rig.fake_nodes.processes(node).values()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert "ended as Failed with code 137" in story(rig, job)
    open_gate(rig, "killed")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_pod_that_is_deleted_by_hand_stops_its_gang_which_runs_again(rig):
    job = gated(rig, "deleted", gpus="2x1")
    runs(rig, job)
    rig.fake.store.delete(PODS, "default", pods(rig)[0]["metadata"]["name"], {})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    assert causes(rig, job)[0] == "preempted", "the ranks of all its nodes were stopped together, to save"
    open_gate(rig, "deleted")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_deleting_the_owner_removes_everything_and_the_next_attempt_has_a_new_one(rig):
    job = gated(rig, "owned", gpus="1")
    runs(rig, job)
    [owner] = [name for kind, _, name in rig.fake.store.items if kind == CONFIG_MAPS]
    rig.fake.store.delete(CONFIG_MAPS, "default", owner, {})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert [name for kind, _, name in rig.fake.store.items if kind == CONFIG_MAPS] == [owner]
    open_gate(rig, "owned")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_an_api_server_that_is_away_is_not_noticed_by_a_job_and_gets_no_new_ones(rig):
    job = gated(rig, "away", gpus="3x1")
    runs(rig, job)
    rig.fake.away.set()
    rig.fake.cut_watches()
    wait_until(lambda: all(node["cordon"] for node in rig.nodes()), "no new jobs are placed")
    assert "does not answer" in rig.nodes()[0]["cordon"]["why"]
    waiting = rig.submit(run="true", gpus="1", name="waiting")
    open_gate(rig, "away")
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), story(rig, job)
    assert rig.job(waiting)["state"] == "pending"
    rig.fake.away.clear()
    assert rig.wait_for_state(waiting, "succeeded", "failed")["state"] == "succeeded"


def test_watches_that_break_repeat_and_forget_cost_nothing(rig):
    rig.fake.double_events = True
    job = gated(rig, "storm", gpus="2x1")
    for _ in range(10):
        rig.fake.cut_watches()
        rig.fake.store.compact()
        rig.submit(run="true", gpus="1", name="more")
    runs(rig, job)
    open_gate(rig, "storm")
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert (view["state"], view["attempts"]) == ("succeeded", 1), story(rig, job)


def test_an_overloaded_server_delays_a_job_and_no_more(rig):
    left = [6]

    def busy(method, path):
        if method != "GET" and left[0] > 0:
            left[0] -= 1
            raise Refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "1"})
        return False

    rig.fake.faults.append(busy)
    job = rig.submit(run="true", gpus="2x1", tasks_per_node=1, name="busy")
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert (view["state"], view["attempts"]) == ("succeeded", 1), story(rig, job)


def test_a_create_whose_answer_is_lost_makes_no_second_pod(rig):
    lost = [1]

    def drop(method, path):
        if method == "POST" and "/pods" in path and lost[0] > 0:
            lost[0] -= 1
            made = rig.fake.requests[-1]
            assert made
            return True
        return False

    rig.fake.faults.append(drop)
    job = rig.submit(run="true", gpus="1", name="lost")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", story(rig, job)


def test_gpus_of_other_pods_are_seen_and_waited_for(rig):
    theirs = {
        "containers": [
            {"name": "x", "image": "x", "command": ["sleep", "60"], "resources": {"limits": {"nvidia.com/gpu": "2"}}}
        ]
    }
    for name in ("n0", "n1"):
        rig.fake.store.create(
            PODS, "default", {"metadata": {"name": f"theirs-{name}"}, "spec": {**theirs, "nodeName": name}}
        )
    wait_until(lambda: sum(bool(node["outside"]) for node in rig.nodes()) == 2, "their GPUs are seen")
    job = rig.submit(run="true", gpus="2x1", tasks_per_node=1, name="waits")
    wait_until(lambda: "theirs-n0" in why(rig, job) or "outside" in why(rig, job), "the reason names them")
    assert rig.job(job)["state"] == "pending"
    rig.fake.store.delete(PODS, "default", "theirs-n0", {"gracePeriodSeconds": 0})
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_quota_is_a_limit_that_may_pass(rig):
    def quota(kind, item):
        if kind == PODS:
            raise Refused(
                403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8'
            )

    rig.fake.store.admission.append(quota)
    job = rig.submit(run="true", gpus="1", name="quota")
    wait_until(lambda: "exceeded quota" in story(rig, job), "the reason is told")
    assert rig.job(job)["state"] == "pending", "it is tried again a minute later"
    left = partial(rig.fake.store.select, SECRETS, "default", f"phalanx/job={job}", "")
    wait_until(lambda: not left()[0], "its token is gone, just after the report")


def test_a_pod_that_an_admission_rule_refuses_fails_its_job_with_the_rule(rig):
    def rule(kind, item):
        if kind == PODS and item["metadata"]["name"].endswith("n1"):
            raise Refused(403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"')

    rig.fake.store.admission.append(rule)
    job = rig.submit(run="true", gpus="2x1", tasks_per_node=1, name="rule")
    assert rig.wait_for_state(job, "failed", "succeeded")["state"] == "failed"
    assert "violates PodSecurity" in story(rig, job)
    wait_until(lambda: not pods(rig), "the first pod of the gang is gone too")


def test_a_gang_that_no_scheduler_places_is_withdrawn_and_its_job_waits(rig):
    rig.fake_nodes.unscheduled.set()
    job = rig.submit(run="true", gpus="2x1", tasks_per_node=1, name="unplaced")
    wait_until(lambda: "did not place the pods" in story(rig, job), "it is withdrawn")
    wait_until(lambda: not pods(rig) or rig.job(job)["attempts"] > 1, "no pod of it stays")
    rig.fake_nodes.unscheduled.clear()
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", story(rig, job)


def test_a_cordon_of_kubernetes_is_one_of_the_node(rig):
    rig.fake.store.merge(NODES, "", "n2", {"spec": {"unschedulable": True}})
    cordon = lambda: next(node["cordon"] for node in rig.nodes() if node["id"] == "n2")  # noqa: E731
    wait_until(cordon, "it is cordoned")
    job = rig.submit(run="true", gpus="3x1", tasks_per_node=1, name="three")
    assert rig.job(job)["state"] == "pending"
    rig.fake.store.merge(NODES, "", "n2", {"spec": {"unschedulable": None}})
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_spot_notice_stops_the_gangs_of_its_node_which_run_again_elsewhere(rig):
    job = gated(rig, "spot", gpus="2x1")
    runs(rig, job)
    ending = rig.job(job)["nodes"][1]
    taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    rig.fake.store.merge(NODES, "", ending, {"spec": {"taints": [taint]}})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "it is placed again")
    runs(rig, job)
    assert ending not in rig.job(job)["nodes"]
    assert causes(rig, job)[0] == "preempted"
    rig.fake.store.merge(NODES, "", ending, {"spec": {"taints": None}})
    open_gate(rig, "spot")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_node_that_is_deleted_is_down_and_comes_back(rig):
    kept = rig.fake.store.get(NODES, "", "n2")
    rig.fake.store.delete(NODES, "", "n2", {})
    state = lambda: next(node["state"] for node in rig.nodes() if node["id"] == "n2")  # noqa: E731
    wait_until(lambda: state() == "down", "it is down")
    rig.fake.store.create(NODES, "", {"metadata": {"name": "n2", "labels": kept["metadata"]["labels"]}, "spec": {}})
    rig.fake.store.merge(NODES, "", "n2", {"status": kept["status"]}, part="status")
    wait_until(lambda: state() == "up", "it is up")


def test_ranks_of_pods_meet_at_the_addresses_of_their_pods(rig):
    job = rig.submit(
        run='echo "$PHALANX_NODE_IPS" | tr "\\n" " "; echo "at $MASTER_ADDR"',
        gpus="3x1",
        tasks_per_node=1,
        name="address",
    )
    rig.wait_for_state(job, "succeeded", "failed")
    text = "".join(chunk["text"] for chunk in rig.call("GET", f"/v1/jobs/{job}/logs?cursor=")["chunks"])
    assert text.count("at 127.0.1.") == 3, text
    assert "127.0.0.1" not in text


def test_tokens_and_certificates_are_in_secrets_only(rig):
    job = gated(rig, "secret", gpus="2x1")
    runs(rig, job)
    [secret] = rig.fake.store.select(SECRETS, "default", f"phalanx/job={job}", "")[0]
    key = json.loads(base64.b64decode(secret["data"]["seat"]))["key"]
    shown = json.dumps(
        [*pods(rig), *rig.fake.store.select(CONFIG_MAPS, "", "", "")[0], *rig.fake.store.select(EVENTS, "", "", "")[0]]
    )
    with (
        open(os.path.join(rig.home, "head.log"), encoding="utf-8") as log,
        open(rig.fake_nodes.output, encoding="utf-8") as output,
    ):
        written = log.read() + output.read() + story(rig, job)
    assert key
    assert not any(key in text for text in (shown, written))
    open_gate(rig, "secret")
    rig.wait_for_state(job, "succeeded")
    wait_until(
        lambda: not rig.fake.store.select(SECRETS, "default", f"phalanx/job={job}", "")[0],
        "the Secret goes with the attempt",
    )


def test_a_head_that_comes_back_deletes_what_it_no_longer_knows(rig):
    job = gated(rig, "stray", gpus="1")
    runs(rig, job)
    [ours] = pods(rig)
    stray = {"metadata": {**ours["metadata"], "name": "stray"}, "spec": ours["spec"]}
    stray["metadata"]["labels"]["phalanx/job"] = "999"
    for key in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace"):
        stray["metadata"].pop(key, None)
    rig.kill_head()
    rig.fake.store.create(PODS, "default", stray)
    rig.start(wait_nodes=False)
    wait_until(
        lambda: [item["metadata"]["name"] for item in pods(rig)] == [ours["metadata"]["name"]], "the stray is gone"
    )
    open_gate(rig, "stray")
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert (view["state"], view["attempts"]) == ("succeeded", 1)


def test_two_heads_in_one_namespace_do_not_touch_each_other(rig):
    job = gated(rig, "first", gpus="1")
    runs(rig, job)
    with second_head(rig) as other:
        mine = other.submit(run="true", gpus="1", name="second")
        assert other.wait_for_state(mine, "succeeded", "failed")["state"] == "succeeded"
    assert rig.job(job)["attempt_state"] == "running"
    assert [item["metadata"]["labels"]["phalanx/job"] for item in pods(rig)] == [job]
    open_gate(rig, "first")
    assert rig.wait_for_state(job, "succeeded", "failed")["attempts"] == 1


@contextlib.contextmanager
def second_head(rig):
    import tempfile

    from benchmarks.cluster import free_port

    with tempfile.TemporaryDirectory(prefix="phalanx-engine-") as home:
        other = dataclasses.replace(rig, home=home, port=free_port(), head=None, revivals=[])
        try:
            other.start()
            yield other
        finally:
            other.stop()
