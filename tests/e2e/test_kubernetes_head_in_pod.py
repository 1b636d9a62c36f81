"""A head that runs in a pod of a real API server, by the YAML of `up --print all`: clients, a gang, and a head's pod that is killed and replaced.

Three hosts of the lab are the nodes, so that a pod's address differs from node to node. The image of all pods is this checkout.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cluster import ROOT, wait_until
from phalanx.cli.root import main as command_line
from tests.kubernetes.real_cluster import TOOLS, RealCluster
from tests.kubernetes.real_cluster import why_not as why_no_kubernetes
from tests.lab.lab import Lab
from tests.lab.needs import why_not

WHY_NOT = why_not() or why_no_kubernetes()
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "the lab"),
]
until = partial(wait_until, every_s=0.2, limit_s=120.0)
IMAGE = {"PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin", "PYTHONPATH": os.path.join(ROOT, "src")}
HEAD, NAMESPACE = "phalanx-head-0", "research"
VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "disk"},
    "spec": {
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": "/unused"},  # the stand-in kubelet has a folder for each claim
    },
}
WAITS = "echo rank $RANK began; until [ -e /tmp/go ]; do sleep 0.1; done; echo rank $RANK ended"


def printed():
    out = io.StringIO()
    words = ["up", "--engine", "kubernetes", "--namespace", NAMESPACE, "--kubernetes-image", "phalanx"]
    with contextlib.redirect_stdout(out):
        code = command_line([*words, "--kubernetes-nodes", "3x2", "--print", "all"])
    assert code == 0
    return out.getvalue()


class HeadInPod:
    """The namespace of the head, and what one types there."""

    def __init__(self, lab, cluster):
        self.lab, self.cluster, self.said = lab, cluster, ""

    def of(self, kind, name=""):
        """An object, or all of a kind."""
        said = self.cluster.kubectl("-n", NAMESPACE, "get", kind, *filter(None, [name]), "-o", "json", check=False)
        return json.loads(said) if said.startswith("{") else None

    def pod(self):
        return self.of("pod", HEAD) or {"metadata": {"uid": ""}, "spec": {}, "status": {}}

    def process(self):
        """The head's process as seen from outside; 0 while there is none."""
        for one in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                inside = os.readlink(one / "root").startswith(self.cluster.folder)
                if inside and b"phalanx.app.head" in (one / "cmdline").read_bytes().split(b"\0"):
                    return int(one.name)
        return 0

    def type(self, *words, check=True):
        """What `kubectl exec phalanx-head-0 -- phalanx WORDS` prints: entered as the container's user, with its variables."""
        pid = self.process()
        assert pid, self.logs()
        variables = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").decode().split("\0")
        enter = ["nsenter", "--target", str(pid), "--mount", "--uts", "--net", "--pid", "--root"]
        user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--", "env", "--chdir=/", "-i", *variables]
        command = [*enter, "--", *user, "phalanx", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.said = done.stdout + done.stderr
        assert done.returncode == 0 or not check, self.said + self.logs()
        return done.stdout if done.returncode == 0 else ""

    def job(self, number):
        text = self.type("show", number, "--json", check=False)
        return json.loads(text)["job"] if text else {"state": "", "attempt_state": ""}

    def left(self):
        """Objects of the head's jobs: its tag is left out of their names."""
        names = self.cluster.kubectl("-n", NAMESPACE, "get", "pods,secrets,configmaps", "-o", "name").split()
        return sorted(re.sub(r"-[0-9a-f]{8}", "", name) for name in names if re.search(r"/phalanx-[0-9a-f]{8}", name))

    def logs(self):
        return self.cluster.kubectl("-n", NAMESPACE, "logs", HEAD, "--tail=60", check=False)

    def runs(self, uid=""):
        """Whether the head's pod, another one than `uid`, is ready and answers."""
        pod = self.pod()
        ready = [one["status"] for one in pod["status"].get("conditions", ()) if one["type"] == "Ready"] == ["True"]
        return (
            ready
            and pod["metadata"]["uid"] != uid
            and bool(self.process())
            and bool(self.type("ps", "--json", check=False))
        )


def cluster_of(lab, claims):
    nodes = dict.fromkeys(lab.hosts, 2)
    return RealCluster(nodes=nodes, shared=(str(ROOT),), lab=lab, names=True, image=IMAGE, claims=claims)


def went(go):
    return "went" in go()


@pytest.fixture
def head():
    with contextlib.ExitStack() as stack:
        claims = tempfile.mkdtemp(prefix="claims-", dir=TOOLS)  # hosts of a lab see it, unlike /tmp
        stack.callback(shutil.rmtree, claims)
        with Lab(size=3, gpus=0) as lab, cluster_of(lab, claims) as cluster:
            cluster.kubectl("create", "namespace", NAMESPACE)
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(VOLUME))
            cluster.kubectl("apply", "-f", "-", stdin=printed())
            made = HeadInPod(lab, cluster)
            try:
                until(made.runs, "the head answers in its pod")
                yield made
            except BaseException:
                print(
                    cluster.kubectl("-n", NAMESPACE, "get", "pods,pvc,events", "-o", "wide", check=False), made.logs()
                )
                raise


def test_a_head_in_a_pod_runs_a_gang_and_comes_back_with_its_state_on_another_node(head):
    first = head.type("submit", "--quiet", "--gpus", "1", "--", "echo", "hello from a pod").split()[-1]
    until(lambda: head.job(first)["state"] == "succeeded", "a job of one rank")
    assert "hello from a pod" in head.type("logs", first)

    job = head.type("submit", "--quiet", "--gpus", "2x1", "--nodes", "2", "--", "sh", "-c", WAITS).split()[-1]
    until(lambda: head.job(job)["attempt_state"] == "running", "the gang runs")
    until(lambda: len(re.findall(r"rank \d began", head.type("logs", job))) == 2, "both ranks have begun")

    before, objects = head.pod(), head.of("pods")["items"]
    head.cluster.kubectl("cordon", before["spec"]["nodeName"])
    head.cluster.kubectl("-n", NAMESPACE, "delete", "pod", HEAD, "--force", "--grace-period=0")
    until(lambda: head.runs(before["metadata"]["uid"]), "another pod has the head")
    assert head.pod()["status"]["podIP"] != before["status"]["podIP"], "it is on another node"
    assert head.job(first)["state"] == "succeeded", "it has its state"
    for node in "01":
        go = partial(
            head.type, "exec", "--node-rank", node, job, "--", "sh", "-c", "touch /tmp/go && echo went", check=False
        )
        until(partial(went, go), "its supervisors know the new head")
    until(lambda: head.job(job)["state"] not in ("pending", "running"), "the gang ends")
    view = head.job(job)
    assert (view["state"], view["attempts"]) == ("succeeded", 1), head.type("show", job)
    assert len(re.findall(r"rank \d ended", head.type("logs", job))) == 2
    assert len(objects) == 3, "the head and two supervisors"
    until(lambda: len(head.of("pods")["items"]) == 1, "the pods of the gang are gone")
    until(lambda: head.left() == ["configmap/phalanx"], "nothing of the gang is left")
