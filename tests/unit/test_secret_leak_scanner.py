"""The scanner that looks for secrets through the whole suite finds one that is planted, wherever a home is removed or kept."""

import base64
import inspect
import shutil

import pytest

from tests import canaries

PLANTED = {
    "of the nodes": "ab" * 32,
    "of the admin": "token-of-the-admin",
    "in base64": base64.b64encode(b"token-of-the-admin").decode(),
    "of join lines": "salt-of-the-join-lines",
    "key": "code-of-the-key/1",
    "of everybody's environment": canaries.VARIABLES["CANARY_SECRET_49"],
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Named otherwise than a head's, and removed behind their back, for the scanner that looks at this run itself."""
    monkeypatch.setattr(canaries, "HOME", "planted_secret")
    monkeypatch.setattr(canaries, "SECRETS", ("token", "planted_secret", "join_salt.json"))
    monkeypatch.setattr(shutil, "rmtree", inspect.unwrap(shutil.rmtree))
    home = tmp_path / "kept" / "test" / "home"
    (home / "logs").mkdir(parents=True)
    (home / "planted_secret").write_text(PLANTED["of the nodes"])
    (home / "token").write_text("token-of-the-admin\n")
    (home / "join_salt.json").write_text('{"salt": "salt-of-the-join-lines"}')
    (home / "tls").mkdir()
    (home / "tls" / "ca.key").write_text(
        "-----BEGIN PRIVATE KEY-----\ncode-of-the-key/1\ncode-of-the-key/2\n-----END PRIVATE KEY-----\n"
    )
    (home / "logs" / "rank-0.log").write_text(canaries.VARIABLES["CANARY_SECRET_07"])
    return home


def looked(home, *, removed=False):
    with canaries.leak_scanner(home.parents[1]) as scanner:
        if removed:
            shutil.rmtree(home.parent)
    return scanner


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("kind", list(PLANTED))
def test_a_secret_in_a_file_of_a_home_is_seen(home, kind, removed):
    secret = PLANTED[kind]
    (home / "head.log").write_text(f"GET /v1/me Bearer {secret} 200")
    scanner = looked(home, removed=removed)
    assert [one.partition(": ")[0] for one in scanner.found] == [str(home / "head.log")]
    assert not any(secret in one for one in scanner.found)


def test_one_that_stands_across_two_pieces_is_seen(home, monkeypatch):
    monkeypatch.setattr(canaries, "PIECE_BYTES", 1000)
    (home / "head.log").write_bytes(b"." * 990 + b"token-of-the-admin")
    assert len(looked(home).found) == 1


def test_a_jobs_variables_lie_in_the_database_by_right_and_tokens_do_not(home):
    (home / "phalanx.db").write_text(canaries.VARIABLES["CANARY_SECRET_00"])
    assert looked(home).found == []
    (home / "phalanx.db-wal").write_text("token-of-the-admin")
    assert len(looked(home).found) == 1


def test_links_are_not_followed(home, tmp_path):
    (tmp_path / "beside").write_text("token-of-the-admin")
    (home / "link").symlink_to(tmp_path / "beside")
    (home / "long").symlink_to("x" * 4000)
    (home / "round").symlink_to("round")
    assert looked(home).found == []


def test_where_a_secret_lies_by_right_and_what_programs_print_is_no_find(home):
    scanner = looked(home)
    assert (scanner.found, scanner.homes, scanner.known) == ([], 1, canaries.COUNT + 4)


def test_heads_of_this_suite_log_everything(monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", "/nowhere")
    assert canaries.environment().keys() >= {canaries.LEVEL, *canaries.VARIABLES}
    assert "PHALANX_HOME" not in canaries.environment()
