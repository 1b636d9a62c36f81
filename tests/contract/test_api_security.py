"""What every request passes: host, origin, tokens, sizes; and the one shape of every refusal."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import http.client
import socket
from typing import get_args
from urllib.parse import urlsplit

import pytest

from phalanx.api.http.routing import AuthorizedRoute
from phalanx.api.http.security import host_name
from phalanx.api.services import ApiLimits
from phalanx.core.state.events import PutToken, PutUser, RevokeToken
from phalanx.core.work.users import User, UserRole
from tests.contract.api_head import ApiHead, Supervisor, bearer, token_of


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = ApiHead(str(tmp_path_factory.mktemp("home")))
    yield head
    head.close()


@pytest.fixture(scope="module")
def call(head):
    with head.calling() as call:
        yield call


def refusal(reply):
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"hint_code", "hint_args"} == {"code", "message", "hint", "retry"}
    assert body["error"]["message"]
    return reply.status_code, body["error"]["code"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:7600", "127.0.0.1@evil.example", "", "[::1].evil"]
)
def test_another_hosts_name_is_refused(call, host):
    assert refusal(call("admin", "GET", "/v1/me", headers={"host": host})) == (403, "not_permitted")


@pytest.mark.parametrize("host", ["127.0.0.1:7600", "LOCALHOST", "[::1]:7600", "localhost:1"])
def test_own_names_are_served_with_any_port(call, host):
    assert call("admin", "GET", "/v1/me", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost.evil.example", "file://", "http://[bad"]
)
def test_pages_of_others_are_refused(call, origin):
    assert refusal(call("admin", "GET", "/v1/me", headers={"origin": origin})) == (403, "not_permitted")


def test_pages_of_this_head_are_served(call):
    assert call("admin", "GET", "/v1/me", headers={"origin": call.url}).status_code == 200


def test_host_with_port_loses_the_port_alone():
    assert [host_name(h) for h in (b"A:1", b"[::1]:80", b"[::1]", b"::1", b"a")] == ["a", "[::1]", "[::1]", "::1", "a"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", (404, "not_found")),
        ("GET", "/v1/nothing", (404, "not_found")),
        ("GET", "/v1/jobs/", (404, "not_found")),
        ("DELETE", "/v1/jobs", (405, "bad_request")),
        ("GET", "/v1/jobs/999", (404, "not_found")),
        ("GET", "/v1/jobs?limit=0", (400, "bad_request")),
        ("GET", "/v1/jobs?state=asleep", (400, "bad_request")),
        ("GET", "/v1/jobs/%00", (404, "not_found")),
        ("GET", "/v1/nodes/n9", (404, "not_found")),
    ],
)
def test_refusals_have_one_shape(call, method, path, expected):
    assert refusal(call("admin", method, path)) == expected


def test_wrong_method_is_told_the_right_ones(call):
    reply = call("admin", "DELETE", "/v1/jobs")
    assert reply.headers["allow"] == "GET, POST"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"run": "a", "run": }'])
def test_odd_bodies_of_a_submit_are_refused(call, body):
    assert refusal(call("user", "POST", "/v1/jobs", content=body))[0] in (400, 422)


def test_a_fault_of_ours_tells_nothing_of_its_inside(head, call, monkeypatch):
    monkeypatch.setattr(head.store, "nodes", lambda: 1 / 0)
    reply = call("admin", "GET", "/v1/nodes")
    assert refusal(reply) == (500, "error")
    assert "division" not in reply.text
    assert "Traceback" not in reply.text


def test_large_job_is_refused_before_it_is_read(call):
    parts = urlsplit(call.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as line:
        line.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: "
            + bearer("user")["authorization"].encode()
            + b"\r\nContent-Length: 10485760\r\n\r\n"
        )
        assert b"413" in line.recv(4096)  # not one byte of the body was sent


def test_large_job_whose_caller_sends_on_still_hears_why(call):
    parts = urlsplit(call.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.request("POST", "/v1/jobs", body=b"x" * (10 << 20), headers=bearer("user"))
    except (BrokenPipeError, ConnectionResetError):
        pass
    try:
        assert connection.getresponse().status == 413
    except ConnectionResetError:
        pytest.skip("the kernel dropped the answer with the connection")
    finally:
        connection.close()


def test_large_body_without_a_length_is_cut_off(call):
    reply = call("user", "POST", "/v1/jobs", content=(b"x" * 65536 for _ in range(32)))
    assert refusal(reply) == (413, "too_large")


def test_size_of_blobs_and_streams_has_bounds_of_its_own(tmp_path):
    head = ApiHead(str(tmp_path), limits=ApiLimits(body_bytes=100, streams_bytes=300, blob_bytes=500))
    with head.calling() as call:
        for role, method, path, size in [
            ("user", "POST", "/v1/jobs", 101),
            ("node:n0", "POST", "/v1/node/streams", 301),
            ("user", "PUT", "/v1/blobs/" + "0" * 64, 501),
        ]:
            assert refusal(call(role, method, path, content=b"x" * size)) == (413, "too_large")
            assert call(role, method, path, content=b"x" * (size - 1)).status_code != 413
    head.close()


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["Bearer", "Bearer  x", "Basic YTpi", "secret-of-ada", "Bearer \xe9", "Bearer phxn.n0.00"]
)
def test_what_is_no_token_is_refused(call, value):
    reply = call(None, "GET", "/v1/me", headers={"authorization": value.encode("latin-1")})
    assert refusal(reply) == (401, "not_signed_in")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_revoked_token_is_out_at_once(head, call):
    token = token_of("ada", "short-lived")
    head.ask(PutToken(token=token))
    assert call("short-lived", "GET", "/v1/me").status_code == 200
    head.ask(RevokeToken(token_id=token.id))
    assert refusal(call("short-lived", "GET", "/v1/me")) == (401, "not_signed_in")


def test_expired_token_is_out_though_nobody_wrote_anything(head, call):
    head.ask(PutToken(token=token_of("ada", "until-soon", expires_s=head.clock.now_s() + 60)))
    assert call("until-soon", "GET", "/v1/me").status_code == 200
    head.clock.ahead_s += 61
    assert refusal(call("until-soon", "GET", "/v1/me")) == (401, "not_signed_in")


def test_disabled_user_is_out_and_a_changed_role_counts_at_once(head, call):
    assert call("other", "POST", "/v1/nodes/n9/drain", {}).status_code == 403
    head.ask(PutUser(user=User(id="bob", role=UserRole.OPERATOR)))
    assert call("other", "POST", "/v1/nodes/n9/drain", {}).status_code == 404
    head.ask(PutUser(user=User(id="bob", role=UserRole.OPERATOR, disabled=True)))
    assert call("other", "GET", "/v1/me").status_code == 401


def test_scoped_token_does_what_it_is_for_and_no_more(head, call):
    head.ask(PutToken(token=token_of("root", "robot", scope=frozenset({"see"}))))
    assert call("robot", "GET", "/v1/jobs").status_code == 200
    reply = call("robot", "POST", "/v1/jobs", {"run": "true"})
    assert refusal(reply) == (403, "not_permitted")
    assert "token for see" in reply.json()["error"]["message"]


def test_a_known_token_is_not_looked_up_again(head, call, monkeypatch):
    assert call("user", "GET", "/v1/me").status_code == 200
    monkeypatch.setattr(head.store, "token", lambda _sha256: pytest.fail("asked the store again"))
    assert call("user", "GET", "/v1/me").status_code == 200


def whole_number_parameters(app):
    """(method, path, parameter) of every whole number in a query."""
    names = {"job_id": "1", "node_id": "n0", "session_name": "none", "month": "2026-08", "sha256": "a" * 64}
    return [
        (method, route.path.format_map(names), param.alias)
        for route in app.router.routes
        if isinstance(route, AuthorizedRoute)
        for method in route.methods
        for param in route.dependant.query_params
        if int in (param.field_info.annotation, *get_args(param.field_info.annotation))
    ]


def test_every_whole_number_in_a_query_is_bounded(head, call):
    found = whole_number_parameters(head.app)
    assert len(found) >= 12
    for method, path, name in found:
        role = "node:n0" if path.startswith("/v1/node/") else "admin"
        for number in (10**24, 2**53 + 1, -1):
            reply = call(role, method, f"{path}?{name}={number}")
            assert (reply.status_code, name) == (400, name), (path, reply.text)
            if path.startswith("/v1/"):  # a page of the dashboard is refused with a page
                assert refusal(reply)[1] == "bad_request"


@pytest.mark.parametrize("path", ["/v1/jobs/{}/steps?rank=", "/v1/jobs/{}/logs?rank="])
def test_rank_of_too_many_digits_is_refused(call, path):
    job_id = call.submit()
    assert refusal(call("user", "GET", path.format(job_id) + "9" * 5000)) == (400, "bad_request")


def test_event_id_of_too_many_digits_is_refused(call):
    reply = call("user", "GET", "/v1/events", headers={"last-event-id": "9" * 5000})
    assert refusal(reply) == (400, "bad_request")


def test_body_that_does_not_arrive_in_time_is_cut(tmp_path):
    slow = ApiHead(str(tmp_path), limits=ApiLimits(body_s=0.05))
    with slow.served() as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=20) as link:
            head_lines = ["POST /v1/jobs HTTP/1.1", f"Host: {where.netloc}", "Content-Length: 100"]
            head_lines += [f"{name}: {value}" for name, value in bearer("user").items()]
            link.sendall("\r\n".join(head_lines).encode() + b"\r\n\r\n{")
            said = b""
            while piece := link.recv(65536):  # until the head closes
                said += piece
    slow.close()
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"try_later"' in said


@pytest.mark.parametrize("beyond", [b"-1\r\n", b"5\r\nhelloworld\r\n0\r\n\r\n", b"0x5\r\nhello\r\n"])
def test_caller_who_spoils_its_connection_leaves_no_page_in_the_log(call, caplog, beyond):
    parts = urlsplit(call.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as line:
        line.sendall(b"GET /v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + beyond)
        assert line.recv(65536).startswith(b"HTTP/1.1 400 ")
        while line.recv(65536):  # until the head closes
            pass
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    "asked", ["bytes=0-1", "bytes=5-1", "lines=1-2", "bytes", "bytes=99999999-", "bytes=" + "0-1," * 500]
)
def test_range_of_an_upload_is_not_read(call, asked):
    data = b"a working directory"
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    assert call("user", "PUT", path, content=data).status_code == 200
    Supervisor(call).hello()
    reply = call("node:n0", "GET", path.replace("/v1/", "/v1/node/"), headers={"range": asked})
    assert (reply.status_code, reply.content) == (200, data)
