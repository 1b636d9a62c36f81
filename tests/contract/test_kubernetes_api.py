"""The engine's client and the API server: one suite for the fake server of the tests and for a real one.

The engine may rely on what is here. The real server runs where `make kubernetes-tools` has built it, or where
`PHALANX_TEST_KUBECONFIG` names a kubeconfig of a cluster of which a test may create and delete namespaces.
"""

import contextlib
import dataclasses
import queue
import threading
import uuid

import pytest

from benchmarks.cluster import wait_until
from phalanx.core.errors import NotSignedIn
from phalanx.engines.kubernetes.errors import KubernetesError
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from phalanx.engines.kubernetes.rights import RIGHTS, review, role_objects
from phalanx.engines.kubernetes.watch import ObjectWatch
from tests.kubernetes.clusters import cluster, why_no_real

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]
NAMESPACES = ResourcePath("namespaces")
NODES = ResourcePath("nodes")
REVIEWS = ResourcePath("selfsubjectaccessreviews", "authorization.k8s.io")
USER = "contract-user"


@pytest.fixture(scope="module", params=["fake", "real"])
def place(request):
    if request.param == "real" and (why_not := why_no_real()):
        pytest.skip(why_not)
    with cluster(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def api(place):
    return KubernetesApi(find_access("", {"KUBECONFIG": place.kubeconfig}))


@pytest.fixture
def namespace(api):
    name = f"contract-{uuid.uuid4().hex[:8]}"
    api.create(NAMESPACES, {"metadata": {"name": name}})
    accounts = ResourcePath("serviceaccounts", namespace=name)
    wait_until(lambda: any(one["metadata"]["name"] == "default" for one in api.list(accounts)), "its service account")
    yield name
    api.delete(NAMESPACES, name)


@pytest.fixture
def maps(namespace):
    return ResourcePath("configmaps", namespace=namespace)


@pytest.fixture
def pods(namespace):
    return ResourcePath("pods", namespace=namespace)


def config_map(name, labels=None, **data):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels or {"of": "test"}},
        "data": data,
    }


def pod(name, *, owner=None, **spec):
    about = {"name": name, "labels": {"of": "test"}}
    if owner is not None:
        about["ownerReferences"] = [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
            }
        ]
    container = {"name": "phalanx", "image": "example.invalid/none", "command": ["true"]}
    # No scheduler touches it, and no node takes it.
    spec = {"containers": [container], "restartPolicy": "Never", "schedulerName": "none-of-these", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def refusal(call, *given, **options):
    with pytest.raises(KubernetesError) as caught:
        call(*given, **options)
    return caught.value.status, caught.value.reason


def names(items):
    return sorted(one["metadata"]["name"] for one in items if one["metadata"]["name"] != "kube-root-ca.crt")


def test_an_object_is_created_once_and_found_by_its_name(api, maps):
    made = api.create(maps, config_map("one", a="1"))
    assert made["metadata"]["uid"]
    assert made["metadata"]["resourceVersion"]
    assert api.get(maps, "one")["data"] == {"a": "1"}
    assert refusal(api.create, maps, config_map("one")) == (409, "AlreadyExists")
    assert refusal(api.get, maps, "two") == (404, "NotFound")
    assert refusal(api.create, maps, config_map("Not_A_Name")) == (422, "Invalid")
    absent = dataclasses.replace(maps, namespace="no-such-namespace")
    assert refusal(api.create, absent, config_map("one")) == (404, "NotFound")


def test_a_pod_without_containers_or_with_a_bad_label_is_invalid(api, pods):
    assert refusal(api.create, pods, pod("none", containers=[])) == (422, "Invalid")
    wrong = pod("label")
    wrong["metadata"]["labels"]["job"] = "not a label"
    assert refusal(api.create, pods, wrong) == (422, "Invalid")


def test_a_list_comes_in_pages_and_by_labels(api, maps):
    for index in range(7):
        api.create(maps, config_map(f"m{index}", {"parity": "even" if index % 2 == 0 else "odd", "of": "test"}))
    pages = list(api.pages(maps, labels="of=test", page=3))
    assert [len(page) for page, _ in pages] == [3, 3, 1]
    assert len({version for _, version in pages}) == 1, "all pages are of one version"
    assert names(api.list(maps, labels="parity=odd")) == ["m1", "m3", "m5"]
    assert names(api.list(maps, labels="of=test,parity!=odd")) == ["m0", "m2", "m4", "m6"]
    assert names(api.list(maps, labels="nothing=such")) == []
    assert names(api.list(maps, fields="metadata.name=m3")) == ["m3"]


def test_a_page_after_a_compaction_is_gone(api, place, maps):
    if place.compact is None:
        pytest.skip("no compaction can be ordered on this cluster")
    for index in range(3):
        api.create(maps, config_map(f"m{index}"))
    pages = api.pages(maps, labels="of=test", page=1)
    next(pages)
    api.create(maps, config_map("later"))
    place.compact()
    assert refusal(list, pages) == (410, "Expired")


def test_a_dry_run_checks_and_creates_nothing(api, maps):
    api.would_create(maps, config_map("one"))
    assert refusal(api.get, maps, "one")[0] == 404
    absent = dataclasses.replace(maps, namespace="no-such-namespace")
    assert refusal(api.would_create, absent, config_map("one")) == (404, "NotFound")


def test_a_stale_replace_is_a_conflict(api, maps):
    first = api.create(maps, config_map("one", a="1"))
    second = api.replace(maps, "one", {**first, "data": {"a": "2"}})
    assert second["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    assert refusal(api.replace, maps, "one", {**first, "data": {"a": "3"}}) == (409, "Conflict")
    assert api.get(maps, "one")["data"] == {"a": "2"}


def test_an_unchanged_object_keeps_its_version(api, maps):
    first = api.create(maps, config_map("one", a="1"))
    second = api.patch(maps, "one", {"data": {"a": "1"}})
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_apply_owns_the_fields_that_it_names(api, maps):
    api.apply(maps, "one", config_map("one", a="1", b="1"))
    api.patch(maps, "one", {"data": {"theirs": "x"}})
    api.apply(maps, "one", config_map("one", a="2"))
    assert api.get(maps, "one")["data"] == {"a": "2", "theirs": "x"}, "what we no longer name is gone, the rest stays"


def test_apply_conflicts_with_another_manager_unless_forced(api, maps):
    api.apply(maps, "one", config_map("one", a="1"), manager="other")
    assert refusal(api.apply, maps, "one", config_map("one", a="2"), force=False) == (409, "Conflict")
    api.apply(maps, "one", config_map("one", a="1"), force=False)
    assert api.apply(maps, "one", config_map("one", a="2"))["data"] == {"a": "2"}


def test_a_merge_removes_what_is_null(api, maps):
    api.create(maps, config_map("one", a="1", b="2"))
    assert api.patch(maps, "one", {"data": {"a": None, "c": "3"}})["data"] == {"b": "2", "c": "3"}


def test_the_status_is_written_apart_and_the_spec_of_a_pod_stays(api, pods):
    api.create(pods, pod("one"))
    assert api.get(pods, "one")["status"]["phase"] == "Pending"
    told = api.patch(
        pods, "one", {"status": {"phase": "Running"}, "metadata": {"labels": {"more": "x"}}}, part="status"
    )
    assert told["status"]["phase"] == "Running"
    api.patch(pods, "one", {"status": {"phase": "Failed"}})
    assert api.get(pods, "one")["status"]["phase"] == "Running"
    assert refusal(api.patch, pods, "one", {"spec": {"nodeName": "n0"}}) == (422, "Invalid")


def test_a_pod_without_a_node_goes_at_once(api, pods):
    made = api.create(pods, pod("one"))
    assert not api.delete(pods, "one", uid="00000000-0000-0000-0000-000000000000"), "another pod of that name"
    assert api.delete(pods, "one", uid=made["metadata"]["uid"])
    assert not api.delete(pods, "one")


def test_a_pod_on_a_node_ends_with_grace(api, pods):
    api.create(pods, pod("one", nodeName="nowhere", terminationGracePeriodSeconds=300))
    api.delete(pods, "one")
    about = api.get(pods, "one")["metadata"]
    assert (about["deletionGracePeriodSeconds"], "deletionTimestamp" in about) == (300, True)
    api.delete(pods, "one", grace_s=20)
    assert api.get(pods, "one")["metadata"]["deletionGracePeriodSeconds"] == 20, "it can only become shorter"
    api.delete(pods, "one", grace_s=100)
    assert api.get(pods, "one")["metadata"]["deletionGracePeriodSeconds"] == 20
    api.delete(pods, "one", grace_s=0)
    assert refusal(api.get, pods, "one")[0] == 404


def test_a_pod_that_has_ended_goes_at_once_though_it_has_a_node(api, pods):
    api.create(pods, pod("one", nodeName="nowhere"))
    api.patch(pods, "one", {"status": {"phase": "Succeeded"}}, part="status")
    api.delete(pods, "one", grace_s=30)
    assert refusal(api.get, pods, "one")[0] == 404


def test_a_pod_is_bound_to_one_node_once(api, pods):
    api.create(pods, pod("one"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "one"},
        "target": {"kind": "Node", "name": "nowhere"},
    }
    api.post(pods, "one", "binding", binding)
    assert api.get(pods, "one")["spec"]["nodeName"] == "nowhere"
    assert refusal(api.post, pods, "one", "binding", binding)[0] == 409
    api.delete(pods, "one", grace_s=0)


def test_a_collection_is_deleted_by_labels(api, maps):
    for name, kind in (("a", "x"), ("b", "x"), ("c", "y")):
        api.create(maps, config_map(name, {"of": kind}))
    api.delete_all(maps, labels="of=x")
    assert names(api.list(maps)) == ["c"]


def test_all_goes_with_the_object_that_owns_it(api, maps, pods):
    owner = api.create(maps, config_map("owner"))
    secrets = dataclasses.replace(maps, plural="secrets")
    for name in ("one", "two"):
        api.create(pods, pod(name, owner=owner))
        owned = pod(name, owner=owner)["metadata"]
        api.create(secrets, {"apiVersion": "v1", "kind": "Secret", "metadata": owned, "stringData": {"key": "value"}})
    assert api.get(secrets, "one")["data"] == {"key": "dmFsdWU="}
    api.delete(maps, "owner")
    wait_until(
        lambda: names(api.list(pods)) + names(api.list(secrets, labels="of=test")) == [], "what it owned is gone"
    )


class Recorder:
    """Keeps what a watch brings."""

    def __init__(self):
        self.seen: queue.SimpleQueue[tuple] = queue.SimpleQueue()

    def replaced(self, items):
        self.seen.put(("replaced", names(items), None))

    def changed(self, item):
        self.seen.put(("changed", item["metadata"]["name"], (item.get("data") or {}).get("a")))

    def deleted(self, item):
        self.seen.put(("deleted", item["metadata"]["name"], (item.get("data") or {}).get("a")))

    def answered(self):
        pass

    def failed(self, error):
        self.seen.put(("failed", str(error), None))

    def next(self):
        return self.seen.get(timeout=60.0)


@contextlib.contextmanager
def watching(api, path, **options):
    recorder = Recorder()
    watch = ObjectWatch(api=api, path=path, handler=recorder, labels="of=test", **options)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield recorder
    finally:
        watch.close()
        thread.join(timeout=30.0)
        assert not thread.is_alive(), "a closed watch ends"


def test_a_watch_brings_every_change_after_its_list(api, maps):
    api.create(maps, config_map("before", a="0"))
    with watching(api, maps) as recorder:
        assert recorder.next() == ("replaced", ["before"], None)
        api.create(maps, config_map("one", a="1"))
        assert recorder.next() == ("changed", "one", "1")
        api.patch(maps, "one", {"data": {"a": "2"}})
        assert recorder.next() == ("changed", "one", "2")
        api.patch(maps, "one", {"metadata": {"labels": {"of": "others"}}})
        assert recorder.next()[:2] == ("deleted", "one"), "it has left the selection"
        api.delete(maps, "before")
        assert recorder.next() == ("deleted", "before", "0")


def test_a_watch_that_the_server_ends_goes_on_where_it_was(api, maps):
    with watching(api, maps, watch_s=1.0) as recorder:
        assert recorder.next() == ("replaced", [], None)
        for index in range(6):
            api.create(maps, config_map(f"m{index}", a=str(index)))
            assert recorder.next() == ("changed", f"m{index}", str(index))
            threading.Event().wait(0.5)


def test_rights_are_those_of_the_role_and_the_server_says_so_beforehand(api, namespace, pods, maps):
    for item in role_objects(
        namespace, subject={"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}
    ):
        path = ResourcePath(f"{item['kind'].lower()}s", "rbac.authorization.k8s.io", namespace=namespace)
        api.apply(path, item["metadata"]["name"], item)
    theirs = KubernetesApi(dataclasses.replace(api.access, impersonate=USER))

    def allowed(right):
        return theirs.create(REVIEWS, review(right, namespace))["status"]["allowed"]

    wait_until(lambda: allowed(RIGHTS[0]), "the role is in force")
    assert [right for right in RIGHTS if allowed(right) == right.cluster] == []
    assert refusal(theirs.list, NODES) == (403, "Forbidden")
    assert refusal(theirs.list, ResourcePath("pods")) == (403, "Forbidden")
    assert refusal(theirs.list, dataclasses.replace(pods, namespace="kube-system")) == (403, "Forbidden")
    owner = theirs.apply(maps, "owner", config_map("owner"))
    theirs.create(pods, pod("one", owner=owner))
    assert names(theirs.list(pods)) == ["one"]
    theirs.delete_all(pods, labels="of=test")
    theirs.delete(maps, "owner")


def test_a_wrong_token_is_not_signed_in(api):
    wrong = KubernetesApi(dataclasses.replace(api.access, token="wrong", certificate_pem="", key_pem="", plugin=None))
    with pytest.raises(NotSignedIn, match="does not accept the credentials"):
        wrong.list(NODES)


def test_a_server_with_another_certificate_is_not_trusted(api):
    if not api.access.ca_pem:
        pytest.skip("this cluster has a certificate of a public authority")
    other = KubernetesApi(dataclasses.replace(api.access, ca_pem=""), retry_for_s=0.0)
    with pytest.raises(Exception, match="its certificate is not valid"):
        other.list(NODES)


def test_many_creates_in_parallel_each_happen_once(api, maps):
    made, lock = [], threading.Lock()

    def create(index):
        api.create(maps, config_map(f"m{index}"))
        with lock:
            made.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(24))
    assert len(api.list(maps, labels="of=test")) == 24
