"""Resident pods of the Kubernetes engine: their options, objects, judgement, and when their supervisors end. No clock, no cluster."""

# Ids are written as plain words here.
# mypy: disable-error-code="arg-type, var-annotated, import-untyped"

import contextlib
import json
import socket
from dataclasses import replace

import kubernetes_validate
import pytest

from phalanx.app.resident_supervisor import STOP_S, ResidentLife, head_answers
from phalanx.core.errors import BadRequest
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import render
from phalanx.engines.kubernetes.attempt_pods import (
    IMAGE_LIMIT_S,
    MISSING_S,
    START_LIMIT_MAX_S,
    START_LIMIT_S,
    AttemptPods,
)
from phalanx.engines.kubernetes.departures import closing_taint, ending_taint, reclaim
from phalanx.engines.kubernetes.engine import ClusterScope, KubernetesEngine
from phalanx.engines.kubernetes.parse import KubernetesNode, PodState, Taint
from phalanx.engines.kubernetes.render import PodSettings
from phalanx.engines.kubernetes.resident_options import resident_pools
from phalanx.engines.kubernetes.resident_pods import (
    GRACE_S,
    ResidentPod,
    delay_of,
    judge,
    pod_name,
    resident_pod,
    resident_secret,
)
from phalanx.ports.provider import DelayedNode, LeavingNode, LostNode, NodeOrder
from tests.builders import job, make_node, placed

SETTINGS = PodSettings(
    tag="0a1b2c3d", namespace="research", image="x", head_url="https://10.0.0.5:7600", ca_pem="the CA"
)
ORDER = NodeOrder(node_id="Resident_8gpu-0", token="Resident_8gpu-0-k1-77", template="8")
OWNER = render.owner_reference("phalanx-0a1b2c3d", "6f1c")
HELD = ResidentPod(order=ORDER, name=pod_name(SETTINGS, ORDER), created_s=0.0)
POD = PodState(name=HELD.name, namespace="research", uid="u", phase="Running", node="n0", gpus=8)
NODE = KubernetesNode(
    name="n0",
    not_ready="",
    cordoned=False,
    taints=(),
    labels={},
    cpus=8,
    memory_bytes=1,
    gpus=8,
    model="h100",
    memory_per_gpu_bytes=1,
    address="",
    hostname="n0",
)


NOT_READY = Taint(key="node.kubernetes.io/not-ready", value="", effect="NoExecute")
SPOT = Taint(key="aws-node-termination-handler/spot-itn", value="", effect="NoSchedule")
OURS = Taint(key="dedicated", value="vision", effect="NoSchedule")
EVICTS = Taint(key="maintenance", value="", effect="NoExecute")


def options(text, idle=""):
    return {"kubernetes-resident": text, "kubernetes-resident-idle": idle}


@pytest.mark.parametrize(("text", "found"), [("4x8", (0, 4, "8")), ("2-4x8", (2, 4, "8")), ("3-3x0", (3, 3, "0"))])
def test_the_option_asks_for_one_pool(text, found):
    [pool] = resident_pools(options(text, "1h"))
    assert (pool.min_nodes, pool.max_nodes, pool.template) == found
    assert (pool.id, pool.idle_s) == (f"resident-{found[2]}gpu", 3600.0)


@pytest.mark.parametrize("text", ["0x8", "8", "x8", "5-4x8", "4x8x1", "257x8", "-1x8", "4x 8", "٤x8", "4x65"])
def test_another_form_of_the_option_is_refused(text):
    with pytest.raises(BadRequest, match="not of the form"):
        resident_pools(options(text))


def test_without_the_option_there_is_no_pool():
    assert resident_pools(options("")) == ()


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_its_objects_are_valid_and_the_token_is_in_the_secret_only(version):
    pod, secret = resident_pod(SETTINGS, OWNER, ORDER), resident_secret(SETTINGS, OWNER, ORDER, "the token")
    for item in (pod, secret):
        kubernetes_validate.validate(item, version, strict=True)
        assert item["metadata"]["ownerReferences"] == [OWNER]
        assert item["metadata"]["name"].startswith("phalanx-0a1b2c3d-resident-8gpu-0-")
    spec = pod["spec"]
    assert "activeDeadlineSeconds" not in spec, "a job of months may run in it"
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", GRACE_S)
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert not any(word in json.dumps(pod) for word in ("the token", "the CA", ORDER.token))


def test_the_grace_of_the_template_is_the_one_that_the_supervisor_knows():
    made = resident_pod(replace(SETTINGS, template={"spec": {"terminationGracePeriodSeconds": 600}}), OWNER, ORDER)
    env = {one["name"]: one.get("value") for one in made["spec"]["containers"][0]["env"]}
    assert (made["spec"]["terminationGracePeriodSeconds"], env["PHALANX_RESIDENT_GRACE_S"]) == (600, "600")


def judged(pod, *, age_s=1.0, node=NODE, seen=True, silent_s=None):
    return judge(replace(HELD, seen=seen, silent_s=silent_s), pod, node, SETTINGS, age_s)


@pytest.mark.parametrize(
    ("pod", "fields", "found", "text"),
    [
        (POD, {}, None, ""),
        (None, {"seen": False}, None, ""),
        (None, {"seen": False, "age_s": MISSING_S}, LeavingNode, "no longer"),
        (None, {}, LeavingNode, "no longer"),
        (replace(POD, phase="Failed", exit_code=137), {}, LostNode, "137"),
        (replace(POD, phase="Failed", reason="Evicted", message="memory"), {}, LeavingNode, "Evicted"),
        (replace(POD, deleting=True), {}, LeavingNode, "being deleted"),
        (replace(POD, node="", unschedulable="no GPU"), {"node": None}, None, ""),
        (
            replace(POD, node="", unschedulable="no GPU"),
            {"node": None, "age_s": START_LIMIT_MAX_S},
            LeavingNode,
            "no GPU",
        ),
        (replace(POD, waiting="ErrImagePull"), {}, None, ""),
        (replace(POD, waiting="ErrImagePull", waiting_text="gone"), {"age_s": IMAGE_LIMIT_S}, LeavingNode, "gone"),
        (POD, {"node": replace(NODE, not_ready="it is not ready"), "silent_s": 0.0, "age_s": 59.0}, None, ""),
        (
            POD,
            {"node": replace(NODE, not_ready="it is not ready"), "silent_s": 0.0, "age_s": 60.0},
            LeavingNode,
            "not ready",
        ),
        (POD, {"node": replace(NODE, taints=(NOT_READY,))}, None, ""),
        (POD, {"node": replace(NODE, cordoned=True)}, LeavingNode, "cordon"),
        (POD, {"node": replace(NODE, taints=(Taint(key="spot", value="", effect="NoExecute"),))}, LeavingNode, "spot"),
        (POD, {"node": None}, None, ""),
    ],
)
def test_what_the_state_of_a_pod_means_for_its_node(pod, fields, found, text):
    event = judged(pod, **fields)
    assert (type(event) if event is not None else None) is found
    if event is not None:
        assert text in event.why
        assert (event.node_id, event.token) == (ORDER.node_id, ORDER.token)


@pytest.mark.parametrize(
    ("pod", "age_s", "note", "text"),
    [
        (POD, 30.0, "", ""),
        (replace(POD, node="", unschedulable="no GPU"), START_LIMIT_S - 1.0, "", ""),
        (
            replace(POD, node="", unschedulable="no GPU"),
            START_LIMIT_S,
            "karpenter starts a node: soon",
            "no node in Kubernetes yet: no GPU; karpenter starts a node: soon; given up after 1m00s without one",
        ),
        (
            replace(POD, waiting="ImagePullBackOff", waiting_text="not found"),
            1.0,
            "",
            f"the pod cannot start yet on {NODE.name}: ImagePullBackOff: not found",
        ),
    ],
)
def test_why_a_pod_does_not_run_yet(pod, age_s, note, text):
    assert delay_of(HELD, pod, SETTINGS, age_s, note) == text


def test_a_delay_is_reported_once_and_not_of_a_pod_that_ends():
    held = replace(HELD)
    waits, runs, leaves = (
        make(node_id=ORDER.node_id, token=ORDER.token, why=why)
        for make, why in ((DelayedNode, "no GPU"), (DelayedNode, ""), (LeavingNode, "evicted"))
    )
    assert [held.is_news(one) for one in (runs, waits, waits, runs, runs, waits)] == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert held.is_news(leaves)
    assert not held.is_news(runs)
    assert replace(HELD, delay=None).is_news(runs), "an earlier head may have reported a delay"


def test_a_supervisor_ends_after_sigterm_when_no_attempt_is_left_and_in_time():
    life = ResidentLife(grace_s=60.0, head_gone_s=3600.0, answered_s=0.0, asked_s=100.0)
    assert life.is_over(100.0, has_members=False)
    assert not life.is_over(100.0 + 60.0 - STOP_S - 0.1, has_members=True)
    assert life.is_over(100.0 + 60.0 - STOP_S, has_members=True)


def test_a_supervisor_ends_when_its_head_is_gone_and_not_under_a_long_job():
    life = ResidentLife(grace_s=60.0, head_gone_s=3600.0, answered_s=0.0)
    assert not life.is_over(3599.0, has_members=True)
    assert life.is_over(3600.0, has_members=True), "its ranks froze when the lease ended"
    life.answered_s = 30 * 86_400.0
    assert not life.is_over(30 * 86_400.0 + 10.0, has_members=True)


def test_a_head_answers_or_not():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert head_answers(url, "")
    assert not head_answers(url, "")


@pytest.mark.parametrize(
    ("taint", "ends", "closes"),
    [(NOT_READY, False, False), (SPOT, True, True), (OURS, False, True), (EVICTS, True, True)],
)
def test_which_taints_end_pods_and_which_only_keep_new_ones_away(taint, ends, closes):
    node = replace(NODE, taints=(taint,))
    assert (ending_taint(node, {}) is taint, closing_taint(node, {}) is taint) == (ends, closes)
    tolerant = {"spec": {"tolerations": [{"key": taint.key, "operator": "Exists"}]}}
    assert (ending_taint(node, tolerant), closing_taint(node, tolerant)) == (None, None)


def test_a_started_attempt_that_kubernetes_takes_back_is_stopped_as_a_whole():
    case = placed(job("17"), on="n0:0 n1:0")
    order = AttemptPods(attempt=replace(case.attempt, state=AttemptState.RUNNING), names=("a", "b"), created_s=0.0)
    pods = [replace(POD, name="a", node="n0"), replace(POD, name="b", node="n1")]
    nodes = {"n0": NODE, "n1": replace(NODE, name="n1")}
    assert reclaim(order, pods, nodes, {}) is None
    gone = reclaim(order, [pods[0], replace(pods[1], deleting=True)], nodes, {})
    assert gone is not None
    assert (gone.job_id, gone.epoch, "pod b" in gone.why) == ("17", 1, True)
    ending = reclaim(order, pods, {**nodes, "n1": replace(NODE, taints=(SPOT,))}, {})
    assert ending is not None
    assert "n1 has the taint" in ending.why
    assert reclaim(order, pods, {**nodes, "n1": replace(NODE, cordoned=True, taints=(OURS, NOT_READY))}, {}) is None
    deleted = [replace(pod, deleting=True) for pod in pods]
    assert reclaim(replace(order, deleted=True), deleted, nodes, {}) is None
    assert reclaim(replace(order, attempt=case.attempt), deleted, nodes, {}) is None, (
        "it has not started: it is withdrawn"
    )


def test_nodes_of_pods_per_attempt_are_retired_when_jobs_run_in_resident_pods():
    engine = KubernetesEngine(api=None, settings=SETTINGS, scope=ClusterScope(lists_nodes=False), key_of=lambda *_: "")
    known = [
        replace(make_node("n0"), engine="kubernetes", per_attempt=True),
        replace(make_node("resident-2gpu-0"), engine="kubernetes"),
        make_node("other"),
    ]
    found = engine.discover(known, [])
    assert (found.retired, [death.node_id for death in found.deaths]) == (["n0"], ["n0"])
