"""What a head is told about a store that it shares, and the one line in which nonsense is refused."""

# mypy: disable-error-code="arg-type"

import argparse
import importlib.util
import os

import pytest

from phalanx.app.shared_store import STORE_VARIABLE, check_store, store_options
from phalanx.app.state_folder import StateFolder
from phalanx.cli.cluster.up import _export_store_url
from phalanx.client.input_files import read_database_url
from phalanx.core.errors import BadFile, BadRequest, Conflict

DSN = "postgresql://ada:secret@db/phalanx"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    return StateFolder.open(str(tmp_path / "home"))


def asked(home: StateFolder, said: str = "", files: str | None = None, before: dict | None = None):
    if said:
        os.environ[STORE_VARIABLE] = said
    return store_options(argparse.Namespace(files=files), home, before or {})


def test_address_leaves_the_environment_so_that_no_rank_inherits_it(home):
    assert asked(home, DSN).address == DSN
    assert STORE_VARIABLE not in os.environ


def test_folder_remembers_the_address_and_off_forgets_it(home):
    home.write_private("store", DSN)
    assert asked(home).address == asked(home).previous_address == DSN
    assert asked(home, "off").address == ""


@pytest.mark.parametrize("word", ["mysql://db/x", "phalanx.db", "sqlite:///x"])
def test_what_heads_cannot_share_is_refused(home, word):
    with pytest.raises(BadRequest, match="not a database that heads can share"):
        asked(home, word)


def test_missing_extra_is_named(home, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Conflict) as refused:
        asked(home, DSN)
    assert "pip install" in refused.value.hint


def test_folder_with_a_database_of_its_own_is_not_taken_out_of_sight(home):
    with open(home.path_of("phalanx.db"), "wb") as file:
        file.write(b"x")
    with pytest.raises(Conflict, match="its own database"):
        check_store(asked(home, DSN), home)


def test_shared_directory_must_take_files(home, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Conflict, match="--files"):
        asked(home, DSN, files=str(tmp_path / "file"))
    assert asked(home, DSN, files=str(tmp_path / "new")).files == str(tmp_path / "new")
    assert asked(home, DSN, files="off", before={"files": "/x"}).files == ""


def test_password_in_the_command_is_refused_and_a_file_is_read(tmp_path, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setenv(STORE_VARIABLE, "")
    with pytest.raises(BadRequest, match="every user of this machine can read") as refused:
        _export_store_url(DSN)
    assert "secret" not in f"{refused.value.message}{refused.value.hint}"
    (tmp_path / "store").write_text(f"{DSN}\n")
    _export_store_url(f"@{tmp_path}/store")
    assert os.environ[STORE_VARIABLE] == DSN


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff", "not UTF-8 text"),
        (b"postgresql://one\npostgresql://two\n", "not one line of text"),
        (b"\0" * 100, "not one line of text"),
        (b"p" * 5000, "not one line of text"),
    ],
)
def test_what_is_no_address_in_a_file_is_refused_in_one_line_and_not_shown(tmp_path, content, why):
    if content is not None:
        (tmp_path / "store").write_bytes(content)
    with pytest.raises(BadFile) as refused:
        read_database_url(str(tmp_path / "store"))
    assert refused.value.message == f"{tmp_path}/store: {why}"
    assert refused.value.hint.startswith("a file with one line")
