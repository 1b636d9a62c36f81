"""Pools in two Kubernetes clusters for a head that runs on neither. API servers and nodes are the fakes of `tests/kubernetes`; heads, supervisors
and ranks are real processes.
"""

import contextlib
import json
import os
import shutil
import tempfile

import pytest

from benchmarks.cluster import BenchmarkCluster, free_port, wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.kubernetes.fake_api import ADMIN_TOKEN, fake_api
from tests.kubernetes.fake_nodes import FakeNodes
from tests.kubernetes.fake_store import KINDS, Refused

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS = KINDS["", "pods"]


class Clusters(BenchmarkCluster):
    """A head with one node of its own, and two clusters as contexts of its kubeconfig."""

    def begin(self, fakes, kubeconfig):
        self.fakes, self.variables = fakes, {"KUBECONFIG": kubeconfig}
        self.start_head(variables=self.variables)
        self.wait_for_nodes(1)
        return self

    def add_pool(self, name, price, **settings):
        body = {"provider": "kubernetes", "node": "2", "max_nodes": 2, "price_per_h": price, "idle": "1h"}
        self.call("PUT", f"/v1/pools/{name}", {**body, "settings": {"context": name, "image": "ours", **settings}})

    def pods(self, name):
        return self.fakes[name].store.select(PODS, "default", "", "")[0]

    def objects(self, name):
        kinds = ("pods", "configmaps", "secrets")
        return [f"{kind.plural}/{item}" for kind, _, item in self.fakes[name].store.items if kind.plural in kinds]


def merged(folder, fakes):
    """One kubeconfig with a context for each cluster."""
    path = os.path.join(folder, "kubeconfig")
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "",
        "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name in fakes],
        "clusters": [
            {"name": name, "cluster": {"server": fake.url, "certificate-authority": f"{fake.folder}/tls/ca.pem"}}
            for name, fake in fakes.items()
        ],
        "users": [{"name": "me", "user": {"token": ADMIN_TOKEN}}],
    }
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
    return path


@pytest.fixture(scope="module")
def rig():
    with contextlib.ExitStack() as stack:
        home, folder = tempfile.mkdtemp(prefix="phalanx-pools-"), tempfile.mkdtemp(prefix="phalanx-fake-")
        for one in (home, folder):
            stack.callback(shutil.rmtree, one, ignore_errors=True)
        fakes = {name: stack.enter_context(fake_api(os.path.join(folder, name))) for name in ("east", "west")}
        for name, fake in fakes.items():
            nodes = FakeNodes(fake.store, (f"{name}-0", f"{name}-1"), environment={"TMPDIR": folder})
            nodes.start()
            stack.callback(nodes.stop)
        made = Clusters(home=home, port=free_port(), virtual="1x2", lease_s=4.0, head_arguments=("--min-run", "1s"))
        stack.callback(made.stop)
        yield made.begin(fakes, merged(folder, fakes))


def nodes_of(rig, job):
    return rig.job(job)["nodes"]


def test_a_gang_runs_in_the_first_cluster_that_can_start_it_and_never_in_two(rig):
    def full(kind, item):
        if kind == PODS:
            raise Refused(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus')

    rig.fakes["east"].store.admission.append(full)
    rig.add_pool("east", 1.0)
    rig.add_pool("west", 2.0)
    job = gated(rig, "gang", gpus="2x2")
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
    assert sorted(nodes_of(rig, job)) == ["west-0", "west-1"], "not on the head's own node, which is another site"
    assert len(rig.pods("west")) == 2
    assert not rig.pods("east")
    failure = rig.call("GET", "/v1/pools/east")["pool"]["failure"]
    assert "exceeded quota" in failure
    assert {node["labels"].get("site") for node in rig.nodes()} == {None, "west"}
    rig.fakes["east"].store.admission.clear()
    open_gate(rig, "gang")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_head_that_comes_back_follows_its_pods_in_both_clusters(rig):
    job = gated(rig, "stays", gpus="2x2")
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
    rig.kill_head()
    rig.start_head(variables=rig.variables)
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs on")
    ending = rig.pods("west")[0]["metadata"]["name"]
    rig.fakes["west"].store.delete(PODS, "default", ending, {})
    wait_until(lambda: rig.job(job)["attempts"] == 2, "the head noticed that a pod is being deleted")
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs again")
    open_gate(rig, "stays")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_a_pool_that_is_removed_leaves_no_object(rig):
    rig.call("DELETE", "/v1/pools/west")
    wait_until(lambda: not rig.objects("west"), "nothing is left")
    rig.call("DELETE", "/v1/pools/east")
    wait_until(lambda: not rig.objects("east"), "nor there")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"context": "north"}, "no context north"),
        ({"colour": "red"}, "no setting colour"),
        ({"namespace": "nowhere"}, "no namespace nowhere"),
        ({"template": "../x"}, "the name of a file"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(rig, settings, text):
    with pytest.raises(AssertionError, match=text):
        rig.add_pool("east", 1.0, **settings)


def test_the_rights_in_a_cluster_can_be_checked(rig):
    found = rig.call("POST", "/v1/clouds/check", {"provider": "kubernetes", "settings": {"context": "west"}})
    rights = {one["right"]: one["allowed"] for one in found["rights"]}
    assert rights["create pods"]
    assert "kind: Role" in found["policy"]
