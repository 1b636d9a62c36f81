"""What the groups of a person at the sign-in provider give, and who belongs to a project by them."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, union-attr"

import pytest

from phalanx.core.access.membership import administers, belongs, is_open
from phalanx.core.work.queue import Project
from phalanx.core.work.sign_in import GroupGrant, SignInSettings, claim_at, granted_access, groups_of
from phalanx.core.work.users import Identity, User, UserRole


def settings(*grants, claim="groups"):
    return SignInSettings(
        issuer="https://id", client_id="c", urls=("https://h",), by="root", at_s=1.0, groups_claim=claim, grants=grants
    )


ML = GroupGrant(group="ml", role=UserRole.USER, projects=frozenset({"nlp"}))
OPS = GroupGrant(group="ops", role=UserRole.OPERATOR)
LEADS = GroupGrant(group="leads", admin_of=frozenset({"cv"}))
ALL = GroupGrant(group="*", role=UserRole.VIEWER)


@pytest.mark.parametrize(
    ("groups", "role", "projects", "admin_of"),
    [
        (["ml"], UserRole.USER, {"nlp"}, set()),
        (["ops", "ml"], UserRole.OPERATOR, {"nlp"}, set()),
        (["ml", "leads"], UserRole.USER, {"nlp"}, {"cv"}),
        (["ML", "ml "], None, set(), set()),  # names are exact
        (["leads"], None, set(), set()),  # gives no role of its own
        (["*"], None, set(), set()),
        ([], None, set(), set()),
    ],
)
def test_highest_role_and_all_projects_count(groups, role, projects, admin_of):
    found = granted_access(settings(ML, OPS, LEADS), groups)
    if role is None:
        assert found is None
    else:
        assert (found.role, found.projects, found.admin_of) == (role, projects, admin_of)


def test_star_gives_everyone_its_role():
    assert granted_access(settings(ML, ALL), []).role is UserRole.VIEWER
    assert granted_access(settings(ML, ALL), ["ml"]).role is UserRole.USER


@pytest.mark.parametrize(
    ("claims", "claim", "found"),
    [
        ({"groups": ["a", "b"]}, "groups", ["a", "b"]),
        ({"groups": "a"}, "groups", ["a"]),
        ({"groups": ["a", 1, None, ["b"]]}, "groups", ["a"]),
        ({"groups": {"a": 1}}, "groups", None),
        ({}, "groups", None),
        ({"realm_access": {"roles": ["a"]}}, "realm_access.roles", ["a"]),
        ({"realm_access.roles": ["b"], "realm_access": {"roles": ["a"]}}, "realm_access.roles", ["b"]),
        ({"realm_access": ["roles"]}, "realm_access.roles", None),
        ({"https://x.org/groups": ["a"]}, "https://x.org/groups", ["a"]),
    ],
)
def test_groups_are_read_from_a_claim_and_nothing_else_is_taken_for_them(claims, claim, found):
    assert groups_of(settings(claim=claim), claims) == found
    assert claim_at(claims, "missing.claim") is None


def test_group_adds_to_the_lists_of_a_project_and_closes_it():
    nlp, cv = Project(id="nlp"), Project(id="cv", members=frozenset({"bob"}))
    identity = Identity(
        issuer="https://id",
        subject="a",
        confirmed_s=1.0,
        lapses_s=2.0,
        projects=frozenset({"nlp"}),
        admin_of=frozenset({"cv"}),
    )
    ann = User(id="ann", role=UserRole.USER, identity=identity)
    assert (is_open(nlp, None), is_open(nlp, settings(ML)), is_open(cv, None)) == (True, False, False)
    assert (belongs(nlp, "ann", ann), belongs(cv, "ann", ann), administers(cv, "ann", ann)) == (True, True, True)
    assert (administers(nlp, "ann", ann), belongs(nlp, "bob", None), belongs(cv, "bob", None)) == (False, False, True)


def test_user_is_refused_by_the_first_reason_that_holds():
    identity = Identity(issuer="https://id", subject="a", confirmed_s=1.0, lapses_s=2.0)
    ann = User(id="ann", role=UserRole.USER, identity=identity)
    assert (ann.refusal(1.9), "has lapsed" in ann.refusal(2.0)) == ("", True)
    assert User(id="ann", role=UserRole.USER).refusal(1e12) == ""
