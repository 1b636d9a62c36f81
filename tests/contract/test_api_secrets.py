"""Secrets over the API: who sets, lists and removes them, who gets values, and what lies in the store."""

# mypy: disable-error-code="arg-type, var-annotated"

import base64
import os
from dataclasses import replace

import pytest

from phalanx.api.auth.secret_seal import SecretSeal
from phalanx.app.secret_key_file import CREDENTIAL, CREDENTIALS_VARIABLE, SecretKeyFile, given_key_file
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import Conflict
from phalanx.core.state.events import PutOwnSecret, PutProject
from phalanx.core.state.records import SECRETS
from phalanx.core.work.queue import Project
from phalanx.core.work.secret import Secret, SecretScope, secret_id, variables_like_secrets
from tests.contract.api_head import ApiHead, Supervisor, code, until

VALUE = "canary of this file"


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path / "head"))
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


def stored(head):
    return list(head.store.records(SECRETS))


def put(call, name="HF_TOKEN", value=VALUE, role="admin", path="/v1/projects/default/secrets/"):
    return call(role, "PUT", f"{path}{name}", {"value": value})


def running(call, supervisor, **changes):
    """A job whose attempt is about to start on the supervisor's node."""
    job_id = call.submit("user", gpus=2, **changes)
    until(lambda: call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["state"] == "running")
    supervisor.lease([(job_id, 1)])
    return job_id


def values(call, job_id, epoch=1, node="n0"):
    return call(f"node:{node}", "GET", f"/v1/node/secrets/{job_id}/{epoch}")


def test_only_the_supervisor_of_a_live_attempt_gets_the_values_that_its_job_names(head, call):
    supervisors = [Supervisor(call, name) for name in ("n0", "n1")]
    supervisors[0].hello()
    assert put(call).json()["secret"]["version"] == 1
    put(call, "OTHER", "another value of no use")
    job_id = running(call, supervisors[0], secrets=["HF_TOKEN"])
    supervisors[1].hello()
    assert values(call, job_id).json() == {"values": {"HF_TOKEN": VALUE}}
    assert values(call, job_id).headers["cache-control"] == "no-store"
    assert code(values(call, job_id, node="n1")) == (403, "not_permitted")
    assert code(values(call, job_id, epoch=2)) == (403, "not_permitted")
    assert call("admin", "GET", f"/v1/node/secrets/{job_id}/1").status_code == 403
    put(call, value="the value of the next start")
    assert values(call, job_id).json() == {"values": {"HF_TOKEN": "the value of the next start"}}
    assert put(call, role="user", path="/v1/own-secrets/", value="a value of the user").status_code == 200
    assert values(call, job_id).json() == {"values": {"HF_TOKEN": "a value of the user"}}, "the user's own first"
    for path in ("/v1/own-secrets/HF_TOKEN", "/v1/projects/default/secrets/HF_TOKEN"):
        assert call("user" if "own" in path else "admin", "DELETE", path).json() == {"jobs": 1}
    gone = values(call, job_id)
    assert (gone.status_code, "was removed after job" in gone.text) == (404, True)


def test_people_get_names_and_never_values(head, call):
    put(call)
    put(call, role="user", path="/v1/own-secrets/", name="MINE")
    head.ask(PutProject(project=Project(id="closed", members=frozenset({"someone"}))))
    put(call, "CLOSED", path="/v1/projects/closed/secrets/")
    shown = {role: call(role, "GET", "/v1/secrets") for role in ("admin", "user", "viewer")}
    names = {role: [one["name"] for one in reply.json()["secrets"]] for role, reply in shown.items()}
    assert names == {"admin": ["CLOSED", "HF_TOKEN"], "user": ["HF_TOKEN", "MINE"], "viewer": ["HF_TOKEN"]}
    assert all(VALUE not in reply.text for reply in shown.values())
    assert VALUE not in repr(stored(head))
    audit = call("admin", "GET", "/v1/audit").text
    assert "secret MINE of user" in audit
    assert VALUE not in audit


def test_values_that_cannot_be_masked_or_passed_are_refused_and_not_repeated(head, call):
    for value in ("sh0rt", "   sh0rt   ", "a NUL \0 byte in it", "x" * (33 << 10)):
        refused = put(call, value=value)
        assert refused.status_code == 400, value[:10]
        assert value not in refused.text
    for name in ("1A", "A-B", "PHALANX_URL"):
        assert put(call, name).status_code == 400
    unknown = call("user", "POST", "/v1/jobs", {"run": "true", "secrets": ["NOPE"]})
    assert (unknown.status_code, "set secret NOPE of project default" in unknown.text) == (404, True)
    both = call("user", "POST", "/v1/jobs", {"run": "true", "secrets": ["A_KEY"], "env": {"A_KEY": "1"}})
    assert (both.status_code, "A_KEY is in env and in secrets" in both.text) == (422, True)
    env = {"WANDB_API_KEY": "abc", "TOKENIZERS_PARALLELISM": "0"}
    warned = call("user", "POST", "/v1/jobs", {"run": "true", "env": env, "hold": True}).json()["warnings"]
    assert ["WANDB_API_KEY will lie in clear" in one for one in warned if one.startswith("env: ")] == [True]
    assert put(call, path="/v1/projects/nowhere/secrets/").status_code == 404
    assert stored(head) == []


def test_a_sealed_value_opens_only_under_its_own_name_and_with_a_key_of_the_head(head, call, tmp_path):
    for name in ("A_TOKEN", "B_TOKEN"):
        put(call, name)
    one, other = stored(head)
    seal = SecretSeal(head.parts.secret_keys)
    assert one.sealed != other.sealed
    assert seal.open(one) == seal.open(other) == VALUE
    with pytest.raises(Conflict, match="its record was changed"):
        seal.open(replace(one, sealed=other.sealed))
    with pytest.raises(Conflict, match="is not among the head's keys"):
        SecretSeal(SecretKeyFile(home=StateFolder(path=str(tmp_path)))).open(one)


def test_rotation_drops_the_old_key_and_names_what_no_key_opens(head, call):
    put(call)
    lost = Secret(
        id=secret_id(SecretScope.USER, "sam", "LOST"),
        scope=SecretScope.USER,
        owner="sam",
        name="LOST",
        sealed="eA==",
        key="?",
        version=0,
        by="sam",
        at_s=1.0,
    )
    head.ask(PutOwnSecret(secret=lost))
    before = head.parts.secret_keys.read()
    done = call("admin", "POST", "/v1/secrets/rotate-key").json()
    (after,) = head.parts.secret_keys.read()
    assert after not in before
    assert (done["count"], done["unreadable"]) == (1, ["LOST of user sam"])
    readable = next(one for one in stored(head) if one.name == "HF_TOKEN")
    assert SecretSeal(head.parts.secret_keys).open(readable) == VALUE


def test_an_interrupted_rotation_leaves_all_readable_and_the_next_one_finishes_it(head, call):
    put(call)
    head.parts.secret_keys.add()  # the head was killed after this
    put(call, "LATER")
    seal = SecretSeal(head.parts.secret_keys)
    assert [seal.open(one) for one in stored(head)] == [VALUE, VALUE]
    assert len({one.key for one in stored(head)}) == 2
    assert call("admin", "POST", "/v1/secrets/rotate-key").json()["count"] == 2
    assert len(head.parts.secret_keys.read()) == 1


def test_a_given_key_file_is_not_changed_and_its_first_key_is_the_one_of_a_rotation(tmp_path, monkeypatch):
    path, keys = tmp_path / "keys", [base64.b64encode(os.urandom(32)).decode() for _ in range(2)]
    path.write_text(f"# ours\n{keys[1]}\n")
    given = SecretKeyFile(home=StateFolder(path=str(tmp_path)), given=str(path), shares_store=True)
    path.chmod(0o644)
    with pytest.raises(Conflict, match="can be read by other accounts"):
        given.read()
    path.chmod(0o600)
    head = ApiHead(str(tmp_path / "head"))
    head.parts = replace(head.parts, secret_keys=given)
    secret = Secret(
        id="i", scope=SecretScope.USER, owner="sam", name="X", sealed="", key="", version=0, by="sam", at_s=1.0
    )
    head.close()
    sealed = SecretSeal(given).seal(secret, VALUE)
    path.write_text("\n".join(keys))
    again = SecretSeal(given).seal(secret, VALUE)
    assert sealed.key != again.key
    assert SecretSeal(given).open(sealed) == SecretSeal(given).open(again) == VALUE
    with pytest.raises(Conflict, match="was given to this head"):
        given.add()
    path.write_text("too short")
    with pytest.raises(Conflict, match="line 1 is not a key"):
        given.read()
    with pytest.raises(Conflict, match="several heads may share this database"):
        SecretKeyFile(home=StateFolder(path=str(tmp_path)), shares_store=True).read()
    (tmp_path / CREDENTIAL).write_text(keys[0])
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(tmp_path))
    assert given_key_file("") == str(tmp_path / CREDENTIAL)
    assert given_key_file("/other") == "/other"


def test_names_that_look_like_secrets():
    names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "apikey", "GH_TOKEN_2"]
    others = ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEY", "SSL_KEY_FILE", "KEYBOARD", "PATH"]
    assert variables_like_secrets((name, "x") for name in [*names, *others]) == names
    assert variables_like_secrets([("HF_TOKEN", "")]) == []
