"""Two heads in two namespaces of one cluster, each as a user with one Role in its own: neither sees, asks for or touches what is the other's.

On the fake and, where it is built, on a real API server, whose audit log has every request.
"""

import contextlib
import json
import os
import shutil
import tempfile

import pytest

from benchmarks.cluster import ROOT, free_port, wait_until
from phalanx.engines.kubernetes import rights
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_real_rig import TEMPLATE
from tests.contract.kubernetes_rig import KubernetesHead
from tests.kubernetes.fake_api import fake_api
from tests.kubernetes.fake_nodes import FakeNodes
from tests.kubernetes.fake_store import KINDS, RBAC
from tests.kubernetes.real_cluster import TOOLS, RealCluster, why_not

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
OWNERS = {"ada": "research", "bob": "vision"}


def grants():
    return [
        item
        for user, namespace in OWNERS.items()
        for item in rights.role_objects(namespace, subject={"kind": "User", "name": user, "apiGroup": RBAC})
    ]


@contextlib.contextmanager
def fake():
    """A cluster: the kubeconfig of each user, the objects of a namespace, and the namespaces that a user asked for."""
    with tempfile.TemporaryDirectory(prefix="phalanx-fake-") as folder, fake_api(os.path.join(folder, "api")) as made:
        nodes = FakeNodes(made.store, ("n0",), environment={"TMPDIR": folder}, output=os.path.join(folder, "out"))
        for namespace in OWNERS.values():
            made.store.create(KINDS["", "namespaces"], "", {"metadata": {"name": namespace}})
        for item in grants():
            kind = next(one for one in KINDS.values() if one.kind == item["kind"])
            made.store.apply(kind, item["metadata"]["namespace"], item["metadata"]["name"], item, "test", force=True)
        configs = {}
        for user, namespace in OWNERS.items():
            made.tokens[f"token-of-{user}"] = user
            configs[user] = made.write_kubeconfig(user, {"token": f"token-of-{user}"}, namespace=namespace)

        def objects(namespace):
            found = made.store.items
            return [
                name
                for kind, where, name in found
                if where == namespace and kind.plural in ("pods", "secrets", "configmaps")
            ]

        def asked(user):
            paths = [path for _, path, who in made.requests if who == user and "/namespaces/" in path]
            return {path.split("/namespaces/")[1].split("/")[0].split("?")[0] for path in paths}

        nodes.start()
        try:
            yield configs, objects, asked, ""
        finally:
            nodes.stop()


@contextlib.contextmanager
def real():
    """The same on a real server."""
    shared = tempfile.mkdtemp(prefix="engine-", dir=TOOLS)
    try:
        with RealCluster(nodes={"n0": 2}, shared=(ROOT, shared), audited=True) as made:
            for namespace in OWNERS.values():
                made.kubectl("create", "namespace", namespace)
            made.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": grants()}))
            template = os.path.join(shared, "pod.yaml")
            with open(template, "w", encoding="utf-8") as file:
                json.dump(TEMPLATE, file)

            def objects(namespace):
                words = (
                    "get",
                    "pods,secrets,configmaps",
                    "-n",
                    namespace,
                    "-l",
                    "app.kubernetes.io/name=phalanx",
                    "-o",
                    "name",
                )
                return made.kubectl(*words).split()

            def asked(user):
                with open(os.path.join(made.folder, "audit.log"), encoding="utf-8") as file:
                    lines = [json.loads(line) for line in file if line.endswith("\n")]
                mine = [one for one in lines if one["user"]["username"] == user]
                return {one["objectRef"]["namespace"] for one in mine if one.get("objectRef", {}).get("namespace")}

            yield {user: made.kubeconfig(user, where) for user, where in OWNERS.items()}, objects, asked, template
    finally:
        shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture(params=["fake", "real"])
def cluster(request):
    if request.param == "real" and (why := why_not()):
        pytest.skip(why)
    with {"fake": fake, "real": real}[request.param]() as made:
        yield made


@contextlib.contextmanager
def head(kubeconfig, template):
    home = tempfile.mkdtemp(prefix="engine-", dir=os.path.dirname(template) or None)  # pods share that folder
    words = (
        "--engine",
        "kubernetes",
        "--kubernetes-nodes",
        "1x1",
        *(("--kubernetes-template", template) if template else ()),
    )
    made = KubernetesHead(
        home=home, port=free_port(), virtual="", lease_s=4.0, head_arguments=words, kubeconfig=kubeconfig
    )
    try:
        made.start(wait_nodes=False)
        wait_until(lambda: [node["state"] for node in made.nodes()] == ["up"], "its place is up")
        yield made
    finally:
        made.stop()
        shutil.rmtree(home, ignore_errors=True)


def test_two_heads_in_two_namespaces_do_not_see_each_other(cluster):
    configs, objects, asked, template = cluster
    with head(configs["ada"], template) as ada:
        with head(configs["bob"], template) as bob:
            jobs = {one: gated(one_head, "gate", gpus="1") for one, one_head in (("ada", ada), ("bob", bob))}
            for one, one_head in (("ada", ada), ("bob", bob)):
                wait_until(lambda: one_head.job(jobs[one])["attempt_state"] == "running", f"{one}'s job runs")
            assert {user: len(objects(where)) for user, where in OWNERS.items()} == {"ada": 3, "bob": 3}
            assert not any("outside" in node and node["outside"] for node in (*ada.nodes(), *bob.nodes()))
            bob.stop()
            wait_until(lambda: objects("vision") == [], "bob's head leaves nothing")
        assert ada.job(jobs["ada"])["attempt_state"] == "running"
        open_gate(ada, "gate")
        view = ada.wait_for_state(jobs["ada"], "succeeded", "failed")
        assert (view["state"], view["attempts"]) == ("succeeded", 1)
    assert {user: asked(user) for user in OWNERS} == {"ada": {"research"}, "bob": {"vision"}}
