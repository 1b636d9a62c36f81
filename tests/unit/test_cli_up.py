"""`phalanx up` whose head is refused: what becomes of the state folder that it made."""

import contextlib
import fcntl
import os
import shutil
import sys

import pytest

from phalanx.cli.cluster import up
from phalanx.core.errors import BadFile, TryLater, Unreachable


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where no folder is yet, and any head ends at once."""
    monkeypatch.setattr(up, "_command", lambda arguments: [sys.executable, "-c", "raise SystemExit(69)"])
    return str(tmp_path / "home")


def test_the_folder_of_a_head_that_was_refused_goes_with_it(home):
    with pytest.raises(Unreachable):
        up._start(home, [])
    assert not os.path.exists(home)


def test_a_refusal_keeps_its_exit_code_and_words(home, monkeypatch):
    """A damaged database is no head that cannot be reached: who scripts `up` looks at the code."""
    said = "phalanx: error: phalanx.db is damaged: page 3 (phalanx restore FILE)"
    monkeypatch.setattr(
        up, "_command", lambda arguments: [sys.executable, "-c", f"print({said!r}); raise SystemExit(78)"]
    )
    with pytest.raises(BadFile) as refused:
        up._start(home, [])
    assert (refused.value.message, refused.value.hint) == ("phalanx.db is damaged: page 3", "phalanx restore FILE")


def test_the_folder_stays_where_the_head_of_another_up_has_taken_it_meanwhile(home, monkeypatch):
    with contextlib.ExitStack() as other:

        def ended(words, code):
            lock = other.enter_context(open(os.path.join(home, "head.lock"), "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            return Unreachable("a head already runs in this folder")

        monkeypatch.setattr(up, "_exit_error", ended)
        with pytest.raises(Unreachable):
            up._start(home, [])
        assert os.path.exists(os.path.join(home, "head.lock"))


def test_a_head_that_finds_no_room_for_its_error_ended_on_a_full_disk(home, monkeypatch):
    monkeypatch.setattr(up, "_command", lambda arguments: [sys.executable, "-c", "raise SystemExit(120)"])
    full = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(TryLater) as refused:
        up._start(home, [])
    assert "the disk of" in refused.value.message
    assert refused.value.hint == "free some space"
