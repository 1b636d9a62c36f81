"""The doors of a head that stands by, as it begins to lead: nobody who keeps a connection open keeps it from that."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phalanx.api.http.follower import FollowerApp
from phalanx.api.http.security import SecurityMiddleware
from phalanx.api.http.server import HeadServer
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import ListenAddress, with_tls
from phalanx.app.state_folder import StateFolder
from tests.contract.exec_socket import upgraded
from tests.unit.test_follower import Place

PATIENCE_S = 60  # of a server that nobody hangs up for: it would wait so long for whoever keeps a connection


@contextmanager
def standing(tmp_path) -> Iterator[tuple[HeadServer, threading.Thread, int, int]]:
    """A standby's server, its thread, and its ports: plain, and by TLS."""
    inner, outer = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    port, secure = inner.getsockname()[1], outer.getsockname()[1]
    authority = CertificateAuthority(StateFolder.open(str(tmp_path)))
    tls = with_tls(outer, authority, ListenAddress(host="127.0.0.1", port=secure))
    hosts = frozenset({"127.0.0.1", "localhost"})
    server = HeadServer(
        SecurityMiddleware(FollowerApp(Place(), version="1"), hosts_allowed=hosts),
        tls=tls,
        lifespan="off",
        timeout_graceful_shutdown=PATIENCE_S,
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [inner]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield server, thread, port, secure
    finally:
        server.should_exit = True
        thread.join(timeout=100)


def asked(wire: socket.socket, port: int) -> bytes:
    """The answer to a request on a connection that is kept."""
    wire.settimeout(10.0)
    wire.sendall(b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port)
    return wire.recv(1 << 16)


def connected(port: int, *, secure: bool) -> socket.socket:
    wire = socket.create_connection(("127.0.0.1", port))
    if not secure:
        return wire
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(wire)


@pytest.mark.parametrize("secure", [False, True])
def test_websocket_is_referred_to_the_leader(tmp_path, secure):
    with standing(tmp_path) as (_, _, plain_port, tls_port):
        port = tls_port if secure else plain_port
        refused = upgraded(f"http://127.0.0.1:{port}", "/v1/jobs/1/exec", {}, sock=connected(port, secure=secure))
        assert refused.status_code == 503
        assert refused.json()["error"]["leader"] == "http://a:1"


@pytest.mark.parametrize("secure", [False, True])
def test_connection_kept_open_does_not_hold_up_a_takeover(tmp_path, secure):
    with standing(tmp_path) as (server, thread, plain_port, tls_port):
        port = tls_port if secure else plain_port
        with connected(port, secure=secure) as wire:
            assert asked(wire, port).startswith(b"HTTP/1.1 200")
            server.should_exit = True
            thread.join(timeout=PATIENCE_S / 3)  # 0.2 s, where nobody is waited for
            assert not thread.is_alive()
