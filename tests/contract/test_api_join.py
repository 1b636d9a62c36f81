"""Joining over the API, and the door off loopback: TLS for who speaks it, one line for who does not."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import http.client
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from phalanx.api.app import build_app
from phalanx.api.http.server import ApiServer
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import (
    HeadJoinService,
    ListenAddress,
    bind_socket,
    with_tls,
)
from phalanx.app.state_folder import StateFolder
from phalanx.client.connection.tls import fetch_ca
from phalanx.core.access.node_tokens import (
    attempt_key,
    join_token,
    machine_join_token,
    node_of_token,
    seat_token,
)
from phalanx.core.errors import BadRequest, NotPermitted, Unreachable
from phalanx.core.fleet.node import NodeState
from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.state.records import POOL_NODES
from phalanx.core.work.seats import Seat
from phalanx.engines.local.engine import LocalEngine
from phalanx.wire.head_http import fingerprint
from tests.contract.api_head import SECRET, ApiHead, Supervisor, until

ADDRESS = "127.0.0.2"  # off the loopback address that speaks plainly, on the loopback network all the same


@pytest.fixture
def bench(tmp_path):
    head = ApiHead(str(tmp_path))
    authority = CertificateAuthority(StateFolder.open(str(tmp_path / "home")))
    joining = HeadJoinService(
        authority=authority,
        address=ListenAddress(host=ADDRESS, port=7600),
        node_secret=SECRET,
        head_id="head-1",
        engines=[LocalEngine(home=str(tmp_path), environment=dict, token_of=lambda _: "")],
    )
    head.parts = replace(head.parts, join_service=joining, hosts_allowed=head.parts.hosts_allowed | {ADDRESS})
    head.app = build_app(head.parts)
    with head.calling() as call:
        yield head, call, authority
    head.close()


def join(call, token, node_id="h1", **more):
    return call(
        "never issued",
        "POST",
        "/v1/join",
        json={"node_id": node_id, **more},
        headers={"authorization": f"Bearer {token}"},
    )


def good(head, lasts_s=60.0):
    return join_token(SECRET, head.clock.now_s() + lasts_s)


def test_a_join_token_is_exchanged_for_the_nodes_own(bench):
    head, call, _ = bench
    reply = join(call, good(head))
    assert reply.status_code == 200, reply.text
    assert node_of_token(SECRET, reply.json()["token"]) == "h1"
    assert (reply.json()["engine"], reply.json()["up"]) == ("joined", False)


def test_a_join_token_opens_nothing_else_and_not_for_longer_than_it_says(bench):
    head, call, _ = bench
    token = good(head)
    for method, path in (("GET", "/v1/nodes"), ("GET", "/v1/join"), ("GET", "/v1/node/commands"), ("POST", "/v1/stop")):
        assert call("never issued", method, path, headers={"authorization": f"Bearer {token}"}).status_code == 403
    head.clock.ahead_s = 61.0
    assert (join(call, token).status_code, join(call, token).json()["error"]["code"]) == (401, "not_signed_in")


def test_a_name_that_is_up_is_taken_by_nobody_else(bench):
    head, call, _ = bench
    Supervisor(call).hello()  # n0
    refused = join(call, good(head), "n0")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    own = call("node:n0", "POST", "/v1/join", json={"node_id": "n0"})
    assert (own.status_code, own.json()["up"]) == (200, True)
    assert call("node:n0", "POST", "/v1/join", json={"node_id": "h7"}).status_code == 403


def test_a_name_whose_server_is_silent_under_a_long_lease_is_free(bench):
    """Found by hand: after a restore, the name of a server that had left could not be used for ten minutes."""
    head, call, _ = bench
    Supervisor(call).hello()  # n0
    leases = head.driver.leases
    leases.set_current("n0", "1", 1)
    leases.grant("n0", "s1", head.clock.boottime_s(), until_s=head.clock.boottime_s() + 600.0)
    assert join(call, good(head), "n0").status_code == 409
    # Silent for 8 s. A jump of the clock would count as a pause of the head, after which nobody is silent.
    leases._floor_s, leases._leases["n0"].renewed_s = 0.0, head.clock.boottime_s() - 8.0
    reply = join(call, good(head), "n0")
    assert reply.status_code == 200, reply.text
    assert reply.json()["up"] is False
    assert head.store.nodes()[0].state is NodeState.UP, "what runs there keeps its lease"


def test_a_join_token_that_ends_while_its_body_is_held_back_brings_nobody_in(bench):
    """Found by reading: the gate judged when the head of the request came, and nobody when its body was here."""
    head, call, _ = bench
    gate = head.app.state.runtime.authenticator
    admit, admitted = gate.authenticate, threading.Event()

    def admitting(authorization):
        found = admit(authorization)
        admitted.set()
        return found

    gate.authenticate = admitting

    def halves():
        yield b'{"node_id": '
        assert admitted.wait(100)
        assert call("admin", "POST", "/v1/join/renew").status_code == 200
        yield b'"h1"}'

    late = call.client.post("/v1/join", content=halves(), headers={"authorization": f"Bearer {good(head)}"})
    assert (late.status_code, late.json()["error"]["code"]) == (401, "not_signed_in")


def test_a_seat_of_an_attempt_never_becomes_a_node(bench):
    """Found by reading: one attempt's key signs for a seat on any node, and its token was taken for that node's own."""
    _, call, _ = bench
    seat = Seat(node_id="evil", job_id="17", epoch=2)
    refused = join(call, seat_token(attempt_key(SECRET, "17", 2), seat), "evil")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_permitted")


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "-a", "x" * 64])
def test_a_name_that_no_node_may_have_is_refused(bench, name):
    head, call, _ = bench
    assert join(call, good(head), name).status_code == 400


def test_only_an_admin_is_told_the_line(bench):
    _, call, authority = bench
    assert call("operator", "GET", "/v1/join").status_code == 403
    line = call("admin", "GET", "/v1/join").json()
    assert (line["address"], line["fingerprint"]) == (f"{ADDRESS}:7600", fingerprint(authority.ca_pem))


def test_a_renewed_line_ends_the_tokens_before_it_and_no_nodes_own(bench):
    _, call, _ = bench
    before = call("admin", "GET", "/v1/join").json()["token"]
    own = join(call, before).json()["token"]
    assert call("operator", "POST", "/v1/join/renew").status_code == 403
    after = call("admin", "POST", "/v1/join/renew").json()["token"]
    assert after == call("admin", "GET", "/v1/join").json()["token"] != before
    refused = join(call, before)
    assert (refused.status_code, "revoked by a newer one" in refused.json()["error"]["message"]) == (401, True)
    assert join(call, after).status_code == 200
    assert join(call, own).status_code == 200


def test_a_head_on_loopback_alone_takes_nobody_in(tmp_path):
    head = ApiHead(str(tmp_path))
    with head.calling() as call:
        assert join(call, good(head)).status_code == 409
        assert call(None, "GET", "/v1/ca").status_code == 404
        assert call("admin", "GET", "/v1/join").json()["address"] == ""
        assert call("admin", "POST", "/v1/join/renew").status_code == 409
    head.close()


# ---------------------------------------------------------------------------------------------------------------- the door


@contextmanager
def door(bench):
    """The same API with a door off loopback; its port."""
    head, _, authority = bench
    listener = bind_socket(ListenAddress(host=ADDRESS, port=0))
    port = listener.getsockname()[1]
    tls = with_tls(listener, authority, ListenAddress(host=ADDRESS, port=port))
    server = ApiServer(build_app(head.parts), tls=tls, host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(timeout=100)
        assert not thread.is_alive(), "the server did not stop"


def test_who_knows_the_fingerprint_gets_the_ca_and_who_trusts_it_is_served(bench):
    _, _, authority = bench
    with door(bench) as port:
        ca_pem = fetch_ca(ADDRESS, port, fingerprint(authority.ca_pem))
        assert ca_pem == authority.ca_pem
        context = ssl.create_default_context(cadata=ca_pem)
        connection = http.client.HTTPSConnection(ADDRESS, port, timeout=60, context=context)
        for _ in range(2):  # the connection is kept
            connection.request("GET", "/v1/health")
            assert connection.getresponse().read().startswith(b'{"status":"ok"')
        connection.close()


def test_another_fingerprint_is_refused(bench):
    with door(bench) as port, pytest.raises(NotPermitted, match="nothing was sent"):
        fetch_ca(ADDRESS, port, "ab" * 32)


def test_a_plain_request_is_told_so_in_one_line(bench):
    with door(bench) as port:
        connection = http.client.HTTPConnection(ADDRESS, port, timeout=60)
        connection.request("POST", "/v1/jobs", body=b"x" * 100_000)
        reply = connection.getresponse()
        assert (reply.status, b"serves HTTPS" in reply.read()) == (400, True)
        connection.close()


def test_a_silent_connection_stands_in_nobodys_way(bench):
    _, _, authority = bench
    with door(bench) as port:
        silent = [socket.create_connection((ADDRESS, port)) for _ in range(50)]
        assert fetch_ca.__wrapped__(ADDRESS, port, fingerprint(authority.ca_pem))
        for one in silent:
            one.close()


def test_who_does_not_speak_tls_is_no_head_to_join(bench):
    _, call, _ = bench
    port = int(call.url.rpartition(":")[2])
    with pytest.raises(BadRequest, match="does not use TLS"):
        fetch_ca("127.0.0.1", port, "ab" * 32)
    with pytest.raises(Unreachable, match="no head at"):
        fetch_ca(ADDRESS, 9, "ab" * 32)


def test_the_token_of_an_order_brings_in_its_one_node_until_it_is_up(bench):
    head, call, _ = bench
    call("admin", "PUT", "/v1/pools/burst", json={"provider": "any", "node": "1", "max_nodes": 1, "min_nodes": 1})
    until(lambda: head.store.records(POOL_NODES))
    order = head.store.records(POOL_NODES)[0]
    token = machine_join_token(SECRET, "burst-0", order.token)
    assert join(call, token, "burst-1").status_code == 403
    assert call("none", "GET", "/v1/jobs", headers={"authorization": f"Bearer {token}"}).status_code == 403
    assert join(call, machine_join_token(SECRET, "burst-0", "another order"), "burst-0").status_code == 401
    assert join(call, "phxm.burst-0.x", "burst-0").status_code == 401
    reply = join(call, token, "burst-0")
    assert node_of_token(SECRET, reply.json()["token"]) == "burst-0"
    Supervisor(call, "burst-0").hello()
    until(lambda: head.store.records(POOL_NODES)[0].state is PoolNodeState.UP)
    refused = join(call, token, "burst-0")
    assert (refused.status_code, "was used" in refused.text) == (401, True)


def test_a_machine_that_its_cloud_takes_back_drains_its_own_node_and_no_other(bench):
    head, call, _ = bench
    call("admin", "PUT", "/v1/pools/burst", json={"provider": "any", "node": "1", "max_nodes": 2, "min_nodes": 2})
    until(lambda: len(head.store.records(POOL_NODES)) == 2)
    first = next(one for one in head.store.records(POOL_NODES) if one.id == "burst-0")
    reply = join(call, machine_join_token(SECRET, "burst-0", first.token), "burst-0")
    own = {"authorization": f"Bearer {reply.json()['token']}"}
    Supervisor(call, "burst-0").hello()

    def member(name):
        return next((one for one in head.store.records(POOL_NODES) if one.id == name), None)

    until(lambda: member("burst-0").state is PoolNodeState.UP)
    before = member("burst-1")
    told = call("none", "POST", "/v1/join/order", headers=own, json={"why": "EC2 takes it\x1b[31m back"})
    assert (told.status_code, told.json()["why"]) == (200, "EC2 takes it[31m back")
    until(lambda: member("burst-0") is None or member("burst-0").state is PoolNodeState.DRAINING)
    assert member("burst-1") == before
    other = call("none", "POST", "/v1/join/order", headers={"authorization": "Bearer x"}, json={"why": "x"})
    assert other.status_code == 401
