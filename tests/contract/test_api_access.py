"""Users, projects, queues and tokens, through the client."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.client import Client
from phalanx.core.errors import BadRequest, NotFound, NotPermitted, NotSignedIn
from tests.contract.api_head import TOKENS


@pytest.fixture
def person(head):
    with head.served() as url:
        yield lambda role: Client(url, TOKENS.get(role, role))


def test_admin_adds_people_and_projects(person):
    admin = person("admin")
    assert admin.put_user("carol").role == "user"
    assert admin.put_user("carol", role="operator").role == "operator"
    assert admin.put_project("nlp", members=["carol"], admins=["ada"]).members == ["carol"]
    assert admin.put_project("nlp", members=["ada", "carol"]).admins == ["ada"]
    assert {user.id for user in admin.users()} >= {"carol", "ada"}
    assert person("user").me().admin_of == ["nlp"]
    for role in ("viewer", "user", "operator"):
        with pytest.raises(NotPermitted):
            person(role).put_user("dave")


@pytest.mark.parametrize("name", ["a b", "-x", "x" * 64, "a/b", "é"])
def test_odd_names_are_refused(person, name):
    with pytest.raises((BadRequest, NotFound)):
        person("admin").put_user(name)


def test_admin_cannot_lock_themself_out_nor_make_supervisors_of_people(person):
    with pytest.raises(BadRequest):
        person("admin").put_user("root", disabled=True)
    with pytest.raises(BadRequest):
        person("admin").put_user("root", role="viewer")
    with pytest.raises(BadRequest):
        person("admin").put_user("ada", role="node")


def test_project_of_strangers_is_refused(person):
    with pytest.raises(NotFound, match="nobody"):
        person("admin").put_project("nlp", members=["nobody"])


def test_operator_opens_and_closes_queues(person):
    operator = person("operator")
    assert operator.put_queue("fast", priority=10).open
    assert not operator.put_queue("fast", open=False).open
    assert [(queue.id, queue.priority, queue.open) for queue in operator.queues()] == [
        ("default", 0, True),
        ("fast", 10, False),
    ]
    with pytest.raises(NotPermitted):
        person("user").put_queue("mine")


def test_token_works_until_it_is_revoked(person):
    user = person("user")
    made = user.make_token(note="laptop", expires="30d", scope=["see"])
    assert made.token.expires_s is not None
    fresh = person(made.secret)
    assert fresh.me().scope == ["see"]
    assert made.secret not in str(user.tokens())
    user.revoke_token(made.token.id)
    with pytest.raises(NotSignedIn):
        fresh.me()
    user.revoke_token(made.token.id)


def test_tokens_are_each_users_own(person):
    assert {token.user for token in person("user").tokens()} == {"ada"}
    assert {token.user for token in person("admin").tokens()} > {"ada", "bob"}
    with pytest.raises(NotPermitted):
        person("user").make_token(user="bob")
    other = person("other").tokens()[0].id
    with pytest.raises(NotFound):
        person("user").revoke_token(other)
    assert person("admin").make_token(user="bob").token.user == "bob"


def test_a_token_makes_none_that_may_more_or_lasts_longer(person):
    narrow = person(person("admin").make_token(scope=["see", "own_tokens"], expires="1h").secret)
    made = narrow.make_token()
    assert set(made.token.scope) == {"see", "own_tokens"}
    assert made.token.expires_s is not None
    with pytest.raises(NotPermitted):
        narrow.make_token(scope=["administer"])
