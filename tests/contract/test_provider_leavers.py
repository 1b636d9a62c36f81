"""People who leave a group or the provider lose access within the stated time; an outage of the provider ends nothing before it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import asyncio
from functools import partial

import pytest

from phalanx.api.auth.provider_sign_in import CALLS_MAX
from phalanx.api.auth.sign_in_attempts import ATTEMPT_LIFETIME_S
from phalanx.api.runtime import runtime_of_app
from phalanx.core.work.sign_in import OUTAGE_S, RECHECK_S
from tests import oidc_here
from tests.contract.api_head import JOB, code
from tests.contract.provider_bench import (
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


@pytest.fixture(scope="module")
def served():
    with oidc_here.provider() as served:
        yield served


@pytest.fixture
def head(tmp_path):
    with head_with_secret(tmp_path) as head:
        yield head


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


@pytest.fixture
def recheck(head):
    """Lets time pass, and the head do what it does each minute: on a loop of its own, as its own loop is busy with nothing else here."""

    def pass_time(seconds=RECHECK_S + 1):
        head.clock.ahead_s += seconds
        runtime = runtime_of_app(head.app)
        asyncio.run_coroutine_threadsafe(runtime.provider_sign_in.recheck(), runtime._answers.loop).result(60)

    return pass_time


def token_of(browser):
    """A token of the user for the command line."""
    reply = browser.client.post("/v1/tokens", json={}, headers={**cookies(browser), "x-phalanx-csrf": browser.csrf})
    assert reply.status_code == 201, reply.text
    return {"authorization": f"Bearer {reply.json()['secret']}"}


def cookies(browser):
    return {"cookie": "; ".join(f"{name}={value}" for name, value in browser.cookies.items())}


def me(browser, token):
    return browser.client.get("/v1/me", headers=token)


# ---- leavers ----------------------------------------------------------------------------------------------------------


def test_person_who_leaves_a_group_loses_its_project_and_another_role_counts_at_once(head, browser, provider, recheck):
    provider.people[provider.present].groups = ["ml", "ops"]
    sign_in(browser)
    token = token_of(browser)
    assert (me(browser, token).json()["role"], me(browser, token).json()["projects"]) == ("operator", ["nlp"])
    provider.people[provider.present].groups = ["ops"]
    recheck(RECHECK_S - 60)
    assert me(browser, token).json()["projects"] == ["nlp"]  # not yet
    recheck(61)
    assert me(browser, token).json()["projects"] == []
    name = provider.present
    assert ("head", "sign-in recheck", "done", f"user {name} role operator") in audit(head)
    provider.people[name].groups = ["ml"]
    recheck()
    assert browser("GET", "/v1/me").json()["role"] == "user"


def test_person_who_leaves_all_groups_loses_sessions_tokens_and_streams(head, call, browser, provider, recheck):
    sign_in(browser)
    token, name = token_of(browser), provider.present
    ends_s = max(one.expires_s for one in head.store.tokens() if one.user == name)
    assert ends_s - head.clock.now_s() > 89 * 86400.0  # longer than the session that made it
    provider.people[name].groups = ["staff"]
    with browser.client.stream("GET", "/v1/events", headers=token) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": following"
        recheck()
        assert "not_signed_in" in "\n".join(lines)
    refusal = me(browser, token)
    assert code(refusal) == (401, "not_signed_in")
    assert f"no group of {name}" in refusal.json()["error"]["message"]
    assert not browser.signed_in
    assert [line[3] for line in audit(head) if line[2] == "sign_in_lost"] == [
        f"user {name} has lost access: no group of {name} at the sign-in provider gives access here"
    ]
    shown = call("admin", "GET", f"/v1/users/{name}").json()["user"]
    assert "has lost access" in shown["refused"]
    provider.people[name].groups = ["ml"]  # who comes back signs in again; tokens that were not revoked count again
    assert sign_in(browser).status_code == 303
    assert me(browser, token).status_code == 200


def test_person_who_leaves_the_provider_loses_access_by_the_answer_to_the_refresh_token(browser, provider, recheck):
    sign_in(browser)
    token = token_of(browser)
    provider.people[provider.present].left = True
    recheck()
    assert "has ended their sign-in, or they have left (invalid_grant)" in me(browser, token).json()["error"]["message"]
    assert not browser.signed_in


def test_each_check_uses_the_newest_refresh_token_and_only_of_users_with_a_valid_token(
    head, browser, provider, recheck
):
    sign_in(browser)
    for _ in range(3):
        recheck()
    assert browser.signed_in
    asked = [form for form in provider.asked if form["grant_type"] == "refresh_token"]
    assert len({form["refresh_token"] for form in asked}) == len(asked) == 3
    recheck(13 * 3600.0)  # the session has ended, and there is no other token
    assert len([form for form in provider.asked if form["grant_type"] == "refresh_token"]) == 3


def test_another_subject_in_the_answer_to_a_refresh_token_ends_access(browser, provider, recheck):
    sign_in(browser)
    provider.change = lambda claims: {**claims, "sub": "somebody else"}
    recheck()
    assert not browser.signed_in


def test_new_settings_count_for_those_who_are_signed_in_at_the_next_check(browser, setup, recheck):
    sign_in(browser)
    setup(groups=[{"group": "ml", "role": "viewer", "projects": ["nlp"]}])
    assert browser("GET", "/v1/me").json()["role"] == "user"
    recheck(1)
    assert browser("GET", "/v1/me").json()["role"] == "viewer"


def test_role_of_groups_is_not_changed_by_hand_and_a_local_user_depends_on_no_provider(
    call, browser, provider, recheck
):
    sign_in(browser)
    name = provider.present
    assert code(call("admin", "PUT", f"/v1/users/{name}", {"role": "admin"})) == (409, "conflict")
    assert call("admin", "PUT", f"/v1/users/{name}", {"linked": False}).status_code == 200
    provider.people[name].left = True
    recheck()
    assert browser("GET", "/v1/me").json()["projects"] == []


def test_last_local_admin_stays_whatever_the_groups_say(call, browser, provider, setup):
    setup(groups=[{"group": "ml", "role": "admin", "projects": ["nlp"]}])
    sign_in(browser)
    token = token_of(browser)
    demote = partial(browser.client.put, "/v1/users/root", headers=token)
    assert demote(json={"role": "user"}).status_code == 409
    assert demote(json={"linked": True}).status_code == 409


def test_provider_that_is_removed_or_replaced_ends_the_access_of_all_who_signed_in_there(
    call, browser, provider, setup
):
    sign_in(browser)
    setup(issuer="https://another.example", groups=[{"group": "x", "role": "user", "projects": ["nlp"]}])
    assert not browser.signed_in
    setup()
    assert not browser.signed_in  # they sign in again
    sign_in(browser)
    assert call("admin", "PUT", "/v1/projects/nlp", {"members": ["bob"]}).status_code == 200
    assert call("admin", "DELETE", "/v1/sign-in").status_code == 204
    assert not browser.signed_in


def test_linked_user_who_never_signed_in_keeps_access_when_the_provider_is_removed(head, call, setup):
    assert call("admin", "PUT", "/v1/users/ada", {"linked": True}).status_code == 200
    setup(issuer="https://another.example", groups=[{"group": "x", "role": "user", "projects": ["nlp"]}])
    assert call("user", "GET", "/v1/me").status_code == 200
    assert head.store.user("ada").identity.issuer == "https://another.example"
    assert call("admin", "PUT", "/v1/projects/nlp", {"members": ["bob"]}).status_code == 200
    assert call("admin", "DELETE", "/v1/sign-in").status_code == 204
    assert call("user", "GET", "/v1/me").status_code == 200
    assert head.store.user("ada").identity is None


# ---- outages ----------------------------------------------------------------------------------------------------------


def test_outage_ends_access_after_its_stated_time_and_not_before(head, browser, provider, recheck):
    sign_in(browser)
    provider.broken = True
    recheck(OUTAGE_S - 60)
    assert browser.signed_in
    recheck(61)
    assert "has not confirmed it for too long" in browser("GET", "/v1/me").text
    provider.broken = False
    head.clock.ahead_s += 5  # a failed reading of its metadata counts for 3 s
    assert sign_in(browser).status_code == 303


def test_invalid_token_at_a_check_is_an_outage_and_no_statement_about_the_person(browser, provider, recheck):
    sign_in(browser)
    provider.change = lambda claims: {**claims, "exp": claims["iat"] - 100, "groups": []}  # as by a wrong clock
    recheck()
    assert browser.signed_in
    recheck(OUTAGE_S)
    assert not browser.signed_in


def test_person_for_whom_the_provider_always_fails_keeps_no_one_else_from_being_checked(browser, provider, recheck):
    names = []
    for _ in range(CALLS_MAX + 1):  # more than are asked at once
        names.append(provider.add(f"p{len(names)}", "ml").name)
        browser.cookies = {}
        sign_in(browser)
    provider.fails_for = set(names[:CALLS_MAX])
    provider.people[names[-1]].left = True
    recheck()
    recheck(1)  # the first round ended with a group without any answer
    assert not browser.signed_in


def test_person_without_a_refresh_token_signs_in_again_after_that_time(browser, provider, recheck):
    provider.without.add("refresh_tokens")
    sign_in(browser)
    recheck(OUTAGE_S - 60)
    assert browser.signed_in
    recheck(61)
    assert not browser.signed_in


def test_new_key_of_the_provider_is_read(head, browser, provider):
    assert sign_in(browser).status_code == 303
    provider.key = oidc_here.jwk.ECKey.generate_key("P-256", parameters={"kid": "k2"})
    provider.sign = lambda claims: oidc_here.jwt.encode({"alg": "ES256", "kid": "k2"}, claims, provider.key)
    head.clock.ahead_s = 31
    assert sign_in(browser).status_code == 303
    provider.key = oidc_here.jwk.ECKey.generate_key("P-256", parameters={"kid": "k2"})  # another one of the same name
    head.clock.ahead_s = 62
    assert sign_in(browser).status_code == 303


def test_answer_that_comes_too_late_counts_for_nothing(head, browser):
    path = visit(begin(browser))
    head.clock.ahead_s = ATTEMPT_LIFETIME_S + 1
    assert refused(come_back(browser, path), "took too long")


def test_provider_that_is_down_is_named_and_existing_sessions_go_on(head, call, browser, another, provider):
    sign_in(browser)
    path = visit(begin(another))
    provider.broken = True
    assert refused(come_back(another, path), f"provider {provider.issuer} does not answer: 503")
    assert browser.signed_in
    head.clock.ahead_s = 3601  # metadata is read again
    assert refused(another("GET", "/sign-in/provider"), provider.issuer, "does not answer", "an admin can check")
    assert code(call("admin", "POST", "/v1/sign-in/check")) == (503, "try_later")


def test_head_without_a_provider_says_so(call):
    browser = Browser(call.url)
    assert "Sign in with" not in browser("GET", "/").text
    assert browser("GET", "/sign-in/provider").status_code == 404
    assert call("admin", "GET", "/v1/sign-in").json()["issuer"] == ""


def test_project_that_groups_give_is_not_open_and_cannot_become_it_unseen(call, setup):
    assert call("user", "POST", "/v1/jobs", {**JOB, "project": "nlp"}).status_code == 403
    assert code(call("admin", "PUT", "/v1/sign-in", {"groups": []})) == (409, "conflict")
    assert code(call("admin", "DELETE", "/v1/sign-in")) == (409, "conflict")
    assert call("admin", "PUT", "/v1/projects/nlp", {"members": ["bob"]}).status_code == 200
    assert call("admin", "DELETE", "/v1/sign-in").status_code == 204
    assert call("user", "POST", "/v1/jobs", {**JOB, "project": "nlp"}).status_code == 403
