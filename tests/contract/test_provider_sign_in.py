"""People sign in at a real provider of OpenID Connect, and every attack on the way there and back is refused."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import base64
import json
import os
from functools import partial
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from phalanx.cli.cluster import doctor
from phalanx.cli.cluster.machine_checks import Severity
from phalanx.client import Client
from phalanx.core.state.events import ChangeUser
from tests import oidc_here
from tests.contract.api_head import JOB, TOKENS, code, until
from tests.contract.provider_bench import (
    GROUPS,
    audit,
    begin,
    come_back,
    fresh,
    head_with_secret,
    refused,
    set_provider,
    sign_in,
    visit,
)
from tests.contract.test_dashboard_sign_in import Browser
from tests.contract.xss_payloads import PAYLOADS


@pytest.fixture(scope="module")
def served():
    with oidc_here.provider() as served:
        yield served


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    with head_with_secret(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.fixture(scope="module")
def call(head):
    with head.calling() as call:
        yield call


@pytest.fixture
def provider(served, head):
    return fresh(served, head)


@pytest.fixture
def setup(call, provider):
    """Sets the provider at the head, with changes."""
    set_provider(call, provider)
    return partial(set_provider, call, provider)


@pytest.fixture
def browser(call, setup):
    return Browser(call.url)


@pytest.fixture
def another(call, setup):
    return Browser(call.url)


# ---- the way in -------------------------------------------------------------------------------------------------------


def test_person_signs_in_with_the_role_and_the_projects_of_their_groups(head, call, browser, provider):
    assert f"Sign in with {urlsplit(provider.issuer).netloc}" in browser("GET", "/").text
    reply = sign_in(browser, "/jobs")
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs")
    me = browser("GET", "/v1/me").json()
    name = provider.present
    assert (me["user"], me["role"], me["projects"], me["admin_of"]) == (name, "user", ["nlp"], [])
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    sent = {"x-phalanx-csrf": browser.csrf, "cookie": cookie}
    assert browser.client.post("/v1/jobs", json={**JOB, "project": "nlp"}, headers=sent).status_code == 201
    line = (name, "GET /sign-in/finish", "done", f"user {name} role user projects nlp")
    assert line in audit(head)


def test_browser_is_led_to_the_provider_with_pkce_state_and_nonce_and_a_cookie_that_only_the_head_reads(browser):
    reply = browser("GET", "/sign-in/provider")
    asked = {name: values[0] for name, values in parse_qs(urlsplit(reply.headers["location"]).query).items()}
    assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
    assert len(asked["code_challenge"]) == len(asked["nonce"]) == 43
    assert asked["scope"] == "openid profile groups offline_access"
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert asked["state"] not in cookie
    assert asked["nonce"] not in cookie


def test_groups_come_from_the_userinfo_endpoint_where_the_token_lacks_them(browser, provider):
    provider.groups_in_userinfo = True
    assert sign_in(browser).status_code == 303
    assert browser("GET", "/v1/me").json()["projects"] == ["nlp"]


def test_person_whose_groups_give_nothing_is_refused_by_name_and_no_user_is_made(head, browser, provider):
    provider.add("eve", "staff")
    assert refused(sign_in(browser), "no group of eve", "gives access")
    assert head.store.user("eve") is None
    until(lambda: audit(head)[-1][:3] == ("unknown", "GET /sign-in/finish", "not_permitted"))
    assert "eve" in audit(head)[-1][3]


def test_highest_role_counts_and_everyone_has_that_of_the_star(browser, provider, setup):
    setup(groups=[{"group": "*", "role": "viewer"}, *GROUPS])
    provider.add("otto", "ml", "ops", "leads")
    sign_in(browser)
    me = browser("GET", "/v1/me").json()
    assert (me["role"], me["admin_of"]) == ("operator", ["nlp"])
    provider.add("vera")
    sign_in(browser)
    assert browser("GET", "/v1/me").json()["role"] == "viewer"


# ---- names ------------------------------------------------------------------------------------------------------------


def test_name_of_a_local_user_is_not_taken_over_until_an_admin_links_it(call, browser, provider):
    provider.add("bob", "ml")
    assert refused(sign_in(browser), "user bob exists already", "ask an admin to link user bob")
    assert call("admin", "PUT", "/v1/users/bob", {"linked": True}).status_code == 200
    assert call("other", "GET", "/v1/me").json()["role"] == "user"  # until they sign in, nothing changes
    assert sign_in(browser).status_code == 303
    assert browser("GET", "/v1/me").json()["projects"] == ["nlp"]


def test_another_person_who_takes_the_name_of_one_is_refused(browser, another, provider):
    sign_in(browser)
    provider.change = lambda claims: {**claims, "sub": "somebody else"}
    assert refused(sign_in(another), f"user {provider.present} exists already")


def test_person_whom_the_provider_renames_stays_the_same_user(browser, provider):
    sign_in(browser)
    provider.change = lambda claims: {**claims, "preferred_username": "renamed"}
    assert sign_in(browser).status_code == 303
    assert browser("GET", "/v1/me").json()["user"] == provider.present


def test_reserved_names_sign_no_one_in(browser, provider):
    for name in ("root", "head"):
        provider.change = lambda claims, name=name: {**claims, "preferred_username": name}
        assert refused(sign_in(browser), name)


def test_scripts_in_names_of_claims_are_text_and_no_user(browser, provider):
    for payload in PAYLOADS[::5]:
        provider.change = lambda claims, payload=payload: {**claims, "preferred_username": payload, "groups": [payload]}
        reply = sign_in(browser)
        assert reply.status_code == 403
        assert payload not in reply.text or "<" not in payload
        assert "<script" not in reply.text


def test_address_that_the_provider_has_not_verified_is_no_name(browser, provider, setup):
    setup(user_claim="email")
    for verified, status in ((False, 403), ("false", 403), (True, 303)):
        more = {"email": f"{provider.present}@example.org", "email_verified": verified}
        provider.change = lambda claims, more=more: {**claims, **more}
        assert sign_in(browser).status_code == status


def test_project_says_which_groups_give_it(call, browser, setup):
    assert call("user", "GET", "/v1/projects/nlp").json()["project"]["groups"] == ["leads", "ml"]
    browser.sign_in()
    assert "group leads, ml" in browser("GET", "/settings").text


def test_disabled_user_is_refused(head, browser, provider):
    sign_in(browser)
    head.ask(ChangeUser(user_id=provider.present, disabled=True, by="root"))
    assert refused(sign_in(browser), f"user {provider.present} is disabled")


# ---- forged tokens ----------------------------------------------------------------------------------------------------


def unsigned(claims):
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in parts) + "."


FOREIGN = oidc_here.jwk.ECKey.generate_key("P-256", parameters={"kid": "k1"})
FORGED = {
    "wrong audience": {"change": lambda claims: {**claims, "aud": "another client"}},
    "another audience besides": {"change": lambda claims: {**claims, "aud": ["phalanx", "another"], "azp": "another"}},
    "wrong issuer": {"change": lambda claims: {**claims, "iss": "http://localhost:1"}},
    "expired": {"change": lambda claims: {**claims, "exp": claims["iat"] - 100}},
    "of the future": {"change": lambda claims: {**claims, "iat": claims["iat"] + 1000}},
    "without an end": {"change": lambda claims: {name: claims[name] for name in claims if name != "exp"}},
    "without a subject": {"change": lambda claims: {name: claims[name] for name in claims if name != "sub"}},
    "missing nonce": {"change": lambda claims: {name: claims[name] for name in claims if name != "nonce"}},
    "another nonce": {"change": lambda claims: {**claims, "nonce": "of another sign-in"}},
    "alg none": {"sign": unsigned},
    "foreign key": {"sign": lambda claims: oidc_here.jwt.encode({"alg": "ES256", "kid": "k1"}, claims, FOREIGN)},
    "unknown key": {"sign": lambda claims: oidc_here.jwt.encode({"alg": "ES256", "kid": "k9"}, claims, FOREIGN)},
    "HMAC with the client's secret": {
        "sign": lambda claims: oidc_here.jwt.encode(
            {"alg": "HS256"}, claims, oidc_here.jwk.OctKey.import_key(oidc_here.CLIENT_SECRET)
        )
    },
    "no token": {"sign": lambda _: "x"},
}


def test_forged_id_tokens_sign_no_one_in(head, browser, provider):
    for what, lie in FORGED.items():
        provider.change, provider.sign = lie.get("change"), lie.get("sign")
        assert refused(sign_in(browser), "ID token of the sign-in provider is not valid"), what
    assert head.store.user(provider.present) is None
    assert not browser.signed_in


def test_userinfo_of_another_person_is_refused(browser, provider):
    provider.groups_in_userinfo = True
    provider.change = lambda claims: {**claims, "sub": "somebody else"}
    assert refused(sign_in(browser), "speaks of another person")


# ---- the way back -----------------------------------------------------------------------------------------------------


def test_answer_counts_once(browser, provider):
    path = visit(begin(browser))
    kept = dict(browser.cookies)
    assert come_back(browser, path).status_code == 303
    browser.cookies = kept  # the head has cleared it
    assert refused(come_back(browser, path), "used already")


def test_code_counts_once_also_with_another_state(browser, provider):
    first, second = visit(begin(browser)), None
    code_of = parse_qs(urlsplit(first).query)["code"][0]
    assert come_back(browser, first).status_code == 303
    second = urlsplit(visit(begin(browser)))
    replayed = {**{name: values[0] for name, values in parse_qs(second.query).items()}, "code": code_of}
    assert refused(come_back(browser, f"{second.path}?{urlencode(replayed)}"), "refused: invalid_grant")


def test_answer_to_another_browser_counts_for_nothing(browser, another):
    path = visit(begin(browser))
    assert refused(come_back(another, path), "begun no sign-in")  # an attacker sends their own answer to a victim
    begin(another)
    assert refused(come_back(another, path), "belongs to another sign-in")
    assert not another.signed_in


def test_state_that_the_head_has_not_made_counts_for_nothing(browser):
    for state in ("", "x", "0.0.0", "é", "a" * 300, "zz.zz.zz"):
        begin(browser)
        assert refused(come_back(browser, f"/sign-in/return?{urlencode({'code': 'x', 'state': state})}"))


def test_answer_of_another_provider_counts_for_nothing(browser, provider):
    parts = urlsplit(visit(begin(browser)))
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert refused(come_back(browser, f"{parts.path}?{urlencode({**query, 'iss': 'https://evil.example'})}"), "another")
    parts = urlsplit(visit(begin(browser)))
    query = {name: values[0] for name, values in parse_qs(parts.query).items() if name != "iss"}
    assert refused(come_back(browser, f"{parts.path}?{urlencode(query)}"), "another sign-in provider")


def test_refusal_of_the_provider_is_shown_by_its_word_only(browser, provider):
    provider.refuses = "access_denied"
    assert refused(sign_in(browser), "refused: access_denied")
    begin(browser)
    reply = browser("GET", "/sign-in/finish?error=<script>alert(1)</script>&state=x")
    assert "<script" not in reply.text


def test_sign_in_makes_a_new_session_and_ends_the_one_before(browser, another, call):
    browser.sign_in()
    name, planted = next(iter(browser.cookies.items()))
    sign_in(browser)
    assert browser.cookies[name] != planted
    another.cookies = {name: planted}
    assert not another.signed_in
    first = browser.cookies[name]
    sign_in(browser)
    assert browser.cookies[name] != first
    browser.cookies = {name: first}
    assert not browser.signed_in


def test_sign_in_leads_to_no_other_site(browser):
    for elsewhere in ("//evil.example", "https://evil.example/", "/\\evil.example", "javascript:x", "/a\r\nx: y"):
        assert sign_in(browser, elsewhere).headers["location"] == "/"


def test_page_of_the_way_back_has_no_effect_and_leads_to_this_head_only(browser):
    path = visit(begin(browser))
    reply = browser("GET", f"{path}&url=https://evil.example&next=//evil.example")
    assert "evil" not in reply.text
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in reply.text
    assert come_back(browser, path).status_code == 303  # the answer was not used up


def test_other_sites_cannot_begin_or_end_a_sign_in(browser):
    for path in ("/sign-in/provider", "/sign-in/finish?code=x&state=y"):
        for site in ("cross-site", "same-site"):
            assert code(browser("GET", path, sec_fetch_site=site)) == (403, "not_permitted")
    assert browser("POST", "/sign-in/return", sec_fetch_site="cross-site").status_code in (403, 405)


def test_sign_out_by_another_page_does_nothing_and_by_its_own_ends_the_session(browser):
    sign_in(browser)
    assert browser("POST", "/sign-out", form={"csrf": "guessed"}, origin=browser.url).status_code == 403
    assert browser.signed_in
    assert browser("POST", "/sign-out", form={"csrf": browser.csrf}, origin=browser.url).status_code == 303
    assert not browser.signed_in


def test_head_with_several_addresses_signs_people_in_at_each(call, browser, provider, setup):
    there = call.url.replace("127.0.0.1", "localhost")
    setup(url=f"{call.url},{there}")
    provider.redirects.add(f"{there}/sign-in/return")
    for url in (there, call.url):
        other = Browser(url)
        assert sign_in(other).status_code == 303
        assert other.signed_in


def test_head_under_another_name_says_where_people_sign_in(call, browser):
    other = Browser(call.url.replace("127.0.0.1", "localhost"))
    assert f"open <code>{call.url}</code>" in other("GET", "/").text
    reply = other("GET", "/sign-in/provider")
    assert reply.status_code == 403
    assert call.url in reply.text


def test_nothing_secret_is_in_the_records_or_the_audit_trail(head, browser, provider):
    path = visit(begin(browser))
    come_back(browser, path)
    told = repr((audit(head), head.store.users(), head.store.tokens(), browser("GET", "/v1/users").text))
    for secret in (*provider.refresh_tokens, *provider.access_tokens, *provider.codes, oidc_here.CLIENT_SECRET):
        assert secret not in told


# ---- the provider is down, or not set up ------------------------------------------------------------------------------


def test_check_names_what_is_wrong(head, call, provider, setup):
    found = call("admin", "POST", "/v1/sign-in/check").json()
    assert (found["keys"], found["scopes"][0]) == (1, "openid")
    os.chmod(f"{head.home}/secrets/oidc", 0o644)
    assert "chmod 600" in call("admin", "POST", "/v1/sign-in/check").text
    os.chmod(f"{head.home}/secrets/oidc", 0o600)
    setup(secret_file="missing")
    assert "missing" in call("admin", "POST", "/v1/sign-in/check").text
    setup(issuer=f"{provider.issuer}/")
    assert "calls itself" in call("admin", "POST", "/v1/sign-in/check").text
    setup()
    for odd, words in (("huge", "over 1024 KiB"), ("elsewhere", "redirects"), ("no JSON", "sent something unreadable")):
        provider.odd = odd
        assert words in call("admin", "POST", "/v1/sign-in/check").text
    provider.odd = ""
    provider.without.add("token_endpoint")
    reply = call("admin", "POST", "/v1/sign-in/check")
    assert reply.status_code == 200, reply.text
    browser = Browser(call.url)
    assert refused(sign_in(browser), "no usable token_endpoint")


def test_doctor_says_whether_the_provider_answers_and_asks_only_as_an_admin(call, provider, setup):
    def said(role):
        with Client(call.url, TOKENS[role]) as client:
            return [(one.level, one.says) for one in doctor._sign_in(client)]

    assert said("user") == []
    assert said("admin") == [(Severity.OK, f"the provider {provider.issuer} answers")]
    provider.broken = True
    ((level, says),) = said("admin")
    assert (level, "does not answer" in says) == (Severity.WARN, True)


SETTINGS_REFUSED = [
    {"issuer": "http://id.example.org"},
    {"issuer": "https://user:pw@id.example.org"},
    {"issuer": ""},
    {"url": "https://elsewhere.example"},
    {"url": "http://127.0.0.1:7600/path"},
    {"secret_file": "../node_secret"},
    {"secret_file": "/etc/passwd"},
    {"groups": [{"group": "*", "role": "admin"}]},
    {"groups": [{"group": "g", "role": "node"}]},
    {"groups": [{"group": "g"}]},
    {"groups": [{"group": "g", "role": "user"}, {"group": "g", "role": "viewer"}]},
    {"scopes": ["profile"]},
    {"recheck_s": 1.0},
    {"outage_s": 1e9},
    {"client_id": "a\nb"},
]


def test_settings_that_cannot_work_are_refused(call, setup):
    for changes in SETTINGS_REFUSED:
        assert code(call("admin", "PUT", "/v1/sign-in", changes)) == (400, "bad_request"), changes
