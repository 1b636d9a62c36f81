"""The client against a server that is overloaded, silent, forgetful or away. The faults are ordered at the fake server."""

import json
import stat
import threading
import time

import pytest

from benchmarks.cluster import wait_until
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import NotSignedIn
from phalanx.engines.kubernetes.errors import KubernetesError, KubernetesUnreachable
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from tests.contract.test_kubernetes_api import config_map, names, watching
from tests.kubernetes.fake_api import fake_api
from tests.kubernetes.fake_store import Refused

pytestmark = [pytest.mark.serial]
MAPS = ResourcePath("configmaps", namespace="default")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake_api(str(tmp_path_factory.mktemp("fake"))) as made:
        yield made


@pytest.fixture
def fake(server):
    yield server
    server.faults.clear()
    server.silent.clear()
    server.away.clear()
    server.double_events = False
    api_of(server).delete_all(MAPS, labels="of=test")


def api_of(fake, kubeconfig="", **options):
    return KubernetesApi(find_access("", {"KUBECONFIG": kubeconfig or fake.kubeconfig}), **options)


def times(count, refused):
    left = [count]

    def fault(method, path):
        if left[0] > 0:
            left[0] -= 1
            raise refused
        return False

    return fault


def test_too_many_requests_are_repeated_after_the_time_that_the_server_asks(fake):
    api = api_of(fake)
    fake.faults.append(times(2, Refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "1"})))
    begun_s, before = time.monotonic(), len(fake.requests)
    api.create(MAPS, config_map("one"))
    assert time.monotonic() - begun_s >= 2.0
    assert len(fake.requests) - before == 3


def test_a_server_that_stays_overloaded_is_an_error_in_the_end(fake):
    api = api_of(fake, retry_for_s=0.5)
    fake.faults.append(times(1000, Refused(429, "TooManyRequests", "slow down")))
    with pytest.raises(KubernetesError, match="slow down"):
        api.get(MAPS, "one")


def test_a_dropped_connection_is_tried_again_where_that_is_safe(fake):
    api = api_of(fake)
    api.create(MAPS, config_map("one"))
    dropped = [2]

    def drop(method, path):
        dropped[0] -= 1
        return dropped[0] >= 0

    fake.faults.append(drop)
    assert api.get(MAPS, "one")["metadata"]["name"] == "one"


def test_a_create_that_was_carried_out_before_the_connection_broke_is_a_conflict_and_no_second_object(fake):
    api = api_of(fake)
    api.get(ResourcePath("namespaces"), "default")  # the connection is open

    def after(method, path):
        if method == "POST" and fake.store.version == before:
            api_of(fake).apply(MAPS, "one", config_map("one"))  # as if it had been carried out
            return True
        return False

    before = fake.store.version
    fake.faults.append(after)
    with pytest.raises(KubernetesError) as caught:
        api.create(MAPS, config_map("one"))
    assert caught.value.is_conflict


def test_a_server_that_is_away_is_unreachable(fake):
    api = api_of(fake, retry_for_s=0.3)
    fake.away.set()
    with pytest.raises(KubernetesUnreachable, match="does not answer"):
        api.get(MAPS, "one")


def test_waiting_ends_with_the_engine(fake):
    ended = threading.Event()
    api = api_of(fake, retry_for_s=60.0, ended=ended)
    fake.away.set()
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(KubernetesUnreachable):
        api.get(MAPS, "one")


def test_a_half_closed_watch_is_given_up_and_nothing_is_missed(fake):
    api = api_of(fake)
    with watching(api, MAPS, watch_s=1.0, silence_s=0.5) as recorder:
        assert recorder.next() == ("replaced", [], None)
        fake.silent.set()
        api.create(MAPS, config_map("one", a="1"))
        threading.Event().wait(0.3)
        fake.silent.clear()
        fake.cut_watches()
        assert recorder.next() == ("changed", "one", "1")


def test_a_silent_watch_ends_by_the_clients_own_clock(fake):
    api = api_of(fake)
    with watching(api, MAPS, watch_s=1.0, silence_s=0.2) as recorder:
        assert recorder.next() == ("replaced", [], None)
        watches = lambda: sum("watch=true" in path for _, path, _ in fake.requests)  # noqa: E731
        fake.silent.set()
        seen = watches()
        wait_until(lambda: watches() > seen, "another watch")


def test_a_compacted_version_leads_to_a_new_list(fake):
    api = api_of(fake)
    api.create(MAPS, config_map("old", a="0"))
    with watching(api, MAPS) as recorder:
        assert recorder.next() == ("replaced", ["old"], None)
        fake.away.set()
        fake.cut_watches()
        assert recorder.next()[0] == "failed"
        fake.store.delete(next(kind for kind, _, name in fake.store.items if name == "old"), "default", "old", {})
        fake.store.create(
            next(kind for kind, _, _ in fake.store.items if kind.plural == "namespaces"),
            "",
            {"metadata": {"name": "more"}},
        )
        fake.store.compact()
        fake.away.clear()
        while (told := recorder.next())[0] == "failed":
            pass
        assert told == ("replaced", [], None), "the deletion was in no event; the new list shows it"
    fake.store.delete(next(kind for kind, _, name in fake.store.items if name == "more"), "", "more", {})


def test_doubled_events_are_handled_twice_and_a_bookmark_never(fake):
    api = api_of(fake)
    fake.double_events = True
    with watching(api, MAPS) as recorder:
        assert recorder.next() == ("replaced", [], None)
        api.create(MAPS, config_map("one", a="1"))
        assert [recorder.next(), recorder.next()] == [("changed", "one", "1")] * 2
        threading.Event().wait(1.2)  # a bookmark comes after a second
        api.delete(MAPS, "one")
        assert recorder.next() == ("deleted", "one", "1")


def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_pause(fake):
    api = api_of(fake)
    with watching(api, MAPS) as recorder:
        assert recorder.next() == ("replaced", [], None)
        end_s, before = time.monotonic() + 1.0, len(fake.requests)
        while time.monotonic() < end_s:
            fake.cut_watches()
            threading.Event().wait(0.01)
        assert len(fake.requests) - before <= 12


def test_the_client_signs_in_with_a_certificate(fake, tmp_path):
    signed = CertificateAuthority(StateFolder(path=fake.folder)).sign(["alice"])
    (tmp_path / "alice.pem").write_text(signed.certificate_pem)
    (tmp_path / "alice.key").write_text(signed.key_pem)
    user = {"client-certificate": str(tmp_path / "alice.pem"), "client-key": str(tmp_path / "alice.key")}
    api = api_of(fake, fake.write_kubeconfig("alice.kubeconfig", user))
    with pytest.raises(KubernetesError, match='User "phalanx alice" cannot list resource "configmaps"'):
        api.list(MAPS)


def test_a_plugin_is_asked_again_when_its_token_is_no_longer_accepted(fake, tmp_path):
    script, answer = tmp_path / "login", tmp_path / "answer"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\ncat {answer}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def hands_out(token):
        answer.write_text(json.dumps({"status": {"token": token}}))

    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}}
    api = api_of(fake, fake.write_kubeconfig("plugin.kubeconfig", user))
    fake.tokens["one"] = "admin"
    hands_out("one")
    assert names(api.list(MAPS)) == []
    del fake.tokens["one"]
    fake.tokens["two"] = "admin"
    hands_out("two")
    assert names(api.list(MAPS)) == []
    assert (tmp_path / "runs").read_text() == "run\n" * 2
    del fake.tokens["two"]
    with pytest.raises(NotSignedIn):
        api.list(MAPS)
