"""Web programs of jobs: who opens them, what a program and a browser see of each other, and that no request harms the head."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import contextlib
import hashlib
import json
import os
import re
import socket
from html import unescape
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.api.auth.program_access import TICKET_LIFETIME_S, TICKETS_PER_SESSION, ProgramAccess
from phalanx.api.live import exec_start
from phalanx.core.errors import NotSignedIn
from phalanx.core.state.events import PutToken, RevokeToken
from tests.contract import web_program
from tests.contract.api_head import TOKENS, ApiHead, Clock, bearer, code, token_of
from tests.contract.exec_socket import upgraded
from tests.contract.relay_node import RelayNode
from tests.contract.test_dashboard_sign_in import Browser

PAGE = {"accept": "text/html", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
SCRIPT = {"sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}


CLIENT = httpx.Client(timeout=60, trust_env=False, verify=False)  # loads no CAs: 20 ms


def get(url, *, headers):
    return CLIENT.get(url, headers=headers)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = ApiHead(str(tmp_path_factory.mktemp("head")), programs="")
    yield head
    head.close()


@pytest.fixture(scope="module")
def call(head):
    with head.calling() as call:
        yield call


@pytest.fixture(scope="module")
def node(call):
    with RelayNode(call) as node:
        yield node


@pytest.fixture(scope="module")
def port():
    with web_program.running() as port:
        yield port


@pytest.fixture(scope="module")
def job(call, node):
    job_id = call.submit(gpus=1, ports={"web": 8888})
    node.run(job_id)
    return job_id


def origin_of(head):
    return f"http://127.0.0.1:{head.parts.programs.port}"


def at_programs(head, browser):
    """The same browser at the origin of programs: it sends its cookies to every port of the host."""
    there = Browser(origin_of(head))
    there.cookies = browser.cookies
    return there


def lead(text):
    return unescape(re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', text)[1])


def entered(head, call, path, token=TOKENS["user"]):
    """A browser that was signed in, and led to a program by the head: it at the origin of programs, and the path where it is."""
    browser = Browser(call.url)
    browser.sign_in(token)
    reply = browser("GET", path, sec_fetch_site="none", **PAGE)
    assert reply.status_code == 200, reply.text
    ticket = lead(reply.text)
    there = at_programs(head, browser)
    assert ticket.startswith(f"{there.url}{path.partition('?')[0].split('lab')[0]}.phalanx/open?ticket=")
    opened = there("GET", ticket.removeprefix(there.url), sec_fetch_site="same-site", **PAGE)
    assert opened.status_code == 200, opened.text
    return there, lead(opened.text)


# ---- the way in -------------------------------------------------------------------------------------------------------


def test_browser_is_led_to_another_origin_and_sees_the_program_there(head, call, job, port):
    path = f"/j/{job}/{port}/lab/x.ipynb?a=1&b=%22"
    there, led = entered(head, call, path)
    assert led == path
    reply = there("GET", led, sec_fetch_site="same-origin", **PAGE)
    told = reply.json()
    assert (reply.status_code, told["path"]) == (200, "/lab/x.ipynb?a=1&b=%22")
    sent = dict(told["headers"])
    assert sent["host"] == f"127.0.0.1:{port}"
    assert sent["x-forwarded-prefix"] == f"/j/{job}/{port}"
    assert "cookie" not in sent
    assert not any(secret in reply.text for secret in there.cookies.values())


def test_signed_out_browser_is_sent_to_the_sign_in_page_and_comes_back(call, job, port):
    for path in (f"/j/{job}/{port}/", f"/j/{job}/{port}/lab"):
        browser = Browser(call.url)
        reply = browser("GET", path, sec_fetch_site="none", **PAGE)
        assert reply.status_code == 401
        assert f'name="next" value="{path}"' in reply.text
        assert browser.sign_in(next=path).headers["location"] == path


def test_a_ticket_opens_one_program_in_one_browser_once_within_a_minute(head, call, job, port):
    browser = Browser(call.url)
    browser.sign_in()
    there = at_programs(head, browser)

    def ticket():
        return lead(browser("GET", f"/j/{job}/{port}/", **PAGE).text).removeprefix(there.url)

    path = ticket()
    stranger = at_programs(head, Browser(call.url))
    assert stranger("GET", path, **PAGE).status_code == 401  # used up by that, and not for this browser
    assert there("GET", path, **PAGE).status_code == 401
    other = ticket().replace(f"/{port}/", "/80/")
    assert there("GET", other, **PAGE).status_code == 401
    path = ticket()
    assert there("GET", path, sec_purpose="prefetch", **PAGE).status_code == 403
    assert there("GET", path, **PAGE).status_code == 200
    assert there("GET", path, **PAGE).status_code == 401


def test_a_ticket_ends_after_a_minute_and_a_session_has_few():
    clock = Clock()
    access = ProgramAccess(clock)
    session = BrowserSession(key="k", user="ada", token_sha256="", csrf="", ends_s=1e12)
    ticket = access.make_ticket(session, "/j/1/80/", "/j/1/80/lab")
    clock.ahead_s = TICKET_LIFETIME_S + 1
    with pytest.raises(NotSignedIn):
        access.take_ticket(ticket, "/j/1/80/")
    tickets = [access.make_ticket(session, "/j/1/80/", "/j/1/80/lab") for _ in range(TICKETS_PER_SESSION + 1)]
    with pytest.raises(NotSignedIn):
        access.take_ticket(tickets[0], "/j/1/80/")
    assert access.take_ticket(tickets[1], "/j/1/80/") == ("k", "/j/1/80/lab")


def test_a_link_of_another_site_only_asks(head, call, job, port):
    browser, path = Browser(call.url), f"/j/{job}/{port}/terminals/new?x=<b>"
    browser.sign_in()
    for site in ("cross-site", "same-site"):
        reply = browser("GET", path, sec_fetch_site=site, **PAGE)
        assert "Open it" in reply.text
        assert "http-equiv" not in reply.text
        assert "<b>" not in reply.text
        assert browser("GET", path, sec_fetch_site=site, **SCRIPT).status_code == 403
        assert (
            browser("GET", path, sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe").status_code
            == 403
        )
    there, _ = entered(head, call, f"/j/{job}/{port}/")
    for site in ("cross-site", "same-site"):
        reply = there("GET", path, sec_fetch_site=site, **PAGE)
        assert (reply.status_code, "Open it at the head" in reply.text) == (401, True)
        assert call.url + path.split("?", maxsplit=1)[0] in reply.text


def test_sign_out_and_a_revoked_session_end_the_program_too(head, call, job, port):
    there, path = entered(head, call, f"/j/{job}/{port}/")
    assert there("GET", path).status_code == 200
    at_head = Browser(call.url)
    at_head.cookies = there.cookies
    kept = dict(there.cookies)
    at_head("POST", "/sign-out", form={"csrf": at_head.csrf}, origin=call.url)
    there.cookies = kept
    assert there("GET", path).status_code == 401
    assert code(there("GET", path)) == (401, "not_signed_in")


def test_addresses_that_lead_nowhere_are_told(head, call, job, port):
    there, _ = entered(head, call, f"/j/{job}/{port}/")
    assert there("GET", f"/j/{job}/{port}", sec_fetch_site="none", **PAGE).headers["location"] == f"/j/{job}/{port}/"
    for path in (
        "/",
        "/j/",
        f"/j/{job}/",
        f"/j/{job}/0/",
        f"/j/{job}/65536/",
        "/j/x/80/",
        "/j/1.x/80/",
        "/v1/jobs",
        "/jobs",
        "/sign-in",
    ):
        assert code(there("GET", path)) == (404, "not_found"), path
    assert code(there("GET", f"/j/99/{port}/")) == (404, "not_found")
    assert code(there("GET", f"/j/{job}.1/{port}/")) == (400, "bad_request")
    waits = call.submit(gpus=1, hold=True)
    reply = there("GET", f"/j/{waits}/{port}/", **PAGE)
    assert reply.status_code == 409
    assert f"job {waits} is pending" in reply.text
    assert 'http-equiv="refresh" content="5"' in reply.text, "it may start soon"
    assert call("user", "POST", f"/v1/jobs/{waits}/cancel").status_code == 200
    ended = there("GET", f"/j/{waits}/{port}/", **PAGE)
    assert (ended.status_code, "refresh" in ended.text) == (409, False), "it will not start again"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    reply = there("GET", f"/j/{job}/{closed}/", **PAGE)
    assert reply.status_code == 503
    assert f"nothing listens on port {closed} of job {job} yet" in reply.text
    assert 'http-equiv="refresh" content="2"' in reply.text
    assert code(there("GET", f"/j/{job}/{closed}/")) == (503, "try_later")


def test_a_head_without_programs_says_what_else_reaches_the_port(tmp_path):
    head = ApiHead(str(tmp_path))
    with head.calling() as call:
        job_id = call.submit()
        reply = call("user", "GET", f"/j/{job_id}/8888/")
        assert reply.status_code == 409
        assert f"phalanx port-forward {job_id} 8888" in unescape(reply.text)
    head.close()


# ---- others, and their rights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["viewer", "other"])
def test_foreign_users_are_refused_everywhere(head, call, job, port, role):
    path = f"/j/{job}/{port}/"
    browser = Browser(call.url)
    browser.sign_in(TOKENS[role])
    there = at_programs(head, browser)
    assert browser("GET", path, **PAGE).status_code == 403
    assert there("GET", path).status_code == 403
    for url in (call.url, there.url):
        assert get(url + path, headers=bearer(role)).status_code == 403
        assert upgraded(url, path, {**bearer(role)}).status_code == 403
    cookie = "; ".join(f"{name}={value}" for name, value in there.cookies.items())
    assert upgraded(there.url, path, {"cookie": cookie}).status_code == 403
    assert head.store.audit(after=0, limit=1000)[-1].result == "not_permitted"


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_operators_reach_it_by_token_but_their_browsers_run_no_code_of_others_beside_their_own(
    head, call, job, port, role
):
    path = f"/j/{job}/{port}/"
    assert get(call.url + path, headers=bearer(role)).status_code == 200
    browser = Browser(call.url)
    browser.sign_in(TOKENS[role])
    reply = at_programs(head, browser)("GET", path)
    assert code(reply) == (403, "not_permitted")
    assert reply.json()["error"]["hint_code"] == "forward-port"


def test_a_token_opens_it_at_both_origins_and_the_program_never_gets_it(call, head, job, port):
    for url in (call.url, origin_of(head)):
        reply = get(f"{url}/j/{job}/{port}/x", headers=bearer("user"))
        assert reply.json()["path"] == "/x"
        assert TOKENS["user"] not in reply.text
    with web_program.echoing() as echo:
        line = upgraded(call.url, f"/j/{job}/{echo}/", bearer("user"))
        assert TOKENS["user"] not in line.recv()
        line.close()


def test_the_right_is_checked_again_while_a_socket_is_open(head, call, job, caplog):
    token = token_of("ada", "a token that is revoked while it is used")
    head.ask(PutToken(token=token))
    with web_program.echoing() as echo:
        line = upgraded(call.url, f"/j/{job}/{echo}/", bearer("a token that is revoked while it is used"))
        line.recv()
        head.ask(RevokeToken(token_id=token.id))
        with pytest.raises(ConnectionClosed):
            line.recv(20)
        assert line.close_code == 1011
    assert not [one for one in caplog.records if one.exc_info and one.name.startswith(("phalanx", "uvicorn"))]


def test_an_open_socket_ends_with_the_attempt_although_its_node_reports_nothing(call, node, port, monkeypatch):
    """Found by stopping a node: the page of a notebook stayed connected to nothing."""
    monkeypatch.setattr(exec_start, "_REPORTED_WITHIN_S", 0.5)
    job_id = call.submit(gpus=1)
    node.run(job_id)
    with web_program.echoing() as echo:
        line = upgraded(call.url, f"/j/{job_id}/{echo}/", bearer("user"))
        line.recv()
        node.end(job_id, ranks=1)
        with pytest.raises(ConnectionClosed):
            line.recv(20)
        assert (line.close_code, "its job or its node stopped" in line.close_reason) == (1011, True)


def test_opening_is_in_the_audit_trail_once(head, call, node, job, port):
    for _ in range(3):
        assert get(f"{call.url}/j/{job}/{port}/", headers=bearer("user")).status_code == 200
    lines = [
        one
        for one in head.store.audit(after=0, limit=1000)
        if one.action == "GET /j/{address}" and one.result == "done"
    ]
    assert [(one.detail) for one in lines if one.user == "ada" and f"job {job} " in one.detail] == [
        f"job {job} of ada node n0 port {port}"
    ]
    assert len([one for one in node.opened if one.job_id == job]) == len({one.user for one in lines})


# ---- what a page of a program can do ----------------------------------------------------------------------------------


def test_scripts_of_a_program_reach_nothing_of_the_head(head, call, job, port):
    there, _ = entered(head, call, f"/j/{job}/{port}/")
    at_head = Browser(call.url)
    at_head.cookies = there.cookies  # browsers send them to all ports of a host, and a script can ask for that
    assert at_head.signed_in
    csrf = at_head.csrf
    for path in ("/v1/me", "/v1/jobs", "/", "/jobs", f"/j/{job}/{port}/"):
        for more in (
            {"sec_fetch_site": "same-site"},
            {"origin": there.url},
            {"sec_fetch_site": "same-site", "origin": there.url},
        ):
            reply = at_head("GET", path, **SCRIPT, **more)
            assert reply.status_code == 403, (path, more)
            assert "access-control-allow-origin" not in reply.headers
            assert csrf not in reply.text
        assert (
            at_head(
                "GET", path, sec_fetch_site="same-site", sec_fetch_mode="navigate", sec_fetch_dest="iframe"
            ).status_code
            == 403
        )
    for path in ("/", "/jobs", "/v1/me"):
        assert at_head("GET", path, sec_fetch_site="same-site", **PAGE).status_code == 403
    reply = at_head("POST", "/v1/jobs/1/cancel", x_phalanx_csrf=csrf, sec_fetch_site="same-site", origin=there.url)
    assert reply.status_code == 403
    assert there("GET", "/v1/me").status_code == 404  # its own origin has no API


def test_requests_of_other_origins_do_not_reach_a_program(head, call, job, port):
    there, path = entered(head, call, f"/j/{job}/{port}/")
    cookie = "; ".join(f"{name}={value}" for name, value in there.cookies.items())
    for origin in (call.url, "http://evil.example", "null", f"http://localhost:{head.parts.programs.port}"):
        assert there("GET", path, origin=origin).status_code == 403, origin
        assert there("POST", path, origin=origin).status_code == 403, origin
        assert upgraded(there.url, path, {"cookie": cookie, "origin": origin}).status_code == 403, origin
    for site in ("cross-site", "same-site"):
        assert there("GET", path, sec_fetch_site=site, **SCRIPT).status_code == 403
        assert there("POST", path, sec_fetch_site=site, **PAGE).status_code == 403
    with web_program.echoing() as echo:
        line = upgraded(there.url, f"/j/{job}/{echo}/", {"cookie": cookie, "origin": there.url})
        sent = json.loads(line.recv())
        assert ["origin", f"http://127.0.0.1:{echo}"] in sent
        assert not any(name == "cookie" for name, _ in sent)
        line.close()


def test_a_planted_session_cookie_opens_nothing(head, call, job, port):
    there, path = entered(head, call, f"/j/{job}/{port}/")
    mine = dict(there.cookies)
    there.cookies = {**mine, "phalanx-session-1": "of nobody"}
    assert there("GET", path).status_code == 200
    attacker = Browser(call.url)
    attacker.sign_in(TOKENS["other"])
    there.cookies = {**mine, "phalanx-session-1": next(iter(attacker.cookies.values()))}
    assert there("GET", path).status_code == 401


def test_headers_that_act_on_the_host_do_not_come_back(head, call, job, port):
    there, path = entered(head, call, f"/j/{job}/{port}/")
    names = (
        "Clear-Site-Data",
        "Strict-Transport-Security",
        "Service-Worker-Allowed",
        "Alt-Svc",
        "NEL",
        "Report-To",
        "Referrer-Policy",
    )
    reply = there("GET", f"{path}headers?" + "&".join(f"{name}=unsafe-url" for name in names))
    assert {name: reply.headers.get(name) for name in names} == {
        **dict.fromkeys(names),
        "Service-Worker-Allowed": path,
        "Referrer-Policy": "same-origin",
    }


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("a=1;%20Path=/;%20HttpOnly", "a=1; Path=/j/JOB/PORT/; HttpOnly"),
        ("a=1;%20Path=/lab;%20Domain=example.org", "a=1; Path=/j/JOB/PORT/lab"),
        ("a=1", "a=1"),
        ("a=1;%20path=x", "a=1; Path=/j/JOB/PORT/"),
        ("phalanx-session-80=x;%20Path=/", None),
        ("__Host-phalanx-session-443=x;%20Path=/;%20Secure", None),
    ],
)
def test_cookies_of_a_program_stay_at_its_path(head, call, job, port, given, seen):
    reply = get(f"{call.url}/j/{job}/{port}/headers?Set-Cookie={given}", headers=bearer("user"))
    wanted = None if seen is None else seen.replace("JOB", job).replace("PORT", str(port))
    assert reply.headers.get("set-cookie") == wanted


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("/login?next=/x", "/j/JOB/PORT/login?next=/x"),
        ("http://127.0.0.1:PORT/a?b", "/j/JOB/PORT/a?b"),
        ("http://localhost:PORT", "/j/JOB/PORT/"),
        ("tree", "tree"),
        ("https://example.org/x", "https://example.org/x"),
        ("//example.org/x", "//example.org/x"),
        ("http://127.0.0.1:1/x", "http://127.0.0.1:1/x"),
        ("http://[", "/j/JOB/PORT/"),
    ],
)
def test_redirects_of_a_program_stay_at_its_path(call, job, port, given, seen):
    given, seen = (text.replace("JOB", job).replace("PORT", str(port)) for text in (given, seen))
    reply = get(f"{call.url}/j/{job}/{port}/moved?{given}", headers=bearer("user"))
    assert (reply.status_code, reply.headers["location"]) == (302, seen)


def test_a_program_that_is_told_its_base_path_gets_it(head, call, node, port):
    job_id = call.submit(gpus=1, ports=[f"{port}:keep-path"])
    node.run(job_id)
    there, path = entered(head, call, f"/j/{job_id}/{port}/")
    sent = there("GET", f"{path}lab", referer=f"{there.url}{path}tree").json()
    assert sent["path"] == f"/j/{job_id}/{port}/lab"
    assert dict(sent["headers"])["referer"] == f"http://127.0.0.1:{port}/j/{job_id}/{port}/tree"
    reply = there("GET", f"/j/{job_id}/{port}/lab", referer=f"{there.url}/j/9/9/")
    assert reply.status_code == 200


# ---- names of their own -----------------------------------------------------------------------------------------------


def test_programs_with_names_of_their_own_share_no_origin(tmp_path, port):
    head = ApiHead(str(tmp_path), programs="apps.test")
    with head.calling() as call, RelayNode(call) as node:
        job_id = call.submit(gpus=1)
        node.run(job_id)
        host = f"{job_id}-p{port}.apps.test:{head.parts.programs.port}"
        operator = Browser(call.url)
        operator.sign_in(TOKENS["operator"])  # others than the owner may open it: it shares no origin
        url = lead(operator("GET", f"/j/{job_id}/{port}/lab?x=1", sec_fetch_site="none", **PAGE).text)
        assert urlsplit(url).netloc == host
        there = Browser(origin_of(head))
        assert there("GET", "/", host=host).status_code == 401
        opened = there("GET", url.removeprefix(f"http://{host}"), host=host, sec_fetch_site="cross-site", **PAGE)
        assert lead(opened.text) == "/lab?x=1"
        assert list(there.cookies) == [f"phalanx-program-{head.parts.programs.port}"]
        sent = there("GET", "/lab?x=1", host=host, sec_fetch_site="same-origin", origin=f"http://{host}").json()
        assert sent["path"] == "/lab?x=1"
        assert "cookie" not in dict(sent["headers"])
        assert (
            there("GET", "/", host=host.replace(str(port), "80")).status_code == 401
        )  # the cookie is for this program
        assert there("GET", "/", host=host, sec_fetch_site="same-site", **SCRIPT).status_code == 403
        for name in ("127.0.0.1", "apps.test", "x.apps.test", f"a.{host}"):
            assert there("GET", "/", host=name).status_code in (403, 404), name
    head.close()


# ---- bytes ------------------------------------------------------------------------------------------------------------


def test_bodies_pass_unchanged_in_both_directions(call, job, port):
    url, body = f"{call.url}/j/{job}/{port}", os.urandom(1_500_000)
    with httpx.Client(headers=bearer("user"), timeout=60, trust_env=False, verify=False) as client:
        for method in ("POST", "PUT", "PATCH"):
            assert client.request(method, f"{url}/", content=b"abc").text == hashlib.sha256(b"abc").hexdigest()
        assert client.post(f"{url}/", content=body).text == hashlib.sha256(body).hexdigest()
        assert client.post(f"{url}/", content=iter([body[:10], body[10:]])).text == hashlib.sha256(body).hexdigest()
        assert len(client.get(f"{url}/big?2000000").content) == 2_000_000
        assert client.head(f"{url}/x").headers["content-length"] != "0"
        assert client.get(f"{url}/none").status_code == 304
        assert client.delete(f"{url}/x").json()["method"] == "DELETE"
        assert client.options(f"{url}/x").json()["method"] == "OPTIONS"


def test_a_download_that_is_not_read_stops_no_other_request_and_ends_with_its_browser(head, call, job, port):
    with socket.create_connection(("127.0.0.1", urlsplit(call.url).port)) as line:
        line.sendall(
            f"GET /j/{job}/{port}/big?2000000000 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['user']}\r\n\r\n".encode()
        )
        assert line.recv(1)
        for _ in range(3):
            assert get(f"{call.url}/j/{job}/{port}/x", headers=bearer("user")).status_code == 200


def test_sockets_carry_messages_subprotocols_and_the_end(call, job):
    with web_program.echoing(subprotocols=["v2", "v1"]) as port:
        line = upgraded(call.url, f"/j/{job}/{port}/", bearer("user"), subprotocols=["v1", "v3"], max_size=None)
        assert line.subprotocol == "v1"
        line.recv()
        for message in ("text", b"\x00\xff", "", "x" * 1_200_000, os.urandom(1_200_000)):
            line.send(message)
            assert line.recv() == message
        line.send("leave")
        with contextlib.suppress(Exception):
            line.recv(20)
        assert (line.close_code, line.close_reason) == (4001, "gone")


def test_a_program_that_is_no_socket_refuses_as_it_does(call, job, port):
    assert upgraded(call.url, f"/j/{job}/{port}/x", bearer("user")).status_code == 200
    assert upgraded(call.url, f"/j/{job}/{port}/bad/nothing", bearer("user")).status_code == 502
    assert upgraded(call.url, f"/j/{job}/{port}/bad/upgrade", bearer("user")).status_code == 502
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    assert upgraded(call.url, f"/j/{job}/{closed}/", bearer("user")).status_code == 503


@pytest.mark.parametrize("path", web_program.BAD)
def test_bad_answers_of_a_program_are_its_own(call, job, port, path):
    url = f"{call.url}/j/{job}/{port}"
    if path in (
        "/bad/short",
        "/bad/chunks",
    ):  # the head of the answer is sent already: the browser sees that it is cut off
        with pytest.raises(httpx.RemoteProtocolError):
            get(url + path, headers=bearer("user"))
    else:
        reply = get(url + path, headers=bearer("user"))
        assert code(reply) == (502, "program_failed")
    assert get(f"{url}/x", headers=bearer("user")).status_code == 200


HOSTILE = [
    "GET /j/{job}/{port}/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n{auth}\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{auth}\r\n",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\n\r\n",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Content-Length: -1\r\n\r\n",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "POST /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "GET /j/{job}/{port}/\x00 HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/a b HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/%00%0d%0aX:1 HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/../../../v1/jobs HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/%2e%2e/%2e%2e/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}%2f{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET //j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/?%ff\xff HTTP/1.1\r\n{host}{auth}\r\n",
    "GET http://evil/j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET http://127.0.0.1/j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "CONNECT 127.0.0.1:22 HTTP/1.1\r\n{host}{auth}\r\n",
    "TRACE /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "BREW /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Connection: close, authorization, host\r\nX: 1\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Range: bytes=0-1,{many}\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}X: {many}{many}{many}{many}\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}X\x0b: 1\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}X : 1\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth} folded: 1\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}X: a\rb\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Origin: http://evil\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}{auth}\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Cookie: phalanx-session-1=\xff; =; ;;\r\n\r\n",
    "GET /j/{job}/{port}/ HTTP/1.1\r\n{host}{auth}Referer: http://[::\r\n\r\n",
    "GET /j/{job}.999999/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/999999999999999999_999999999/{port}/ HTTP/1.1\r\n{host}{auth}\r\n",
    "GET /j/{job}/{port}/.phalanx/open?ticket=%00%ff HTTP/1.1\r\n{host}Cookie: phalanx-session-1=x\r\n\r\n",
    "GET /.phalanx/web/../../etc/passwd HTTP/1.1\r\n{host}\r\n",
    "GET /j/{job}/{port}/ HTTP/2.0\r\n{host}{auth}\r\n",
    "\x16\x03\x01\x02\x00\x01\x00",
]


def test_hostile_requests_get_no_error_of_the_head_and_the_program_no_second_request(head, call, job, port):
    words = {"job": job, "port": port, "host": "Host: 127.0.0.1\r\n", "many": "1-2," * 4500}
    words["auth"] = f"Authorization: Bearer {TOKENS['user']}\r\n"
    assert len(HOSTILE) >= 40
    for at in (urlsplit(call.url).port, head.parts.programs.port):
        for request in HOSTILE:
            with socket.create_connection(("127.0.0.1", at), timeout=20) as line:
                line.sendall(request.format(**words).encode("latin-1"))
                line.shutdown(socket.SHUT_WR)
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while data := line.recv(1 << 16):
                        answer += data
            status = answer.split(b" ")[1] if answer.startswith(b"HTTP/1.1 ") else b""
            assert not status.startswith(b"5"), (request, answer[:300])
            assert answer.count(b"HTTP/1.1 ") <= 1 or b"400 Bad Request" in answer, (request, answer)
    assert not any("evil" in path for path in web_program.Program.seen)
