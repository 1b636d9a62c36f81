"""What comes to the head's door from browsers, proxies and those who mean no good: refused in our shape, in bounded time and memory."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import asyncio
import json
import logging
import socket
from urllib.parse import urlsplit

import pytest

from phalanx.api.http import timeouts
from phalanx.api.http.server import ApiServer
from phalanx.app.join_service import ListenAddress, bind_socket, parse_listen
from phalanx.core.errors import BadRequest, Conflict
from phalanx.node.logs.log_format import OneLineFormatter
from tests.contract.api_head import ApiHead, bearer


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = ApiHead(str(tmp_path_factory.mktemp("home")))
    yield head
    head.close()


@pytest.fixture(scope="module")
def call(head):
    with head.calling() as call:
        yield call


def raw(call, *pieces, timeout_s=20.0):
    """Everything that is answered to these bytes until the head closes; a hang guard ends the wait."""
    where = urlsplit(call.url)
    said = b""
    with socket.create_connection((where.hostname, where.port), timeout=timeout_s) as link:
        try:
            for piece in pieces:
                link.sendall(piece)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(65536):
                said += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
    return said


def answers(said):
    return [line for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


# ---- browsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE", "odd"])
def test_a_request_that_a_page_of_another_site_made_is_refused(call, site):
    for role in ("admin", None):
        assert call(role, "GET", "/v1/health", headers={"sec-fetch-site": site}).status_code == 403


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_persons_own_request_is_served(call, site):
    assert call("admin", "GET", "/v1/me", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_form_of_a_page_changes_nothing_for_it_carries_no_token(call, kind):
    """A simple request, which no browser asks leave for: cookies, queries and bodies carry no token here."""
    before = call("admin", "GET", "/v1/jobs").json()
    body = b'{"run": "true", "token": "secret-of-root"}'
    headers = {"content-type": kind, "cookie": "token=secret-of-root; authorization=Bearer secret-of-root"}
    for path in ("/v1/jobs", "/v1/jobs?token=secret-of-root&access_token=secret-of-root", "/v1/stop"):
        assert call(None, "POST", path, content=body, headers=headers).status_code == 401
    assert call("admin", "GET", "/v1/jobs").json() == before


def test_no_page_of_another_origin_is_told_that_it_may_read_replies(call):
    asked = {"origin": "http://localhost:1", "access-control-request-method": "POST"}
    reply = call(None, "OPTIONS", "/v1/jobs", headers=asked)
    assert reply.status_code in (401, 403, 405)
    assert [name for name in reply.headers if name.startswith("access-control")] == []


@pytest.mark.parametrize(
    ("role", "path"),
    [("admin", "/v1/me"), (None, "/v1/me"), (None, "/v1/health"), (None, "/nowhere"), ("admin", "/metrics")],
)
def test_every_reply_says_that_it_is_no_page_and_not_to_be_kept(call, role, path):
    reply = call(role, "GET", path)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert "server" not in reply.headers


def test_refusals_at_the_rim_say_so_too(call):
    reply = call("admin", "GET", "/v1/me", headers={"host": "evil.example"})
    assert (reply.status_code, reply.headers["x-content-type-options"]) == (403, "nosniff")


# ---- proxies: where does one request end and the next begin? --------------------------------------------------------------

POST = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HIDDEN = b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "head_lines",
    [
        b"Content-Length: 5\r\nContent-Length: 50\r\n",
        b"Content-Length: 5, 50\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_a_body_whose_end_is_in_doubt_hides_no_second_request(call, head_lines):
    said = raw(call, POST + head_lines + b"\r\n0\r\n\r\n" + HIDDEN)
    assert len(answers(said)) == 1, said
    assert answers(said)[0].split()[1][:1] in (b"4", b"5")
    assert b"head_id" not in said


def test_length_and_chunks_at_once_are_one_request_at_most(call):
    """RFC 9112, 6.3: chunks count, or it is refused; in no case is what follows the chunks part of the body of a next request."""
    said = raw(call, POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert len(answers(said)) == 1, said
    assert answers(said)[0].split()[1] in (b"400", b"401")


def test_a_line_break_in_a_header_is_no_header_of_ours(call):
    for value in (b"x\rAuthorization: Bearer secret-of-root", b"x\x00y", b"x\r\n folded: y"):
        said = raw(call, b"GET /v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Name: " + value + b"\r\n\r\n")
        assert answers(said)[0].split()[1] in (b"400", b"401"), said
    reply = call("admin", "GET", "/v1/jobs/1%0d%0aSet-Cookie:%20a=b/files/archive")
    assert "set-cookie" not in reply.headers


def test_two_hosts_are_none(call):
    said = raw(call, b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
    assert answers(said)[0].split()[1] in (b"400", b"403")
    said = raw(call, b"GET http://evil.example/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert answers(said)[0].split()[1] == b"404"
    said = raw(call, b"GET /v1/health HTTP/1.0\r\n\r\n")
    assert answers(said)[0].split()[1] == b"403"


def test_forwarded_headers_are_nobodys_address(head, call):
    """Who may set them may be anybody: the audit trail names the other end of the connection."""
    call("admin", "PUT", "/v1/queues/fast", {}, headers={"x-forwarded-for": "10.9.9.9", "forwarded": "for=10.9.9.9"})
    assert call("admin", "GET", "/v1/audit").json()["lines"][-1]["origin"] == "127.0.0.1"


# ---- those who take their time ------------------------------------------------------------------------------------------


def test_a_head_without_end_is_cut_off(call):
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    said = raw(call, b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n", *[line] * 40)
    assert said == b"" or answers(said)[0].split()[1] in (b"400", b"431")  # it may be reset before it reads why


def test_who_never_says_what_they_want_is_hung_up_on(call, monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_HEAD_TIMEOUT_S", 0.2)
    where = urlsplit(call.url)
    for beginning in (b"", b"GET /v1/health HT", b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b\r\n"):
        with socket.create_connection((where.hostname, where.port), timeout=20) as link:
            link.sendall(beginning)
            said = b""
            while piece := link.recv(4096):  # a hang here is what the guard of this socket ends
                said += piece
        assert said.startswith(b"HTTP/1.1 408 "), (beginning, said)


def test_who_goes_on_after_an_answer_has_time_anew(call, monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_HEAD_TIMEOUT_S", 2.0)
    where = urlsplit(call.url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as link:
        for _ in range(3):
            link.sendall(HIDDEN)
            said = b""
            while not said.endswith(b"}"):
                said += link.recv(4096)
            assert said.startswith(b"HTTP/1.1 200 ")
        link.sendall(b"GET /v1/he")
        assert link.recv(4096).startswith(b"HTTP/1.1 408 ")


# ---- where a head listens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "localhost", "head.example", ""])
def test_plain_http_is_served_on_loopback_alone_whoever_asks(head, host):
    async def start():
        await ApiServer(head.app, host=host, port=0).startup()

    with pytest.raises(Conflict, match="not on loopback"):
        asyncio.run(start())


def test_a_socket_off_loopback_is_refused_too(head):
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))  # that is what must be refused
        server = ApiServer(head.app)
        with pytest.raises(Conflict, match="not on loopback"):
            asyncio.run(server.startup([everywhere]))


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "::", "[::]", "*", "", "localhost", "127.0.0.1", "[::1]:7600", "0.0.0.0:7600"]
)
def test_no_address_is_no_place_to_listen(text):
    with pytest.raises(BadRequest):
        parse_listen(text, 7600)


@pytest.mark.parametrize("host", ["0", "0x0", "0.0", "00.0.0.0", "::ffff:0.0.0.0", "0:0:0:0:0:0:0:0", "224.0.0.1"])
def test_another_spelling_of_every_address_is_refused_as_well(host):
    with pytest.raises((BadRequest, Conflict)):
        bind_socket(ListenAddress(host=host, port=0)).close()


def test_a_name_that_means_every_address_is_refused(monkeypatch):
    everywhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: everywhere)
    with pytest.raises(BadRequest, match=r"means 0\.0\.0\.0"):
        bind_socket(ListenAddress(host="head.example", port=0))


# ---- the log ------------------------------------------------------------------------------------------------------------


def test_nobody_forges_a_line_of_the_log_by_a_name():
    record = logging.LogRecord(
        "phalanx", logging.INFO, "f", 1, "user %s", ("ada\n2026-01-01 INFO root: all is well\x1b[2J\u202e",), None
    )
    line = OneLineFormatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert "\u202e" not in line
    assert "\\x0a2026" in line


def test_a_traceback_in_the_log_is_marked_as_one():
    try:
        raise ValueError("first\n2026-01-01 00:00:00 INFO root: forged")
    except ValueError as error:
        record = logging.LogRecord(
            "phalanx", logging.ERROR, "f", 1, "failed", (), (type(error), error, error.__traceback__)
        )
    first, *rest = OneLineFormatter().format(record).split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("    | ") for line in rest)
    assert any("forged" in line for line in rest)


def test_an_admins_token_is_in_no_reply(call):
    for path in ("/v1/me", "/v1/tokens", "/v1/users", "/v1/audit", "/v1/overview", "/metrics"):
        assert bearer("admin")["authorization"].split()[1] not in call("admin", "GET", path).text


@pytest.mark.parametrize("late", [False, True])
def test_spoilt_body_of_a_head_request_is_no_fault_of_ours(call, caplog, late):
    host = call.url.removeprefix("http://").encode()
    asked = b"HEAD /v1/jobs HTTP/1.1\r\nHost: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % host
    raw(call, asked, b"-1\r\n") if late else raw(call, asked + b"-1\r\n")
    assert call("user", "GET", "/v1/me").status_code == 200
    assert "Traceback" not in caplog.text
    assert "Fatal error" not in caplog.text


@pytest.mark.parametrize("words", [b"\x00nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nA\x00: b\r\n\r\n"])
def test_what_is_not_http_is_refused_in_json(call, words):
    head, _, body = raw(call, words).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_request"
