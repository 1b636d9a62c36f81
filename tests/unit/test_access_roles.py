"""Who may do what."""

from dataclasses import replace

import pytest

from phalanx.core.access.caller import (
    Action,
    Caller,
    UserRole,
    may,
    may_access_job,
)
from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.users import Token

ADA = Caller(user=UserId("ada"), role=UserRole.USER, token_id=TokenId("t"))
GPT = ProjectId("gpt")

#                     VIEWER USER OPERATOR ADMIN NODE
TABLE = {
    Action.VIEW: "y y y y -",
    Action.SUBMIT: "- y y y -",
    Action.CHANGE_OWN: "- y y y -",
    Action.VIEW_OUTPUT: "- y y y -",
    Action.OPERATE: "- - y y -",
    Action.ADMINISTER: "- - - y -",
    Action.MANAGE_OWN_TOKENS: "- y y y -",
    Action.MANAGE_PROJECT: "- y y y -",
    Action.SUPERVISE: "- - - - y",
    Action.JOIN: "- - - y y",
}


@pytest.mark.parametrize("action", Action)
def test_every_action_is_granted_to_exactly_these_roles(action):
    roles = (UserRole.VIEWER, UserRole.USER, UserRole.OPERATOR, UserRole.ADMIN, UserRole.NODE)
    granted = " ".join("y" if may(replace(ADA, role=role), action) else "-" for role in roles)
    assert granted == TABLE[action]


def test_scope_only_narrows():
    narrow = replace(ADA, scope=frozenset({Action.VIEW, Action.ADMINISTER}))
    assert may(narrow, Action.VIEW)
    assert not may(narrow, Action.SUBMIT)
    assert not may(narrow, Action.ADMINISTER), "a scope gives nothing that the role has not"


@pytest.mark.parametrize(
    ("caller", "touches"),
    [
        (ADA, True),  # her own
        (replace(ADA, user=UserId("bob")), False),
        (replace(ADA, user=UserId("bob"), admin_of=frozenset({GPT})), True),
        (replace(ADA, user=UserId("bob"), admin_of=frozenset({ProjectId("vision")})), False),
        (replace(ADA, user=UserId("bob"), projects=frozenset({GPT})), False),
        (replace(ADA, user=UserId("op"), role=UserRole.OPERATOR), True),
        (replace(ADA, user=UserId("root"), role=UserRole.ADMIN), True),
        (replace(ADA, role=UserRole.VIEWER), False),
        (replace(ADA, role=UserRole.NODE), False),
        (replace(ADA, scope=frozenset({Action.VIEW})), False),
    ],
)
def test_who_may_cancel_adas_job_in_project_gpt(caller, touches):
    assert may_access_job(caller, Action.CHANGE_OWN, owner=UserId("ada"), project=GPT) is touches


@pytest.mark.parametrize(
    ("expires_s", "revoked_s", "good"),
    [(None, None, True), (101.0, None, True), (100.0, None, False), (None, 50.0, False), (101.0, 200.0, False)],
)
def test_token_is_good_until_it_expires_or_is_revoked(expires_s, revoked_s, good):
    token = Token(
        id=TokenId("t"), user=UserId("ada"), sha256="", created_s=0.0, expires_s=expires_s, revoked_s=revoked_s
    )
    assert token.is_valid(100.0) is good
