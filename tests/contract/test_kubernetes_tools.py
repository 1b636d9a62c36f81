"""The real Kubernetes and the stand-in kubelet do what tests of the engine rely on."""

import glob
import json
import os

import pytest

from benchmarks.cluster import wait_until
from tests.kubernetes.real_cluster import RealCluster, why_not
from tests.lab.lab import Lab
from tests.lab.needs import why_not as why_no_lab

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300), pytest.mark.skipif(bool(why_not()), reason=why_not())]
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def cluster():
    with RealCluster(nodes={"n0": 8, "n1": 8}) as made:
        yield made


@pytest.fixture(autouse=True)
def none_left(cluster):
    yield
    cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    wait_until(lambda: not cluster.get(PODS)[1]["items"], "no pod is left")


def pod(name, script, *, gpus=0, container=None, **spec):
    main = {"name": "main", "image": "here", "command": ["/bin/sh", "-c", script], **(container or {})}
    if gpus:
        main["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    meta = {"name": name}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {"restartPolicy": "Never", "containers": [main], **spec},
    }


def create(cluster, *objects):
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def status(cluster, name):
    return cluster.get(f"{PODS}/{name}")[1]["status"]


def ended(cluster, name):
    return wait_until(
        lambda: (one := status(cluster, name))["phase"] in ("Succeeded", "Failed") and one, f"{name} ends", limit_s=60
    )


def exit_code(found):
    return found["containerStatuses"][0]["state"]["terminated"]["exitCode"]


def test_pods_run_on_the_nodes_that_the_scheduler_chose_and_their_output_is_readable(cluster):
    script = 'echo "$WHO on $NODE with $NVIDIA_VISIBLE_DEVICES, $(cat /etc/told/word)"; exit $CODE'
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"code": "7", "word": "hush"},
    }
    env = [
        {"name": "WHO", "value": "ada"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "CODE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "code"}}},
    ]
    mounts = [{"name": "told", "mountPath": "/etc/told", "readOnly": True}]
    volumes = [{"name": "told", "secret": {"secretName": "s"}}]
    create(cluster, secret, pod("a", script, gpus=2, container={"env": env, "volumeMounts": mounts}, volumes=volumes))
    found = ended(cluster, "a")
    assert (found["phase"], exit_code(found)) == ("Failed", 7)
    node = cluster.get(f"{PODS}/a")[1]["spec"]["nodeName"]
    assert cluster.kubectl("logs", "a") == f"ada on {node} with 0,1, hush\n"


def test_pods_share_the_devices_of_the_nodes_and_the_rest_is_unschedulable(cluster):
    create(cluster, *(pod(f"g{number}", "sleep 60", gpus=8) for number in range(3)))
    wait_until(
        lambda: sum(status(cluster, f"g{n}")["phase"] == "Running" for n in range(3)) == 2, "two run", limit_s=60
    )
    (waiting,) = [n for n in range(3) if status(cluster, f"g{n}")["phase"] == "Pending"]
    condition = wait_until(lambda: status(cluster, f"g{waiting}").get("conditions"), "the scheduler says why")[0]
    assert (condition["reason"], "2 Insufficient nvidia.com/gpu" in condition["message"]) == ("Unschedulable", True), (
        condition
    )
    (running, _) = [n for n in range(3) if n != waiting]
    cluster.kubectl("delete", "pod", f"g{running}", "--grace-period=1")
    wait_until(lambda: status(cluster, f"g{waiting}")["phase"] == "Running", "the third runs", limit_s=60)


def test_a_deleted_pod_has_its_grace_and_its_own_files(cluster):
    script = 'trap "echo saved >/told/file; echo bye; exit 0" TERM; touch /only-in-the-pod; echo up; while :; do sleep 0.1; done'
    mounts = [{"name": "told", "mountPath": "/told"}]
    claim = [{"name": "told", "persistentVolumeClaim": {"claimName": "c"}}]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "v"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": "/tmp"},
            "storageClassName": "x",
        },
    }
    wish = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "c"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "x",
        },
    }
    create(cluster, volume, wish, pod("graced", script, container={"volumeMounts": mounts}, volumes=claim))
    wait_until(lambda: cluster.kubectl("logs", "graced", check=False) == "up\n", "it runs", limit_s=60)
    cluster.kubectl("delete", "pod", "graced", "--grace-period=30")
    assert cluster.get(f"{PODS}/graced")[0] == 404
    with open(f"{cluster.folder}/claims/default/c/file", encoding="utf-8") as file:
        assert file.read() == "saved\n"
    create(cluster, pod("next", "ls /only-in-the-pod"))
    assert exit_code(ended(cluster, "next")) == 2


def test_init_containers_run_first_and_users_are_those_of_the_security_context(cluster):
    shared = [{"name": "s", "mountPath": "/s"}]
    init = {"name": "init", "image": "here", "command": ["/bin/sh", "-c", "id -u >/s/user"], "volumeMounts": shared}
    security = {"runAsUser": 1234, "runAsGroup": 99, "fsGroup": 77, "runAsNonRoot": True}
    container = {"volumeMounts": shared, "securityContext": {"readOnlyRootFilesystem": True}}
    script = "cat /s/user; id -u; id -g; id -G; touch /x 2>/dev/null || echo read-only; stat -c %g /s"
    create(
        cluster,
        pod(
            "u",
            script,
            container=container,
            initContainers=[init],
            volumes=[{"name": "s", "emptyDir": {}}],
            securityContext=security,
        ),
    )
    ended(cluster, "u")
    assert cluster.kubectl("logs", "u").split("\n")[:-1] == ["1234", "1234", "99", "99 77", "read-only", "77"]


def test_deadlines_missing_images_and_missing_secrets_are_reported_as_by_a_kubelet(cluster):
    wrong = pod("image", "true")
    wrong["spec"]["containers"][0]["image"] = "missing/none:1"
    keyed = pod(
        "secret",
        "true",
        container={"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]},
    )
    create(cluster, pod("late", "sleep 60", activeDeadlineSeconds=1), wrong, keyed)

    def waits_for(name, *reasons):
        found = status(cluster, name).get("containerStatuses", [{"state": {}}])[0]["state"].get("waiting", {})
        return found.get("reason") in reasons

    wait_until(lambda: waits_for("image", "ImagePullBackOff"), "the image is refused", limit_s=60)
    wait_until(lambda: waits_for("secret", "CreateContainerConfigError"), "the secret is missed", limit_s=60)
    found = ended(cluster, "late")
    assert (found["phase"], found["reason"]) == ("Failed", "DeadlineExceeded")


def test_a_user_has_the_rights_of_the_role_and_no_more(cluster):
    cluster.kubectl("create", "role", "r", "--verb=get,list", "--resource=pods")
    cluster.kubectl("create", "rolebinding", "b", "--role=r", "--user=ada")
    assert "pods" not in cluster.kubectl("get", "pods", user="ada", check=False).lower().replace(
        "no resources found", ""
    )
    assert "forbidden" in cluster.kubectl("get", "nodes", user="ada", check=False)
    assert "forbidden" in cluster.kubectl("get", "pods", user="bob", check=False)


def test_a_version_from_before_a_compaction_is_gone(cluster):
    version = cluster.get(PODS)[1]["metadata"]["resourceVersion"]
    create(cluster, pod("one", "true"))
    ended(cluster, "one")
    cluster.compact()
    cluster.stop_api()  # with its cache of the last events
    assert cluster.get(PODS)[0] == 0
    cluster.start_api()
    kept = cluster.get(f"{PODS}?watch=1&timeoutSeconds=1&resourceVersion={version}")
    assert kept[0] == 410 or kept[1]["object"]["code"] == 410, kept


def test_a_dead_node_is_found_by_the_controllers_and_its_pods_fail_when_it_is_back(cluster):
    create(cluster, pod("lost", "sleep 300", gpus=8, nodeName="n1"))
    wait_until(lambda: status(cluster, "lost")["phase"] == "Running", "it runs", limit_s=60)
    cluster.kill_node("n1")

    def ready(name):
        _, node = cluster.get(f"/api/v1/nodes/{name}")
        return next(one["status"] for one in node["status"]["conditions"] if one["type"] == "Ready")

    wait_until(lambda: ready("n1") == "Unknown", "the node controller saw it", limit_s=120)
    assert status(cluster, "lost")["phase"] == "Running"
    cluster.start_node("n1", 8)
    wait_until(lambda: ready("n1") == "True", "it is back", limit_s=60)
    assert ended(cluster, "lost")["phase"] == "Failed"


@pytest.mark.root
def test_a_cut_cable_of_a_node_in_the_lab_is_seen_by_the_controllers_and_stops_no_pod():
    if why_no_lab():
        pytest.skip(why_no_lab())
    with Lab(size=3, gpus=0) as lab, RealCluster(nodes={"h1": 8, "h2": 8}, lab=lab) as cluster:
        create(cluster, pod("far", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done", nodeName="h2"))
        wait_until(lambda: status(cluster, "far")["phase"] == "Running", "it runs", limit_s=60)
        assert status(cluster, "far")["hostIP"] == lab.host("h2").address
        lab.cut("h2")

        def ready():
            _, node = cluster.get("/api/v1/nodes/h2")
            return next(one["status"] for one in node["status"]["conditions"] if one["type"] == "Ready")

        wait_until(lambda: ready() == "Unknown", "the node controller saw it", limit_s=120)
        (log,) = glob.glob(f"{cluster.folder}/nodes/h2/logs/*/main.log")
        size = os.path.getsize(log)
        wait_until(lambda: os.path.getsize(log) > size, "its pod goes on")
        lab.mend("h2")
        wait_until(lambda: ready() == "True", "it is back", limit_s=120)
        assert status(cluster, "far")["containerStatuses"][0]["restartCount"] == 0
