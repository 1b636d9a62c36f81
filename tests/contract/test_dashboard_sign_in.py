"""Browsers sign in by a link that works once or by a token, and every attack on their sessions is refused."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import logging
import re
from http.cookies import SimpleCookie

import httpx
import pytest
from starlette.requests import HTTPConnection
from starlette.responses import Response

from phalanx.api.auth.browser_sessions import CODE_LIFETIME_S, CODES_PER_USER, SESSION_LIFETIME_S, SESSIONS_PER_USER
from phalanx.api.auth.session_cookie import session_secret, set_session_cookie
from phalanx.core.access.node_tokens import node_token
from phalanx.core.state.events import ChangeUser, PutToken, RevokeToken
from phalanx.web.document import CONTENT_SECURITY_POLICY
from tests.contract.api_head import SECRET, TOKENS, code, token_of
from tests.contract.exec_socket import upgraded

HTML = "text/html"


class Browser:
    """Keeps its cookies itself, so that a test can plant them, and sends what browsers send."""

    def __init__(self, url):
        self.url, self.cookies = url, {}
        self.client = httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False)  # loads no CAs: 20 ms

    def __call__(self, method, path, *, form=None, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies:
            sent.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        more = {} if form is None else {"data": form}
        reply = self.client.request(method, path, headers=sent, **more)
        self.client.cookies.clear()
        for one in reply.headers.get_list("set-cookie"):
            for name, morsel in SimpleCookie(one).items():
                self.cookies[name] = morsel.value
                if morsel["max-age"] == "0":
                    del self.cookies[name]
        return reply

    def sign_in(self, token=TOKENS["user"], **form):
        reply = self("POST", "/sign-in", form={"token": token, **form}, origin=self.url)
        assert reply.status_code == 303, reply.text
        return reply

    @property
    def csrf(self):
        found = re.search(r'<meta name="csrf" content="([^"]+)">', self("GET", "/").text)
        assert found is not None
        return found[1]

    @property
    def signed_in(self):
        return self("GET", "/v1/me").status_code == 200


@pytest.fixture
def browser(call):
    return Browser(call.url)


@pytest.fixture
def another(call):
    return Browser(call.url)


def link(call, role="user"):
    reply = call(role, "POST", "/v1/dashboard/link")
    assert reply.status_code == 200, reply.text
    return reply.json()["path"]


# ---- the two ways in --------------------------------------------------------------------------------------------------


def test_without_a_session_the_root_is_the_sign_in_page_and_shows_nothing_of_the_fleet(call, browser):
    reply = browser("GET", "/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(HTML)
    assert 'action="/sign-in"' in reply.text
    assert "<script" not in reply.text
    assert "<nav" not in reply.text


def test_link_signs_one_browser_in_with_the_rights_of_its_token_and_works_once(call, browser, another):
    path = link(call, "viewer")
    reply = browser("GET", path)
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    assert browser("GET", "/v1/me").json()["user"] == "vic"
    assert browser("POST", "/v1/jobs", x_phalanx_csrf=browser.csrf).status_code == 403  # a viewer submits nothing
    again = another("GET", path)
    assert again.status_code == 401
    assert "used already" in again.text
    assert not another.signed_in


def test_link_that_is_too_old_signs_no_one_in(head, call, browser):
    path = link(call)
    head.clock.ahead_s = CODE_LIFETIME_S + 1
    assert browser("GET", path).status_code == 401
    assert not browser.signed_in


def test_link_is_not_used_up_by_a_browser_that_loads_it_in_advance(call, browser):
    path = link(call)
    assert browser("GET", path, sec_purpose="prefetch").status_code == 403
    assert browser("GET", path).status_code == 303


def test_no_part_of_a_link_is_logged(call, browser, caplog):
    caplog.set_level(logging.DEBUG)
    path = link(call)
    browser("GET", path)
    browser("GET", path)
    told = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert not [line for line in told if path.partition("=")[2] in line]


def test_link_of_a_token_that_was_revoked_meanwhile_signs_no_one_in(head, call, browser):
    path = link(call)
    head.ask(RevokeToken(token_id=f"t-ada-{len(TOKENS['user'])}"))
    assert browser("GET", path).status_code == 401


def test_link_carries_no_token_and_only_the_newest_few_of_a_user_are_kept(call, browser):
    paths = [link(call) for _ in range(CODES_PER_USER + 1)]
    assert not any(TOKENS["user"] in path for path in paths)
    assert browser("GET", paths[0]).status_code == 401
    assert browser("GET", paths[1]).status_code == 303


def test_token_in_the_form_signs_in_and_leads_back_to_the_page(browser):
    first = browser("GET", "/jobs")
    assert first.status_code == 401
    assert 'name="next" value="/jobs"' in first.text
    assert browser.sign_in(next="/jobs").headers["location"] == "/jobs"
    assert browser.signed_in


@pytest.mark.parametrize(
    "elsewhere", ["//evil.example", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", "/a\r\nx: y", ""]
)
def test_sign_in_leads_to_no_other_site(browser, elsewhere):
    assert browser.sign_in(next=elsewhere).headers["location"] == "/"


@pytest.mark.parametrize("token", ["", "never issued", "node:n0", "é"])
def test_what_is_no_persons_token_signs_no_one_in(browser, token):
    reply = browser("POST", "/sign-in", form={"token": token}, origin=browser.url)
    assert reply.status_code == 401
    assert not browser.cookies
    assert "never issued" not in reply.text  # what was typed is not shown again


def test_supervisor_signs_in_no_browser(head, browser):
    reply = browser("POST", "/sign-in", form={"token": node_token(SECRET, "n0")}, origin=browser.url)
    assert reply.status_code == 403
    assert not browser.cookies


def test_sign_in_is_in_the_audit_trail(head, browser):
    browser.sign_in()
    assert [(line.user, line.action) for line in head.store.audit(after=None)][-1] == ("ada", "POST /sign-in")


# ---- the cookie -------------------------------------------------------------------------------------------------------


def test_cookie_is_out_of_reach_of_scripts_and_of_other_sites(browser):
    cookie = browser.sign_in().headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert "domain" not in cookie
    assert "secure" not in cookie  # plain HTTP on loopback


@pytest.mark.parametrize(
    ("scheme", "host", "name"),
    [
        ("http", b"127.0.0.1:7600", "phalanx-session-7600"),
        ("http", b"[::1]:7601", "phalanx-session-7601"),
        ("https", b"gpu-a:7600", "__Host-phalanx-session-7600"),
        ("https", b"gpu-a", "__Host-phalanx-session-443"),
    ],
)
def test_cookie_is_of_one_host_and_port_and_secure_over_tls(scheme, host, name):
    connection = HTTPConnection({"type": "http", "scheme": scheme, "headers": [(b"host", host)]})
    response = Response()
    set_session_cookie(response, connection, "secret")
    found, *attributes = response.headers["set-cookie"].split("; ")
    assert found == f"{name}=secret"
    assert ("Secure" in attributes) == (scheme == "https")
    assert not any(attribute.lower().startswith("domain") for attribute in attributes)
    sent = {**connection.scope, "headers": [(b"host", host), (b"cookie", f"a=b; {found}".encode())]}
    assert session_secret(HTTPConnection(sent)) == "secret"


def test_sign_in_makes_a_new_secret_and_ends_the_session_before(browser, another):
    browser.sign_in()
    (name, planted), *_ = browser.cookies.items()
    browser.sign_in(TOKENS["operator"])
    assert browser.cookies[name] != planted
    another.cookies = {name: planted}
    assert not another.signed_in


def test_cookie_that_someone_planted_before_the_sign_in_opens_nothing_after_it(browser, another):
    browser.sign_in()
    name = next(iter(browser.cookies))
    another.cookies = {name: "chosen-by-the-attacker"}
    another.sign_in()
    assert another.cookies[name] != "chosen-by-the-attacker"
    browser.cookies = {name: "chosen-by-the-attacker"}
    assert not browser.signed_in


def test_two_cookies_of_the_name_open_nothing_since_another_port_of_the_host_can_plant_one(browser):
    browser.sign_in()
    name, secret = next(iter(browser.cookies.items()))
    assert browser("GET", "/v1/me", cookie=f"{name}=planted; {name}={secret}").status_code == 401


# ---- the end of a session ---------------------------------------------------------------------------------------------


def test_session_ends_when_its_token_is_revoked(head, browser):
    browser.sign_in()
    head.ask(RevokeToken(token_id=f"t-ada-{len(TOKENS['user'])}"))
    assert not browser.signed_in
    assert 'action="/sign-in"' in browser("GET", "/").text


def test_session_ends_when_its_user_is_disabled(head, browser):
    browser.sign_in()
    head.ask(ChangeUser(user_id="ada", disabled=True, by="root"))
    assert not browser.signed_in


def test_session_ends_with_the_day_and_with_its_token(head, browser, another):
    head.ask(PutToken(token=token_of("ada", "a token of one hour", expires_s=head.clock.now_s() + 3600)))
    browser.sign_in()
    another.sign_in("a token of one hour")
    head.clock.ahead_s = 3601
    assert (browser.signed_in, another.signed_in) == (True, False)
    head.clock.ahead_s = SESSION_LIFETIME_S + 1
    assert not browser.signed_in


def test_sign_out_ends_the_session_and_its_streams(browser):
    browser.sign_in()
    csrf, kept = browser.csrf, dict(browser.cookies)
    header = "; ".join(f"{name}={value}" for name, value in kept.items())
    with browser.client.stream("GET", "/v1/events", headers={"cookie": header}) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": following"
        with httpx.Client(base_url=browser.url, trust_env=False) as second:
            reply = second.post("/sign-out", data={"csrf": csrf}, headers={"cookie": header, "origin": browser.url})
        assert reply.status_code == 303
        assert "max-age=0" in reply.headers["set-cookie"].lower()
        assert "not_signed_in" in "\n".join(lines)
    browser.cookies = kept
    assert not browser.signed_in


def test_scoped_token_has_no_more_rights_in_a_browser(head, browser):
    head.ask(PutToken(token=token_of("root", "admin's token to see", scope=frozenset({"see"}))))
    browser.sign_in("admin's token to see")
    assert browser("GET", "/audit").status_code == 403
    assert browser("PUT", "/v1/users/eve", x_phalanx_csrf=browser.csrf).status_code == 403


def test_a_user_has_only_so_many_sessions(call, browser, another):
    browser.sign_in()
    for _ in range(SESSIONS_PER_USER):
        another.cookies = {}
        another.sign_in()
    assert (browser.signed_in, another.signed_in) == (False, True)


# ---- requests that other sites make -----------------------------------------------------------------------------------


@pytest.mark.parametrize("csrf", [None, "", "guessed", "é"])
def test_change_without_the_sessions_csrf_value_does_nothing(call, browser, csrf):
    job = call.submit()
    browser.sign_in()
    headers = {} if csrf is None else {"x_phalanx_csrf": csrf.encode()}
    assert code(browser("POST", f"/v1/jobs/{job}/cancel", **headers)) == (403, "not_permitted")
    assert call("user", "GET", f"/v1/jobs/{job}").json()["job"]["state"] == "pending"
    assert browser("POST", f"/v1/jobs/{job}/cancel", x_phalanx_csrf=browser.csrf).status_code == 200


def test_csrf_value_of_another_session_counts_for_nothing(call, browser, another):
    job = call.submit()
    browser.sign_in()
    another.sign_in()
    assert browser("POST", f"/v1/jobs/{job}/cancel", x_phalanx_csrf=another.csrf).status_code == 403


def test_sign_out_by_another_page_does_nothing(browser):
    browser.sign_in()
    assert browser("POST", "/sign-out", form={"csrf": "guessed"}).status_code == 403
    assert browser.signed_in


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},  # another port of this host, to which browsers send the cookie
    ],
)
def test_requests_that_other_pages_make_are_refused_with_and_without_a_session(call, browser, headers):
    path = link(call)
    for method, where in (("GET", path), ("POST", "/sign-in"), ("GET", "/"), ("GET", "/v1/me")):
        assert code(browser(method, where, **headers)) == (403, "not_permitted")
    browser.sign_in()
    assert browser("GET", "/v1/jobs", **headers).status_code == 403
    assert browser("GET", path).status_code == 303  # the refused requests have not used it up


def test_cookie_opens_no_websocket(call, browser):
    job = call.submit()
    browser.sign_in(TOKENS["admin"])
    header = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    path = f"/v1/jobs/{job}/exec"
    reply = upgraded(browser.url, path, {"cookie": header, "x-phalanx-csrf": browser.csrf, "origin": browser.url})
    assert code(reply) == (401, "not_signed_in")


def test_pages_may_not_be_framed_and_load_nothing_that_is_inline_or_of_another_site(call, browser):
    job = call.submit()
    browser.sign_in(TOKENS["admin"])
    for path in ("/", "/jobs", f"/jobs/{job}", "/queues", "/nodes", "/audit", "/jobs/nonsense", "/sign-in"):
        reply = browser("GET", path)
        assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY
        assert "unsafe" not in CONTENT_SECURITY_POLICY
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "same-origin"
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?! src=)|https?://", reply.text), path
