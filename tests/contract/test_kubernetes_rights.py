"""Each right taken away in turn: one clear line at the start of a head, and in `phalanx doctor`.

At the fake API server, which knows roles; the needed rights also at a real one, where it is built.
"""

import dataclasses
import json

import pytest

from benchmarks.cluster import wait_until
from phalanx.core.errors import BadFile, BadRequest, Conflict, NotPermitted
from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes.engine_type import KubernetesEngineType
from phalanx.engines.kubernetes.rights import (
    AUTOSCALER_RIGHTS,
    KUEUE_RIGHTS,
    RIGHTS,
    cluster_role_objects,
    role_objects,
)
from phalanx.ports.engine import HeadSetup
from tests.kubernetes.fake_api import fake_api
from tests.kubernetes.fake_store import KINDS, RBAC
from tests.kubernetes.real_cluster import RealCluster, why_not

SUBJECT = {"kind": "User", "name": "ada", "apiGroup": RBAC}
SETUP = HeadSetup(listens=True, listened_before=False, shares_store=False, virtual="")
NEEDED = [right for right in RIGHTS if not right.optional]
TYPE = KubernetesEngineType()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake_api(str(tmp_path_factory.mktemp("fake"))) as made:
        made.tokens["token-of-ada"] = "ada"
        yield made


@pytest.fixture
def grant(server, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", server.write_kubeconfig("ada.kubeconfig", {"token": "token-of-ada"}))

    def granted(*rights):
        items = [*role_objects("default", rights, SUBJECT), *cluster_role_objects(SUBJECT, rights)]
        for item in items:
            kind = next(one for one in KINDS.values() if one.kind == item["kind"])
            server.store.apply(
                kind, item["metadata"].get("namespace", ""), item["metadata"]["name"], item, "test", force=True
            )

    return granted


@pytest.fixture(scope="module")
def real():
    with RealCluster() as made:
        yield made


@pytest.fixture
def take_away(request, monkeypatch):
    """Grants all rights but one, and returns what the namespace has: at the fake server, or at a real one."""
    if request.param == "fake":
        server, grant = request.getfixturevalue("server"), request.getfixturevalue("grant")

        def taken(missing):
            grant(*others(missing))
            return lambda: server.store.version

        return taken
    cluster = request.getfixturevalue("real")
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig("ada"))

    def taken_for_real(missing):
        items = [*role_objects("default", others(missing), SUBJECT), *cluster_role_objects(SUBJECT, others(missing))]
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

        def granted():
            said = {
                one: cluster.kubectl("auth", "can-i", one.verb, one.resource, user="ada", check=False).split()[-1]
                == "yes"
                for one in NEEDED
            }
            return all(may is (one != missing) for one, may in said.items())

        wait_until(granted, "the API server has seen the Role")
        kinds = "pods,secrets,configmaps"
        return lambda: cluster.kubectl("get", kinds, "-o", "jsonpath={.items[*].metadata['name','resourceVersion']}")

    return taken_for_real


def others(missing):
    """All rights but one. A right in the whole cluster holds in each namespace."""
    return [right for right in RIGHTS if (right.verb, right.plural) != (missing.verb, missing.plural)]


def check(setup=SETUP, previous=None, **given):
    return TYPE.check({name.replace("_", "-"): value for name, value in given.items()}, previous, setup)


def test_with_all_rights_a_head_may_start(grant):
    grant(*RIGHTS)
    assert check(kubernetes_image="x")[names.IMAGE] == "x"
    [line] = TYPE.diagnose(TYPE.resolve({}, None))
    assert (line.ok, line.says.startswith(f"{len(RIGHTS)} of {len(RIGHTS)} rights")) == (True, True)


@pytest.mark.parametrize("missing", NEEDED, ids=lambda right: f"{right.verb}-{right.resource}")
@pytest.mark.parametrize(
    "take_away",
    ["fake", pytest.param("real", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))],
    indirect=True,
)
def test_without_a_needed_right_the_head_says_which_and_what_is_lost(take_away, missing):
    objects = take_away(missing)
    before = objects()
    with pytest.raises(NotPermitted) as caught:
        check()
    assert (
        str(caught.value) == f"you may not {missing.verb} {missing.resource} in the namespace default: {missing.lost}"
    )
    assert "--print" in caught.value.hint
    assert objects() == before, "nothing half-made"
    [bad] = [line for line in TYPE.diagnose(TYPE.resolve({}, None)) if not line.ok and not line.optional]
    assert missing.lost in bad.says
    assert "kubectl apply" in bad.mend


def test_without_the_right_to_list_events_it_is_said_that_an_autoscaler_is_not_heard(grant):
    waits = TYPE.resolve({names.NODE_WAIT: "15m", names.SHAPE: "4x8"}, None)
    grant(*RIGHTS)
    [bad] = [line for line in TYPE.diagnose(waits) if not line.ok]
    assert (bad.optional, "may not list events" in bad.says, "autoscaler" in bad.says) == (True, True, True)
    grant(*RIGHTS, *AUTOSCALER_RIGHTS)
    assert [line for line in TYPE.diagnose(waits) if not line.ok] == []


def test_without_the_right_to_follow_nodes_they_are_declared(grant):
    grant(*(right for right in RIGHTS if not right.cluster))
    with pytest.raises(BadRequest, match="may not list the nodes") as caught:
        check()
    assert "--kubernetes-nodes 4x8" in caught.value.hint
    assert check(kubernetes_nodes="4x8")[names.SHAPE] == "4x8"
    assert [line.optional for line in TYPE.diagnose(TYPE.resolve({}, None)) if not line.ok] == [True] * 4


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"namespace": "absent"}, NotPermitted, "in the namespace absent"),
        ({"context": "absent"}, BadRequest, "no context absent"),
        ({"kubernetes_nodes": "4"}, BadRequest, "not of the form NxG"),
        ({"kubernetes_nodes": "0x8"}, BadRequest, "not of the form NxG"),
        ({"kubernetes_template": "/absent"}, BadFile, "cannot read /absent"),
    ],
)
def test_a_wrong_option_is_named(grant, given, error, message):
    grant(*RIGHTS)
    with pytest.raises(error, match=message):
        check(**given)


def test_a_namespace_that_does_not_exist_is_named(server, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
    with pytest.raises(BadRequest, match="the cluster has no namespace absent"):
        check(namespace="absent")


def test_a_queue_of_kueue_needs_kueue_and_its_rights_and_declared_nodes(grant, server):
    grant(*RIGHTS)
    with pytest.raises(BadRequest, match="Kueue and Kubernetes choose the nodes"):
        check(kubernetes_queue="user-queue")
    with pytest.raises(BadRequest, match="not a queue of Kueue"):
        check(kubernetes_queue="default=,x")
    with pytest.raises(BadRequest, match="this cluster has no Kueue"):
        check(kubernetes_queue="user-queue", kubernetes_nodes="4x8")
    server.groups["kueue.x-k8s.io"] = "v1beta1"
    try:
        with pytest.raises(
            NotPermitted, match="you may not create jobs in the namespace default: no job enters a queue"
        ):
            check(kubernetes_queue="user-queue", kubernetes_nodes="4x8")
        needed = [right for right in KUEUE_RIGHTS if not right.optional]
        grant(*RIGHTS, *needed)
        options = check(kubernetes_queue="user-queue", kubernetes_nodes="4x8")
        assert {line.optional for line in TYPE.diagnose(options) if not line.ok} == {True}
        assert "localqueues/pendingworkloads" in TYPE.setup_text(options)
        assert "jobs" not in TYPE.setup_text(TYPE.resolve({"namespace": "research"}, None))
    finally:
        del server.groups["kueue.x-k8s.io"]


def test_claims_of_devices_need_declared_nodes_and_a_cluster_that_has_them(grant, server):
    grant(*RIGHTS)
    with pytest.raises(BadRequest, match="GPUs of nodes cannot be counted"):
        check(kubernetes_gpu_resource="claims:h100")
    with pytest.raises(BadRequest, match="not the beginning of names"):
        check(kubernetes_gpu_resource="claims:")
    with pytest.raises(BadRequest, match="no dynamic resource allocation"):
        check(kubernetes_gpu_resource="claims:h100", kubernetes_nodes="4x8")
    server.groups["resource.k8s.io"] = "v1"
    try:
        assert check(kubernetes_gpu_resource="claims:h100", kubernetes_nodes="4x8")[names.GPU_RESOURCE] == "claims:h100"
    finally:
        del server.groups["resource.k8s.io"]


def test_virtual_nodes_are_refused(grant):
    with pytest.raises(Conflict, match="--virtual cannot be used"):
        check(dataclasses.replace(SETUP, virtual="2x4"))


def test_a_head_whose_cluster_is_silent_starts_again_with_the_options_of_before(grant, server):
    grant(*RIGHTS)
    options = check()
    server.away.set()
    try:
        assert check(dataclasses.replace(SETUP, listened_before=True), options) == options
    finally:
        server.away.clear()


def test_the_printed_yaml_grants_the_rights(grant):
    from ruamel.yaml import YAML

    grant(*RIGHTS)
    documents = list(
        YAML(typ="safe", pure=True).load_all(TYPE.setup_text(TYPE.resolve({"namespace": "research"}, None)))
    )
    assert documents == role_objects("research")
