"""`Client.exec` against a head whose supervisor the test plays: windows, ends, TLS, redirects and broken connections."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from phalanx.api.http.follower import FollowerApp
from phalanx.api.http.server import HeadServer
from phalanx.api.services import ApiLimits
from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import ListenAddress, with_tls
from phalanx.app.state_folder import StateFolder
from phalanx.client import Client
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted, NotSignedIn, TryLater, Unreachable
from phalanx.ports.election import Leader
from phalanx.wire.supervisor import ExecOutput
from tests.contract.api_head import TOKENS, ApiHead, Caller, Supervisor, until
from tests.contract.test_api_exec import given, name_of
from tests.unit.test_follower import Place

WINDOW = 1 << 18


@pytest.fixture
def job_id(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    return job_id


def client(call, role="user", url=None):
    return Client(url or call.url, TOKENS.get(role, role), home="/nonexistent")


def prints(call, name, offset, data=b"", **more):
    return call("node:n0", "POST", f"/v1/node/exec/{name}/output", ExecOutput(offset=offset, data=data, **more))


def test_client_carries_bytes_sizes_and_signals_and_returns_the_exit_code(call, job_id):
    with client(call).exec(job_id, ["cat"], tty=True, rows=30, cols=90) as session:
        name = name_of(call)
        session.write(b"typed")
        assert given(call, name, wait_s=3).data == b"typed"
        session.resize(31, 91)
        session.signal("INT")
        session.end_input()
        until(lambda: given(call, name, 5, signals=0).closed)
        assert given(call, name, 5).signals == [2]
        prints(call, name, 0, b"printed", exit_code=5)
        assert (session.read(), session.read(), session.exit_code) == (b"printed", None, 5)


def test_client_has_room_again_once_the_command_has_read(head, call, job_id):
    window = head.limits.exec_buffer_bytes
    with client(call).exec(job_id, ["cat"]) as session:
        name, told = name_of(call), threading.Event()
        session.on_room = told.set
        for _ in range(window // WINDOW):
            session.write(b"x" * WINDOW)
        assert session.room == 0
        until(lambda: given(call, name).data)
        reading = threading.Thread(target=session.read)
        reading.start()
        given(call, name, 1000)
        assert told.wait(100)
        assert session.room == 1000
        prints(call, name, 0, exit_code=0)
        reading.join(100)


def test_client_acknowledges_what_it_has_handled(head, call, job_id):
    with client(call).exec(job_id, ["cat"]) as session:
        name, piece = name_of(call), b"x" * 65536
        pieces = 2 * head.limits.exec_buffer_bytes // len(piece)

        def printing():
            for number in range(pieces):
                assert prints(call, name, number * len(piece), piece).status_code == 204
            prints(call, name, pieces * len(piece), exit_code=0)

        thread = threading.Thread(target=printing)
        thread.start()
        got = 0
        while (data := session.read()) is not None:
            got += len(data)
        thread.join(100)
        assert got == pieces * len(piece)


def test_refusals_are_raised_as_their_classes(call, job_id):
    waiting = call.submit(hold=True)
    for role, job, kind in [
        ("other", job_id, NotPermitted),
        ("never issued", job_id, NotSignedIn),
        ("user", "999", NotFound),
        ("user", waiting, Conflict),
    ]:
        with pytest.raises(kind) as caught:
            client(call, role).exec(job, ["id"])
        assert caught.value.hint


def test_command_that_the_node_refuses_is_raised(call, job_id):
    with client(call).exec(job_id, ["id"]) as session:
        prints(call, name_of(call), 0, exit_code=127, error="no running ranks on this node")
        with pytest.raises(Conflict, match="no running ranks on this node"):
            session.read()


def test_head_that_stops_is_told_from_one_that_is_gone(tmp_path):
    head = ApiHead(str(tmp_path))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        broken, ended = client(call).exec(job_id, ["id"]), client(call).exec(job_id, ["id"])
        broken._socket.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Unreachable, match="broke; the command receives SIGHUP"):
            broken.read()
    with pytest.raises(Conflict, match="the head stopped"):
        ended.read()
    with pytest.raises(Unreachable):
        client(call).exec(job_id, ["id"])
    head.close()


def test_errors_of_the_library_are_raised_and_not_printed(call, job_id, caplog):
    """Found by freezing the head under `dev`: the thread of pings logged a traceback, which Python prints where no log is set up."""
    with client(call).exec(job_id, ["id"]) as session:
        session._socket.ping_interval = 0.01
        session._socket.ping = None  # whose call fails, as the end of a connection does that is frozen
        session._socket.keepalive()
    assert not [one for one in caplog.records if one.name.startswith("phalanx.client")]


def test_no_session_by_plain_http_off_loopback():
    with pytest.raises(BadRequest, match="nothing was sent"):
        Client("http://192.0.2.1:7600", "token", home="/nonexistent").exec("1", ["id"])


@contextmanager
def secured(head, home):
    """The head's own server, by TLS too: a caller, the URL there, and the certificate of its CA."""
    outer = socket.create_server(("127.0.0.1", 0))
    authority = CertificateAuthority(StateFolder.open(home))
    port = outer.getsockname()[1]
    tls = with_tls(outer, authority, ListenAddress(host="127.0.0.1", port=port))
    with head.served(tls=tls) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as line:
        yield Caller(line, url), f"https://127.0.0.1:{port}", authority.ca_pem


def test_session_by_tls_trusts_the_heads_own_ca_alone(tmp_path, monkeypatch):
    head = ApiHead(str(tmp_path))
    with secured(head, str(tmp_path / "home")) as (call, outside, ca_pem):
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        with pytest.raises(Unreachable, match="is not trusted"):
            client(call, url=outside).exec(job_id, ["id"])
        (tmp_path / "ca.pem").write_text(ca_pem)
        monkeypatch.setenv("PHALANX_CA", str(tmp_path / "ca.pem"))
        with client(call, url=outside).exec(job_id, ["id"]) as session:
            name = name_of(call)
            for number in range(20):
                prints(call, name, number * 65536, b"x" * 65536)
                assert session.read()
            prints(call, name, 20 * 65536, exit_code=3)
            while session.read() is not None:
                pass
            assert session.exit_code == 3
    head.close()


def test_standby_refers_the_session_to_the_leader(call, job_id):
    place = Place(row=Leader(term=4, beat=7, holder="a", url=call.url))
    server = HeadServer(FollowerApp(place, version="1"), host="127.0.0.1", port=0, lifespan="off")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    standby = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with client(call, url=standby).exec(job_id, ["id"]) as session:
        prints(call, name_of(call), 0, b"led", exit_code=0)
        assert session.read() == b"led"
    server.should_exit = True
    thread.join(100)


def test_too_many_sessions_are_told_at_once(tmp_path):
    head = ApiHead(str(tmp_path), limits=ApiLimits(exec_sessions=4, plan_stop_wait_s=0.2))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        with client(call).exec(job_id, ["id"]), pytest.raises(TryLater, match="the most for one user"):
            client(call).exec(job_id, ["id"])
    head.close()
