"""Nobody makes themself more than they are; nobody who lost a right keeps a stream, a session or a token that needs it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import math
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from phalanx.api.app import build_app
from phalanx.controller.driver import ControllerDriver
from phalanx.core.errors import Conflict, NotPermitted, NotSignedIn
from phalanx.core.ids import TokenId
from phalanx.core.state.events import (
    ChangeProject,
    ChangeUser,
    PutProject,
    PutToken,
    PutUser,
    RecordTokenUse,
    RevokeToken,
)
from phalanx.core.work.queue import Project
from phalanx.core.work.users import User, UserRole
from phalanx.ports.store import JobFilter
from tests.contract.api_head import JOB, TOKENS, ApiHead, Supervisor, bearer, code, token_of, until
from tests.contract.exec_socket import ExecSocket, open_exec

DAY_S = 86400.0


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


def made(call, role, **body):
    reply = call(role, "POST", "/v1/tokens", body)
    assert reply.status_code == 201, reply.text
    return reply.json()


# ---- nobody raises themself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["viewer", "user", "other", "operator"])
def test_nobody_but_an_admin_changes_a_role_not_even_their_own(head, call, role):
    me = call(role, "GET", "/v1/me").json()["user"]
    for user in (me, "root", "new"):
        for body in ({"role": "admin"}, {"role": "operator"}, {"disabled": False}, {}):
            assert code(call(role, "PUT", f"/v1/users/{user}", body)) == (403, "not_permitted")
    assert head.store.user(me).role == me_role(role)


def me_role(role):
    return {"viewer": "viewer", "user": "user", "other": "user", "operator": "operator"}[role]


@pytest.mark.parametrize("role", ["viewer", "user", "operator"])
def test_nobody_but_an_admin_makes_a_token_of_another_or_a_project_or_a_join_line(call, role):
    assert call(role, "POST", "/v1/tokens", {"user": "root"}).status_code == 403
    assert call(role, "PUT", "/v1/projects/mine", {"members": ["root"]}).status_code == 403
    assert call(role, "PUT", "/v1/projects/default", {"admins": ["ada", "vic", "opal"]}).status_code == 403
    assert call(role, "GET", "/v1/join").status_code == 403
    assert call(role, "POST", "/v1/join", {"node_id": "h1"}).status_code == 403


def test_a_supervisor_is_no_user(call):
    for method, path in [
        ("GET", "/v1/me"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs"),
        ("PUT", "/v1/users/n0"),
        ("POST", "/v1/tokens"),
    ]:
        assert call("node:n0", method, path, {}).status_code == 403


def test_a_token_is_never_wider_or_longer_lived_than_the_one_that_made_it(head, call):
    narrow = made(call, "admin", scope=["see", "own_tokens"], expires="1h")["secret"]
    for wider in (["administer"], ["see", "operate"], ["submit"]):
        assert call(narrow, "POST", "/v1/tokens", {"scope": wider}).status_code == 403
    grandchild = made(call, narrow, expires="30d")["token"]
    assert set(grandchild["scope"]) == {"see", "own_tokens"}
    assert grandchild["expires_s"] <= head.clock.now_s() + 3600
    assert call(narrow, "PUT", "/v1/users/ada", {"role": "admin"}).status_code == 403


@pytest.mark.parametrize("scope", [["node"], ["everything"], "see", [None]])
def test_a_scope_that_is_none_is_refused(call, scope):
    assert call("admin", "POST", "/v1/tokens", {"scope": scope}).status_code == 400


def test_a_job_goes_by_its_token_whatever_its_body_says(call):
    for more in ({"user": "root"}, {"owner": "root"}, {"role": "admin"}):
        assert call("user", "POST", "/v1/jobs", {**JOB, **more}).status_code == 422  # no such key
    reply = call("user", "POST", "/v1/jobs", JOB)
    assert reply.json()["job"]["user"] == "ada"


def test_another_projects_quota_is_not_for_the_asking(head, call):
    head.ask(PutProject(project=Project(id="secret", members=frozenset({"bob"}))))
    assert code(call("user", "POST", "/v1/jobs", {**JOB, "project": "secret"})) == (403, "not_permitted")
    assert call("other", "POST", "/v1/jobs", {**JOB, "project": "secret"}).status_code == 201


# ---- an admin of a project ------------------------------------------------------------------------------------------------


@pytest.fixture
def nlp(head):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada", "bob"}), admins=frozenset({"ada"}))))
    return "/v1/projects/nlp"


def test_the_admin_of_a_project_says_who_its_members_are(head, call, nlp):
    assert call("user", "PUT", nlp, {"members": ["ada", "bob", "vic"]}).json()["project"]["members"] == [
        "ada",
        "bob",
        "vic",
    ]
    assert call("other", "PUT", nlp, {"members": ["bob"]}).status_code == 403
    assert call("operator", "PUT", nlp, {"members": ["opal"]}).status_code == 403
    assert call("admin", "PUT", nlp, {"admins": ["bob"]}).status_code == 200
    assert call("user", "PUT", nlp, {"members": ["ada"]}).status_code == 403  # an admin of it no longer


def test_the_admin_of_a_project_makes_no_other_admin_and_does_not_open_it_to_all(head, call, nlp):
    assert code(call("user", "PUT", nlp, {"admins": ["ada", "bob"]})) == (403, "not_permitted")
    assert code(call("user", "PUT", nlp, {"members": [], "admins": ["ada"]})) == (400, "bad_request")
    assert call("user", "PUT", "/v1/projects/other", {"members": ["ada"]}).status_code == 403
    (project,) = [one for one in head.store.projects() if one.id == "nlp"]
    assert (project.members, project.admins) == ({"ada", "bob"}, {"ada"})


def test_a_viewer_who_is_named_admin_of_a_project_stays_a_viewer(head, call):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}), admins=frozenset({"vic"}))))
    assert call("viewer", "PUT", "/v1/projects/nlp", {"members": ["ada", "vic"]}).status_code == 403
    job_id = call.submit(project="nlp")
    assert call("viewer", "POST", f"/v1/jobs/{job_id}/cancel", {}).status_code == 403


def test_whoever_was_admin_when_asking_and_is_no_longer_is_refused_by_the_controller(head):
    """Between the gate and the loop the project may have changed hands."""
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}))))
    late = head.driver.request(
        ChangeProject(project_id="nlp", by="ada", as_admin=False, members=frozenset({"ada", "bob"}))
    )
    with pytest.raises(Exception, match="not an admin of project nlp"):
        late.result(100)


# ---- the last admin -------------------------------------------------------------------------------------------------------


def test_two_admins_cannot_demote_each_other_at_once(head, call):
    head.ask(PutUser(user=User(id="eve", role=UserRole.ADMIN)))
    head.ask(PutToken(token=token_of("eve", "secret-of-eve-the-admin")))
    answers = []

    def demote(role, whom):
        answers.append(call(role, "PUT", f"/v1/users/{whom}", {"role": "user"}).status_code)

    pair = [
        threading.Thread(target=demote, args=one) for one in (("admin", "eve"), ("secret-of-eve-the-admin", "root"))
    ]
    for one in pair:
        one.start()
    for one in pair:
        one.join(timeout=100)
    admins = [user.id for user in head.store.users() if user.role is UserRole.ADMIN and not user.disabled]
    assert len(admins) == 1
    assert sorted(answers) in ([200, 401], [200, 403], [200, 409])


@pytest.mark.parametrize("submission", [{"role": UserRole.USER}, {"disabled": True}])
def test_the_last_admin_stays_whoever_asks(head, submission):
    with pytest.raises(Conflict, match="root is the last admin"):
        head.ask(ChangeUser(user_id="root", **submission))
    with pytest.raises(Conflict):
        head.ask(PutUser(user=User(id="root", role=UserRole.VIEWER)))
    assert head.store.user("root").role is UserRole.ADMIN


def test_a_change_of_role_does_not_bring_a_disabled_user_back(head, call):
    """Each call changes what it names; the rest is as the loop has it, not as the caller last read it."""
    call("admin", "PUT", "/v1/users/ada", {"disabled": True})
    call("admin", "PUT", "/v1/users/ada", {"role": "operator"})
    assert head.store.user("ada") == replace(head.store.user("ada"), role=UserRole.OPERATOR, disabled=True)


# ---- tokens ---------------------------------------------------------------------------------------------------------------


def test_a_token_has_256_bits_and_is_kept_as_its_hash(head, call):
    secrets = [made(call, "user")["secret"] for _ in range(20)]
    assert {len(one) for one in secrets} == {43}  # 32 bytes in base64url
    assert len(set(secrets)) == 20
    text = repr(head.store._tables)
    assert not any(one in text for one in secrets)


def test_a_token_ends_after_90_days_unless_told_otherwise(head, call):
    now_s = head.clock.now_s()
    assert made(call, "user")["token"]["expires_s"] == pytest.approx(now_s + 90 * DAY_S, abs=60)
    assert made(call, "user", expires="2d")["token"]["expires_s"] == pytest.approx(now_s + 2 * DAY_S, abs=60)
    assert made(call, "user", expires="never")["token"]["expires_s"] is None


def test_no_token_lives_longer_than_the_operator_allows(tmp_path):
    head = ApiHead(str(tmp_path))
    head.parts = replace(head.parts, token_lifetime_max_s=7 * DAY_S)
    head.app = build_app(head.parts)
    with head.calling() as call:
        now_s = head.clock.now_s()
        assert made(call, "admin")["token"]["expires_s"] == pytest.approx(now_s + 7 * DAY_S, abs=60)
        for longer in ("8d", "never"):
            assert code(call("admin", "POST", "/v1/tokens", {"expires": longer})) == (400, "bad_request")
    head.close()


def test_tokens_tell_when_they_were_used_and_what_made_them(head, call):
    first = made(call, "user")
    second = made(call, first["secret"])
    shown = {one["id"]: one for one in call("user", "GET", "/v1/tokens").json()["tokens"]}
    assert shown[second["token"]["id"]]["made_by"] == first["token"]["id"]
    assert shown[first["token"]["id"]]["used_s"] == pytest.approx(head.clock.now_s(), abs=60)
    assert shown[second["token"]["id"]]["used_s"] is None


def test_the_last_use_outlives_the_head_and_brings_no_revoked_token_back(head, call):
    token = made(call, "user")["token"]["id"]
    call("user", "DELETE", f"/v1/tokens/{token}")
    head.ask(RecordTokenUse(used_s={TokenId(token): 5e9, TokenId("gone"): 5e9}))
    (kept,) = [one for one in head.store.tokens() if one.id == token]
    assert (kept.used_s, kept.revoked_s is not None) == (5e9, True)


def test_a_stolen_token_is_ended_with_all_that_were_made_with_it(call):
    stolen = made(call, "user")
    child = made(call, stolen["secret"])
    grandchild = made(call, child["secret"])
    assert call("user", "DELETE", f"/v1/tokens/{stolen['token']['id']}?made_too=true").status_code == 204
    for one in (stolen, child, grandchild):
        assert call(one["secret"], "GET", "/v1/me").status_code == 401
    assert call("user", "GET", "/v1/me").status_code == 200


def test_a_token_that_made_another_may_be_replaced_by_it(call):
    """Rotation: make the new one with the old, then end the old."""
    old = made(call, "user")
    new = made(call, old["secret"])
    assert call(new["secret"], "DELETE", f"/v1/tokens/{old['token']['id']}").status_code == 204
    assert call(new["secret"], "GET", "/v1/me").status_code == 200


# ---- what is open when a right ends -----------------------------------------------------------------------------------------


class Follower(threading.Thread):
    """Follows a stream until the head ends it."""

    def __init__(self, call, secret, path):
        super().__init__(daemon=True)
        self.url, self.headers, self.heard, self.ended = call.url + path, bearer(secret), b"", threading.Event()
        self.start()
        until(lambda: self.heard)

    def run(self):
        with httpx.stream("GET", self.url, headers=self.headers, timeout=30, trust_env=False) as reply:
            for piece in reply.iter_raw():
                self.heard += piece
        self.ended.set()

    def is_shown_out(self, why):
        return self.ended.wait(100) and why in self.heard.rpartition(b"event: error")[2]


@pytest.fixture
def job_id(head, call):
    supervisor = Supervisor(call)
    supervisor.hello()
    head.driver.leases.grant_long(3600.0, math.inf)  # nobody renews here
    supervisor.lease()
    job_id = call.submit()
    until(lambda: head.store.attempts(job_id))
    supervisor.run(job_id)
    until(lambda: head.store.attempts(job_id)[-1].state == "running")
    return job_id


@pytest.mark.parametrize("path", ["/v1/jobs/{}/logs?follow=1", "/v1/jobs/{}/events", "/v1/events"])
def test_streams_end_when_their_token_is_revoked(call, job_id, path):
    token = made(call, "user")
    following = Follower(call, token["secret"], path.format(job_id))
    other = Follower(call, "user", path.format(job_id))
    call("user", "DELETE", f"/v1/tokens/{token['token']['id']}")
    assert following.is_shown_out(b"expired or revoked")
    assert not other.ended.is_set()


def test_streams_end_when_their_user_is_disabled_or_made_less(head, call, job_id):
    following, operator = (
        Follower(call, "user", f"/v1/jobs/{job_id}/logs?follow=1"),
        Follower(call, "operator", f"/v1/jobs/{job_id}/logs?follow=1"),
    )
    call("admin", "PUT", "/v1/users/opal", {"role": "user"})
    assert operator.is_shown_out(b"belongs to ada")
    assert not following.ended.is_set()
    call("admin", "PUT", "/v1/users/ada", {"disabled": True})
    assert following.is_shown_out(b"is disabled")


def test_streams_end_with_their_token_though_nobody_wrote_anything(head, call, job_id):
    token = made(call, "user", expires="1h")
    following = Follower(call, token["secret"], "/v1/events")
    head.clock.ahead_s += 3601
    assert following.is_shown_out(b"expired or revoked")


def test_exec_sessions_end_when_their_user_may_no_longer(head, call, job_id):
    theirs, own = open_exec(call, job_id, "operator"), open_exec(call, job_id)
    by_user = {session.user: name for name, session in head.app.state.runtime.sessions._open.items()}
    assert call("node:n0", "GET", f"/v1/node/exec/{by_user['opal']}/input").status_code == 200
    call("admin", "PUT", "/v1/users/opal", {"role": "user"})
    assert theirs.error() == ("not_permitted", 1008)
    until(
        lambda: call("node:n0", "GET", f"/v1/node/exec/{by_user['opal']}/input").status_code == 404
    )  # its command is hung up on
    assert call("node:n0", "GET", f"/v1/node/exec/{by_user['ada']}/input").status_code == 200
    own.close()


def test_exec_sessions_end_with_their_token(head, call, job_id):
    tokens = [made(call, "user", expires="1h"), made(call, "user")]
    expires, revoked = [open_exec(call, job_id, token["secret"]) for token in tokens]
    call("user", "DELETE", f"/v1/tokens/{tokens[1]['token']['id']}")
    assert revoked.error() == ("not_signed_in", 1008)
    head.clock.ahead_s += 3601
    assert expires.error() == ("not_signed_in", 1008)


def test_no_exec_session_opens_for_who_lost_the_right_while_the_trail_was_written(head, call, job_id, monkeypatch):
    note = ControllerDriver.record_call

    def noting(driver, told):
        head.ask(ChangeUser(user_id="opal", role=UserRole.USER))
        return note(driver, told)

    monkeypatch.setattr(ControllerDriver, "record_call", noting)
    refused = ExecSocket(call.url, job_id, bearer("operator"), {"argv": ["sh"]})
    assert refused.error() == ("not_permitted", 1008)
    assert head.app.state.runtime.sessions.count() == 0


def test_upkeep_writes_down_uses_once_in_a_while(head, call):
    call("user", "GET", "/v1/me")
    gate = head.app.state.runtime.authenticator
    used = gate.take_unrecorded_uses()
    assert set(used) >= {"t-ada-13"}
    call("user", "GET", "/v1/me")
    assert gate.take_unrecorded_uses() == {}  # within five minutes it is the same
    head.clock.ahead_s += 301
    call("user", "GET", "/v1/me")
    assert set(gate.take_unrecorded_uses()) == {"t-ada-13"}


# ---- what comes long after its head ---------------------------------------------------------------------------------------


def held_back(head, secret, token_id, meanwhile, body):
    """A body whose second half is sent only after `meanwhile`, which happens once the gate has judged its head."""
    seen = head.app.state.runtime.authenticator._used

    def halves():
        yield body[:1]
        until(lambda: token_id in seen)
        meanwhile()
        yield body[1:]

    return {"headers": bearer(secret), "content": halves()}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/tokens", b"{}"),
        ("POST", "/v1/jobs", b'{"run": ["true"], "workdir": "/tmp"}'),
        ("PUT", "/v1/users/mole", b'{"role": "admin"}'),
        ("PUT", "/v1/projects/mole", b'{"members": ["root"]}'),
        ("PUT", "/v1/queues/mole", b"{}"),
        ("PUT", f"/v1/blobs/{hashlib.sha256(b'abc').hexdigest()}", b"abc"),
    ],
)
def test_a_body_that_comes_after_its_token_was_revoked_changes_nothing(head, call, method, path, body):
    """Found by reading: the gate judged when the head of a request came, and its body had 30 s for which nobody judged again."""
    stolen = made(call, "admin")
    token_id = stolen["token"]["id"]
    late = held_back(
        head, stolen["secret"], token_id, lambda: head.ask(RevokeToken(token_id=token_id, with_derived=True)), body
    )
    assert code(call.client.request(method, path, **late)) == (401, "not_signed_in")
    assert not [token for token in head.store.tokens() if token.made_by == token_id]
    assert "mole" not in {one.id for one in (*head.store.users(), *head.store.projects(), *head.store.queues())}
    assert head.store.jobs(JobFilter()) == []
    assert not (Path(head.home) / "blobs" / path.rpartition("/")[2][:2] / path.rpartition("/")[2]).exists()


def test_an_admin_who_was_made_less_does_not_undo_it_by_a_body_that_comes_late(head, call):
    """Found by reading: as above; the half-sent request made the demoted admin one again."""
    head.ask(PutUser(user=User(id="eve", role=UserRole.ADMIN)))
    head.ask(PutToken(token=token_of("eve", "secret-of-eve-the-admin")))
    token_id = token_of("eve", "secret-of-eve-the-admin").id
    late = held_back(
        head,
        "secret-of-eve-the-admin",
        token_id,
        lambda: head.ask(ChangeUser(user_id="eve", role=UserRole.USER, by="root")),
        b'{"role": "admin"}',
    )
    assert code(call.client.request("PUT", "/v1/users/eve", **late)) == (403, "not_permitted")
    assert head.store.user("eve").role is UserRole.USER


def test_what_a_caller_may_is_judged_by_who_they_are_when_their_body_is_here(head, call):
    """Found by reading: routes took their caller before the body, with the rights of that moment. An operator may cancel any job; a user not."""
    job = call.submit("user")
    token_id = token_of("opal", TOKENS["operator"]).id
    late = held_back(
        head, "operator", token_id, lambda: head.ask(ChangeUser(user_id="opal", role=UserRole.USER)), b"{}"
    )
    assert code(call.client.request("POST", f"/v1/jobs/{job}/cancel", **late)) == (403, "not_permitted")
    assert not head.store.job(job).state.terminal


def child(maker, user="ada"):
    return PutToken(token=replace(token_of(user, "a-child-that-came-too-late"), made_by=maker))


def test_a_token_is_not_made_with_one_whose_revocation_waits_before_it(head):
    """Found by reading: the controller kept whatever token came, so that a revocation heard a moment earlier missed it."""
    maker = token_of("ada", TOKENS["user"]).id
    revoked, late = head.driver.request(RevokeToken(token_id=maker)), head.driver.request(child(maker))
    revoked.result(100)
    with pytest.raises(NotSignedIn, match="revoked"):
        late.result(100)
    assert child(maker).token not in head.store.tokens()


def test_a_token_is_not_made_by_a_user_who_is_disabled_or_by_a_former_admin_for_another(head):
    maker = token_of("opal", TOKENS["operator"]).id
    with pytest.raises(NotPermitted, match="opal is not an admin"):
        head.ask(child(maker, "root"))
    head.ask(ChangeUser(user_id="opal", disabled=True))
    with pytest.raises(NotSignedIn, match="opal is disabled"):
        head.ask(child(maker, "opal"))
    assert head.ask(child(None, "root"))  # the head's own


def test_who_is_no_admin_any_more_changes_nobody_and_no_project_as_one(head):
    """Found by reading: of two requests that wait, the second was judged with the rights from before the first."""
    head.ask(PutUser(user=User(id="eve", role=UserRole.ADMIN)))
    first = head.driver.request(ChangeUser(user_id="eve", role=UserRole.USER, by="root"))
    second = head.driver.request(ChangeUser(user_id="eve", role=UserRole.ADMIN, by="eve"))
    third = head.driver.request(ChangeProject(project_id="nlp", by="eve", as_admin=True, admins=frozenset({"eve"})))
    first.result(100)
    for late in (second, third):
        with pytest.raises(NotPermitted, match="eve is not an admin"):
            late.result(100)
    assert head.store.user("eve").role is UserRole.USER


@pytest.mark.parametrize("path", ["/v1/jobs/{}/events", "/v1/events"])
def test_an_open_stream_tells_no_more_than_its_follower_may_read_now(head, call, job_id, path):
    """Found by reading: a stream told everything with the rights that its follower had when it was opened."""
    head.ask(ChangeProject(project_id="default", by="root", as_admin=True, members=frozenset({"ada", "bob"})))
    follower = Follower(call, "other", path.format(job_id))
    head.ask(ChangeProject(project_id="default", by="root", as_admin=True, members=frozenset({"ada"})))
    assert call("user", "POST", f"/v1/jobs/{job_id}/cancel", {"why": "canary-of-ada"}).status_code == 200
    until(lambda: b"(for its owner and project)" in follower.heard or b"canary-of-ada" in follower.heard)
    assert b"canary-of-ada" not in follower.heard
