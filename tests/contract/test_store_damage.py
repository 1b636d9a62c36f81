"""Thousands of damaged copies of one database: each opens with exactly what was acknowledged, or is refused in one line; never a wrong record.

`make test` opens one in 24, `make prove` all of them, both as they are and as if the database were too large to be checked at the start.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx.ports.store import Batch
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract.damage import copies
from tests.contract.records import (
    attempt,
    calibration,
    failure_rules,
    node,
    project,
    queue,
    reservation,
    spent,
    submitted,
    token,
    user,
)
from tests.effort import FULL, size

EVERY = size(120, 1)  # one copy of so many
LEAST = 5000  # copies there must be at least
STATES = 8  # whole states that the WAL leads through
HANG_S = 1200


@pytest.fixture(scope="module")
def home():
    """A database with every kind of record, closed; the same while it was open; and each state that its WAL leads through."""
    # In memory where there is such a folder: not what a disk keeps is tried here, and thousands of syncs cost minutes.
    with tempfile.TemporaryDirectory(
        prefix="phalanx-damage-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as name:
        yield filled(Path(name))


def filled(folder):
    path = str(folder / "live" / "phalanx.db")
    store = SqliteStore(path)
    people = [
        user(),
        token(),
        project(),
        queue(),
        spent(),
        reservation(),
        calibration(),
        failure_rules(),
        node("n0"),
        node("n1"),
    ]
    store.commit(Batch(records=people))
    store.commit(submitted(1, 40))
    store.commit(Batch(records=[attempt(seq, node="n0", devices=()) for seq in range(1, 20)]))
    store.close()  # what is so far is in the database itself
    store = SqliteStore(path)
    for number in range(STATES):
        if number:
            store.commit(submitted(38 + 3 * number, 3))
        for suffix in ("", "-wal"):
            if os.path.exists(path + suffix):
                shutil.copy(path + suffix, folder / f"state-{number}.db{suffix}")
        SqliteStore(str(folder / f"state-{number}.db")).close()  # its WAL goes into it
    for suffix in ("", "-wal"):
        shutil.copy(path + suffix, folder / f"open.db{suffix}")
    store.close()
    shutil.copy(path, folder / "closed.db")
    return folder


def judged(home, every, *large):
    """(copies, refused, earlier) of a child that opens them; what it finds wrong fails the test, and so does its death."""
    child = subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.contract.damaged_copies",
            str(home),
            "0",
            str(every),
            *large,
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    lines = child.stdout.splitlines()
    assert child.returncode == 0, f"died at {lines[-1:]}: {child.stderr[-3000:]}"
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert wrong == []
    return tuple(int(word) for word in lines[-1].split()[1:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("large", [(), ("large",)], ids=["checked at the start", "too large for that"])
def test_damaged_copies_open_clean_or_are_refused(home, large):
    count, refused, earlier = judged(home, EVERY, *large)
    assert count >= LEAST // EVERY
    assert 0 < refused < count
    assert earlier > 0 or not FULL


def test_there_are_enough_copies_and_each_is_damaged(home):
    closed, database, wal = ((home / name).read_bytes() for name in ("closed.db", "open.db", "open.db-wal"))
    made = list(copies(closed, database, wal))
    assert len(made) >= LEAST
    assert all(
        copy.database not in (closed, database)
        or copy.wal != (wal if copy.database == database else None)
        or copy.shm is not None
        or copy.lock is not None
        for copy in made
    )


def test_a_head_says_in_one_line_that_its_database_is_damaged(home, tmp_path):
    whole = bytearray((home / "closed.db").read_bytes())
    whole[3 * 4096 : 4 * 4096] = bytes(4096)
    state = tmp_path / "home"
    state.mkdir(mode=0o700)
    (state / "phalanx.db").write_bytes(whole)
    command = [sys.executable, "-m", "phalanx.app.head", "--home", str(state), "--port", "0", "--virtual", "1x1"]
    head = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert head.returncode == 78
    assert head.stderr.count("\n") == 1
    assert "is damaged" in head.stderr
    assert "Traceback" not in head.stdout + head.stderr


@pytest.mark.parametrize("lost", [os.unlink, lambda path: os.truncate(path, 0)], ids=["gone", "empty"])
def test_a_database_that_is_lost_is_no_new_one_until_its_lock_file_goes_too(tmp_path, lost):
    path = str(tmp_path / "phalanx.db")
    store = SqliteStore(path)
    store.commit(submitted(1, 3))
    store.close()
    lost(path)
    with pytest.raises(StoreUnusable, match="is empty or missing, and it contained a database before"):
        SqliteStore(path)
    os.unlink(path + ".lock")
    SqliteStore(path).close()


def test_damage_of_which_sqlite_cites_several_lines_is_told_in_one(tmp_path):
    path = tmp_path / "phalanx.db"
    SqliteStore(str(path)).close()
    whole = path.read_bytes()
    cut = whole.replace(
        b" NULL,\n    doc ", b"`NULL,\n    doc "
    )  # in the schema, as SQLite keeps it: one flipped bit each
    assert cut != whole
    path.write_bytes(cut)
    with pytest.raises(StoreUnusable, match="is damaged") as refused:
        SqliteStore(str(path))
    assert "\n" not in refused.value.message
