"""Exec sessions: bytes both ways, bounded, the user's own, ended with their WebSocket."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import logging
import signal
import socket
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from phalanx.api.app import build_app
from phalanx.api.http import timeouts
from phalanx.api.http.websocket_protocol import HeadWebSocketProtocol
from phalanx.api.live import exec_start
from phalanx.api.live.exec_sessions import OffsetBuffer
from phalanx.api.services import ApiLimits
from phalanx.core.access.node_tokens import attempt_key, seat_token
from phalanx.core.errors import Conflict
from phalanx.core.work.seats import Seat
from phalanx.wire.supervisor import (
    CommandsReply,
    ExecInput,
    ExecOutput,
    OpenExec,
    decode,
    decode_command,
    pack,
    unpack,
)
from tests.contract.api_head import SECRET, TOKENS, ApiHead, Supervisor, bearer, code, until
from tests.contract.exec_socket import ExecSocket, open_exec
from tests.unit.test_follower import Place


@pytest.fixture
def job_id(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    return job_id


def name_of(call):
    """The name of the newest session, as the node was told it."""
    sent = decode(call("node:n0", "GET", "/v1/node/commands").content, CommandsReply).commands[-1]
    command = decode_command(sent)
    assert isinstance(command, OpenExec)
    return command.session


def given(call, name, after=0, wait_s=0, **more):
    query = "".join(f"&{key}={value}" for key, value in more.items())
    reply = call("node:n0", "GET", f"/v1/node/exec/{name}/input?after={after}&wait_s={wait_s}{query}")
    assert reply.status_code == 200, reply.text
    return decode(reply.content, ExecInput)


def printed(call, name, offset, data=b"", **more):
    return call("node:n0", "POST", f"/v1/node/exec/{name}/output", ExecOutput(offset=offset, data=data, **more))


def gone(call, name):
    """Whether the node is told that the user has left."""
    return call("node:n0", "GET", f"/v1/node/exec/{name}/input?closed=1").status_code == 404


def test_session_reaches_the_node_and_carries_bytes_both_ways(call, job_id):
    user = open_exec(call, job_id)
    sent = decode(call("node:n0", "GET", "/v1/node/commands").content, CommandsReply).commands[-1]
    command = decode_command(sent)
    assert (command.argv, command.tty, command.rows, command.epoch) == (["bash"], True, 30, 1)
    name = command.session
    user.send(b"ls\n")
    assert given(call, name, wait_s=3).data == b"ls\n"
    assert given(call, name, 0).data == b"ls\n"  # asked again, given again
    assert given(call, name, 3).data == b""
    assert user.until("ack") == {"type": "ack", "offset": 3}
    assert printed(call, name, 0, b"a  b\n").status_code == 204
    assert printed(call, name, 0, b"a  b\n").status_code == 204  # sent twice, shown once
    assert user.read(5) == b"a  b\n"
    user.send({"type": "input_end"})
    assert given(call, name, 3, wait_s=3).closed
    printed(call, name, 5, b"bye\n", exit_code=7)
    assert user.until("exit") == {"type": "exit", "exit_code": 7}
    assert (user.output, user.frame(), user.line.close_code) == (b"a  b\nbye\n", None, 1000)
    until(lambda: gone(call, name))


def test_bytes_travel_as_they_are_where_the_node_asks_for_it(call, job_id):
    user, odd = open_exec(call, job_id), bytes(range(256))
    path = f"/v1/node/exec/{name_of(call)}"
    user.send(odd)
    assert unpack(call("node:n0", "GET", f"{path}/input?wait_s=3&packed=1").content, ExecInput).data == odd
    assert call("node:n0", "POST", f"{path}/output?packed=1", content=b"\xc1").status_code == 400
    packed = pack(ExecOutput(offset=0, data=odd))
    assert call("node:n0", "POST", f"{path}/output?packed=1", content=packed).status_code == 204
    assert user.read(256) == odd


def test_new_size_and_signals_reach_the_node_once(call, job_id):
    user = open_exec(call, job_id)
    name = name_of(call)
    user.send({"type": "resize", "rows": 50, "cols": 100})
    assert given(call, name, wait_s=3).rows == 50
    user.send({"type": "signal", "name": "INT"})
    assert given(call, name, wait_s=3).signals == [signal.SIGINT]
    assert given(call, name, wait_s=3).signals == [signal.SIGINT]  # until the node has them
    user.send({"type": "signal", "name": "TERM"})
    assert given(call, name, wait_s=3, signals=1).signals == [signal.SIGTERM]
    user.send({"type": "input_end"})
    assert given(call, name, wait_s=3, signals=2).closed
    user.send({"type": "signal", "name": "INT"})
    assert given(call, name, wait_s=3, signals=2, closed=1).signals == [signal.SIGINT]  # after its input too


def test_node_that_cannot_take_input_yet_asks_for_none_and_hears_of_signals(call, job_id):
    user = open_exec(call, job_id)
    name = name_of(call)
    user.send(b"x" * 100)
    assert given(call, name, limit=10, wait_s=3).data == b"x" * 10
    user.send({"type": "signal", "name": "INT"})
    until(lambda: given(call, name, limit=0).signals)
    assert given(call, name, limit=0).data == b""


@pytest.mark.parametrize(("role", "status"), [("other", 403), ("viewer", 403), ("never issued", 401), (None, 401)])
def test_handshake_of_who_may_not_is_refused_as_any_request(call, job_id, role, status, caplog):
    refused = ExecSocket(call.url, job_id, bearer(role)).refused
    assert refused.status_code == status
    assert set(refused.json()["error"]) >= {"code", "message", "hint"}
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"authorization": "Bearer second"}, 400),
    ],
)
def test_pages_of_others_open_no_session(call, job_id, headers, status):
    sent = [*bearer("user").items(), *headers.items()]
    assert ExecSocket(call.url, job_id, sent).refused.status_code == status


def test_pages_of_this_head_open_one(call, job_id):
    user = ExecSocket(call.url, job_id, {**bearer("user"), "origin": call.url}, {"argv": ["id"]})
    assert user.until("opened")


def test_another_hosts_name_opens_no_session(call, job_id):
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port)) as line:
        line.sendall(handshake(job_id, host="evil.example"))
        assert line.recv(4096).startswith(b"HTTP/1.1 403 ")


def handshake(job_id, host, role="user"):
    lines = [
        f"GET /v1/jobs/{job_id}/exec HTTP/1.1",
        f"Host: {host}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *(f"{name}: {value}" for name, value in bearer(role).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def test_unknown_jobs_and_unknown_paths_are_refused(call, job_id):
    assert ExecSocket(call.url, "999", bearer("user")).refused.status_code == 404
    assert ExecSocket(call.url, f"{job_id}/x", bearer("user")).refused.status_code in (403, 404)
    assert call("user", "GET", f"/v1/jobs/{job_id}/exec").status_code == 404  # it is no plain request


def test_session_is_its_nodes_alone(call, job_id):
    Supervisor(call, node_id="n1", supervisor_id="s2").hello()
    user = open_exec(call, job_id)
    assert call("node:n1", "GET", f"/v1/node/exec/{name_of(call)}/input").status_code == 404
    user.close()


@pytest.mark.parametrize(
    "odd", [{"argv": []}, {"argv": ["a\0b"]}, {"rows": 0}, {"node_rank": 1}, {"shell": True}, {"argv": "id"}]
)
def test_odd_commands_are_refused(head, call, job_id, odd):
    user = ExecSocket(call.url, job_id, bearer("user"), {"argv": ["id"], **odd})
    assert user.error() == ("bad_request", 1008)
    assert head.app.state.runtime.sessions.count() == 0


@pytest.mark.parametrize(
    "odd",
    [
        "{",
        "[]",
        '{"type": "dance"}',
        '{"type": "resize", "rows": 0, "cols": 5}',
        '{"type": "signal", "name": "KILL"}',
        '{"type": "ack"}',
        '{"type": "ack", "offset": 1, "x": 2}',
        "[" * 5000,
    ],
)
def test_odd_frames_end_the_session(head, call, job_id, odd):
    user = open_exec(call, job_id)
    name = name_of(call)
    user.line.send(odd)
    assert user.error() == ("bad_request", 1008)
    until(lambda: gone(call, name))
    assert head.app.state.runtime.sessions.count() == 0


def test_too_many_signals_and_input_after_its_end_end_the_session(call, job_id):
    user = open_exec(call, job_id)
    for _ in range(101):
        user.send({"type": "signal", "name": "INT"})
    assert user.error() == ("bad_request", 1008)
    user = open_exec(call, job_id)
    user.send({"type": "input_end"})
    user.send(b"more")
    assert user.error() == ("conflict", 1008)


def test_message_over_its_limit_ends_the_session(head, call, job_id):
    user = open_exec(call, job_id)
    user.send(b"x" * ((1 << 20) + 1))
    while user.frame():
        pass
    assert user.line.close_code == 1009
    until(lambda: head.app.state.runtime.sessions.count() == 0)


def test_user_who_sends_more_than_the_window_is_cut_off(call, job_id, head):
    user = open_exec(call, job_id)
    for _ in range(head.limits.exec_buffer_bytes // 65536):
        user.send(b"x" * 65536)
    user.send(b"x")
    assert user.error() == ("bad_request", 1008)


def test_acks_make_room_for_more_input(call, job_id, head):
    user = open_exec(call, job_id)
    name, window = name_of(call), head.limits.exec_buffer_bytes
    for _ in range(window // 65536):
        user.send(b"x" * 65536)
    assert len(given(call, name, wait_s=3, limit=65536).data) == 65536
    assert given(call, name, 65536, wait_s=3).data
    assert user.until("ack")["offset"] == 65536
    user.send(b"y" * 65536)
    until(lambda: given(call, name, window).data == b"y" * 65536)


def test_no_session_beside_a_job_that_does_not_run(call, job_id):
    waiting = call.submit(hold=True)
    assert ExecSocket(call.url, waiting, bearer("user"), {"argv": ["id"]}).error() == ("conflict", 1008)


def test_command_that_does_not_arrive_in_time_is_not_waited_for(tmp_path):
    head = ApiHead(str(tmp_path), limits=ApiLimits(body_s=2.0))
    with head.calling() as call:
        job_id = call.submit()
        assert ExecSocket(call.url, job_id, bearer("user")).error() == ("try_later", 1008)
    head.close()


def test_session_outlives_the_time_limit_of_a_request(call, job_id, monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_HEAD_TIMEOUT_S", 0.1)
    user = open_exec(call, job_id)
    name = name_of(call)
    time.sleep(0.3)
    printed(call, name, 0, b"still here")
    assert user.read(10) == b"still here"


def test_half_a_handshake_is_not_waited_for(call, job_id, monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_HEAD_TIMEOUT_S", 0.1)
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as line:
        line.sendall(handshake(job_id, where.netloc)[:-2])
        assert line.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("header", ["X-Long: " + "x" * 9000, "\r\n".join(f"X-{n}: y" for n in range(200))])
def test_handshake_with_odd_headers_leaves_no_page_in_the_log(call, job_id, caplog, header):
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as line:
        line.sendall(handshake(job_id, where.netloc)[:-2] + header.encode() + b"\r\n\r\n")
        said = b""
        while piece := line.recv(4096):
            said += piece
    assert said.startswith(b"HTTP/1.1 4")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_no_header_and_no_query_of_a_handshake_is_logged(call, job_id, caplog):
    with caplog.at_level(logging.DEBUG):
        user = ExecSocket(call.url, f"{job_id}/exec?q=canary-query", bearer("user"))
        user = open_exec(call, job_id)
        user.close()
    mine = [one.getMessage() for one in caplog.records]
    assert not [line for line in mine if TOKENS["user"] in line or "canary-query" in line]


@pytest.fixture
def narrow(tmp_path):
    """A head of eight exec sessions: two for each user."""
    head = ApiHead(str(tmp_path), limits=ApiLimits(exec_sessions=8, wait_s=3.0, plan_stop_wait_s=0.2))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        yield head, call, job_id
    head.close()


def test_one_user_leaves_exec_sessions_for_others(narrow):
    """Found by reading: one user could hold every session."""
    head, call, job_id = narrow
    closing, _kept = open_exec(call, job_id), open_exec(call, job_id)
    refused = ExecSocket(call.url, job_id, bearer("user"), {"argv": ["id"]})
    error = refused.frame()["error"]
    assert error["code"] == "try_later"
    assert error["message"] == "2 exec sessions of ada are already open, the most for one user"
    assert "close one of yours" in error["hint"]
    _other = open_exec(call, job_id, "admin")
    closing.close()
    until(lambda: head.app.state.runtime.sessions.count() == 2)
    _again = open_exec(call, job_id)
    assert ExecSocket(call.url, job_id, bearer("user"), {"argv": ["id"]}).error() == ("try_later", 1008)


@pytest.mark.parametrize("end", [{"exit_code": 0}, {"error": "no such command"}])
def test_a_session_that_is_over_holds_no_place(narrow, end):
    head, call, job_id = narrow
    for _ in range(3):
        user = open_exec(call, job_id)
        printed(call, name_of(call), 0, b"bye", **end)
        until(lambda: head.app.state.runtime.sessions.count() == 0)
        frame = user.frame()
        assert frame["type"] == ("exit" if "exit_code" in end else "error")
        assert user.output == b"bye"


def test_command_that_the_node_refuses_is_told(call, job_id):
    user = open_exec(call, job_id)
    printed(call, name_of(call), 0, exit_code=127, error="32 exec sessions are open on this node")
    error = user.frame()["error"]
    assert (error["code"], error["message"]) == ("conflict", "32 exec sessions are open on this node")


def test_session_ends_with_its_attempt_although_its_node_reports_nothing(call, monkeypatch):
    """Found by stopping a node under an open page: the session hung, as the node reported no end of the command."""
    monkeypatch.setattr(exec_start, "_REPORTED_WITHIN_S", 0.5)
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    user = open_exec(call, job_id)
    name = name_of(call)
    assert given(call, name).data == b""
    supervisor.end(job_id)
    error = user.frame()["error"]
    assert error["code"] == "conflict"
    assert f"the attempt of job {job_id} has ended, and its node did not report" in error["message"]
    until(lambda: gone(call, name))


def test_exit_code_comes_also_just_after_the_end_of_the_attempt(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    job_id = call.submit()
    supervisor.run(job_id)
    user = open_exec(call, job_id)
    name = name_of(call)
    supervisor.end(job_id)
    assert printed(call, name, 0, exit_code=137).status_code == 204
    assert user.frame()["exit_code"] == 137


def test_user_who_leaves_is_gone_for_the_node_at_once(call, job_id):
    user = open_exec(call, job_id)
    name = name_of(call)
    found = []
    polling = threading.Thread(
        target=lambda: found.append(call("node:n0", "GET", f"/v1/node/exec/{name}/input?wait_s=3").status_code)
    )
    polling.start()
    user.line.socket.shutdown(socket.SHUT_RDWR)  # without a closing handshake, as if it was killed
    polling.join(timeout=100)
    assert found == [404]
    assert printed(call, name, 0, b"x").status_code == 404


def test_user_who_answers_no_ping_is_gone(call, job_id, head, monkeypatch):
    make = HeadWebSocketProtocol.__init__

    def impatient(protocol, *given, **options):
        make(protocol, *given, **options)
        protocol.ping_interval = protocol.ping_timeout = 0.1

    monkeypatch.setattr(HeadWebSocketProtocol, "__init__", impatient)
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as line:
        line.sendall(handshake(job_id, where.netloc))
        assert line.recv(4096).startswith(b"HTTP/1.1 101 ")
        body = json.dumps({"argv": ["id"]}).encode()
        line.sendall(bytes([0x81, 0x80 | len(body), 0, 0, 0, 0]) + body)  # masked with zeros (RFC 6455, 5.2)
        until(lambda: head.app.state.runtime.sessions.count() == 1)
        name = name_of(call)
        for number in range(16):  # the user reads nothing either
            printed(call, name, number * 65536, b"x" * 65536)
        until(lambda: head.app.state.runtime.sessions.count() == 0)
        assert gone(call, name)


def test_reader_that_lags_slows_the_command(call, job_id, head):
    user = open_exec(call, job_id)
    name, offset, piece = name_of(call), 0, b"x" * 65536
    while offset < head.limits.exec_buffer_bytes:
        assert printed(call, name, offset, piece).status_code == 204
        offset += len(piece)
    held = []
    thread = threading.Thread(target=lambda: held.append(printed(call, name, offset, piece).status_code), daemon=True)
    thread.start()
    user.read(offset)
    assert held == []  # read, but not acknowledged
    user.send({"type": "ack", "offset": 65536})
    thread.join(timeout=100)
    assert held == [204]
    assert len(user.read(offset + 65536)) == offset + 65536


def test_buffer_takes_bytes_once_and_refuses_a_gap():
    pipe = OffsetBuffer()
    assert pipe.append(0, b"abc", 4)
    assert pipe.append(1, b"bcd", 4)
    assert not pipe.append(4, b"e", 4)
    assert pipe.read(2, 10) == b"cd"
    pipe.acknowledge(2)
    assert (pipe.read(0, 10), pipe.base, pipe.end) == (b"cd", 2, 4)
    pipe.acknowledge(1)
    pipe.acknowledge(99)
    assert (pipe.base, pipe.end) == (4, 4)
    with pytest.raises(Conflict):
        pipe.append(6, b"g", 4)


def test_a_session_is_its_supervisors_and_not_of_another_jobs_on_the_same_node(call, job_id):
    """Found by reading: a session was any supervisor's of its node, also that of a seat that an engine brought for another job."""
    user = open_exec(call, job_id)
    seat = Seat(node_id="n0", job_id="99", epoch=1)
    token = {"authorization": f"Bearer {seat_token(attempt_key(SECRET, '99', 1), seat)}"}
    path = f"/v1/node/exec/{name_of(call)}/input"
    assert call("node:n0", "GET", path).status_code == 200
    assert code(call("never issued", "GET", path, headers=token)) == (404, "not_found")
    user.close()


def test_head_that_stops_says_so_to_every_session(tmp_path):
    head = ApiHead(str(tmp_path))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        users = [open_exec(call, job_id) for _ in range(3)]
        printed(call, name_of(call), 0, b"last words")
    assert [user.until("error")["error"]["message"] for user in users] == ["the head stopped"] * 3
    assert users[-1].output == b"last words"
    assert [(user.frame(), user.line.close_code) for user in users] == [(None, 1001)] * 3
    head.close()


class Leadership(Place):
    def has_standby(self):
        return True


def test_head_that_leads_no_more_opens_no_session_and_cuts_the_open_ones(tmp_path):
    head, status = ApiHead(str(tmp_path)), Leadership()
    head.app = build_app(replace(head.parts, leader_status=status))
    with head.calling() as call:
        supervisor = Supervisor(call)
        supervisor.hello()
        job_id = call.submit()
        supervisor.run(job_id)
        user = open_exec(call, job_id)
        status.leading[:] = [False]
        user.send({"type": "signal", "name": "TERM", "odd": 1})  # its answer is not sent
        assert user.frame() is None
        refused = ExecSocket(call.url, job_id, bearer("user")).refused
        assert code(refused) == (503, "not_leading")
        assert refused.json()["error"]["leader"] == "http://a:1"
    head.close()
