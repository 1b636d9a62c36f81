"""Databases of older releases, opened by today's: `older/NNNN.sql` is what a real head of that time had written when it was killed.

Each is a dump of the database of a head of migration NNNN with two nodes: a job that ended well, one that failed, one
that ran on both nodes, one that waited and one that was cancelled. Migrations 2 and 3 came together: 2 is made from 1.
"""

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from phalanx.core.ids import JobId
from phalanx.core.state.records import IDEMPOTENCY
from phalanx.core.work.job import JobState
from phalanx.failpoints import (
    ENVIRONMENT_VARIABLE,
    FAILPOINTS,
    FailureMode,
    armed,
)
from phalanx.ports.store import Batch, JobFilter, StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.backups import DatabaseLocation, backup, restore
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.store.sql.sqlite.upgrade import APPLICATION_ID
from tests import postgres_here
from tests.contract.records import job, line

OLDER = Path(__file__).parent / "older"
LEVELS = [1, 2, 3, 4]
ROWS = {
    "users": 2,
    "projects": 2,
    "tokens": 2,
    "queues": 1,
    "nodes": 2,
    "jobs": 5,
    "attempts": 3,
    "story": 20,
    "idempotency": 5,
}


def older(folder, level):
    """The database of a head of that level."""
    path = str(folder / "phalanx.db")
    source = OLDER / f"{level:04}.sql"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript((source if source.exists() else OLDER / "0001.sql").read_text(encoding="utf-8"))
        if not source.exists():
            one = migrations("sqlite")[level - 1]
            connection.executescript(one.sql)
            connection.execute("INSERT INTO migrations VALUES (?, ?, ?, 0)", (one.number, one.name, one.sha256))
            connection.commit()
    return path


def rows_in(path):
    with closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ROWS}


def is_whole(store):
    assert [(held.name, held.state.value) for held in reversed(store.jobs(JobFilter()))] == [
        ("fine", "succeeded"),
        ("fails", "failed"),
        ("never-ends", "running"),
        ("waits", "pending"),
        ("cancelled", "cancelled"),
    ]
    assert [told.seq for told in store.story()] == list(range(1, 21))
    assert {held.id for held in store.users()} == {"root", "alice"}
    assert [len(held.devices) for held in store.nodes()] == [2, 2]
    world = store.load()
    assert list(world.attempts) == ["3"]
    assert list(world.pending) == ["4"]
    assert len(world.table(IDEMPOTENCY)) == 5
    assert world.next_job_seq == 6
    failed = store.job(JobId("2"))
    assert failed is not None
    assert failed.state is JobState.FAILED
    token = store.tokens()[0]
    assert store.token(token.sha256) == token


@pytest.mark.parametrize("level", LEVELS)
def test_a_database_of_every_older_schema_is_upgraded_whole(tmp_path, level, caplog):
    path = older(tmp_path, level)
    assert rows_in(path) == ROWS
    with closing(SqliteStore(path)) as store:
        is_whole(store)
        store.commit(Batch(records=[job(6)], story=[line(21, 6)]))
        assert store.check_integrity() == []
    assert rows_in(path) == {**ROWS, "jobs": 6, "story": 21}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT max(number) FROM migrations").fetchone() == (len(migrations("sqlite")),)
    newest = level == len(migrations("sqlite"))
    assert (tmp_path / f"phalanx.db.before-{level + 1}").exists() is not newest
    assert ("a copy of the old one" in caplog.text) is not newest


@pytest.mark.parametrize("level", [level for level in LEVELS if level < len(migrations("sqlite"))])
def test_the_copy_is_the_database_as_it_was_and_can_be_upgraded_again(tmp_path, level):
    path = older(tmp_path, level)
    SqliteStore(path).close()
    copy = f"{path}.before-{level + 1}"
    assert stat.S_IMODE(os.stat(copy).st_mode) == 0o600
    assert rows_in(copy) == ROWS
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT max(number) FROM migrations").fetchone() == (level,)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(copy, other / "phalanx.db")
    with closing(SqliteStore(str(other / "phalanx.db"))) as store:
        is_whole(store)


def test_the_copy_put_back_in_the_place_of_the_database_is_taken_and_a_gap_is_no_new_beginning(tmp_path):
    path = older(tmp_path, 1)
    SqliteStore(path).close()
    os.unlink(path)  # its lock file stays, as in the words of docs/operations.md
    with pytest.raises(StoreUnusable, match="it contained a database before"):
        SqliteStore(path)
    shutil.copy(path + ".before-2", path)
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    assert os.path.exists(path + ".before-2-2")


def test_no_room_for_the_copy_refuses_the_upgrade_and_changes_nothing(tmp_path):
    path = older(tmp_path, 1)
    for name in (name for name in FAILPOINTS if name.startswith("upgrade.copy.") and name != "upgrade.copy.remove"):
        with armed(name, FailureMode.FULL), pytest.raises(StoreRefused, match="disk is full"):
            SqliteStore(path)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT max(number) FROM migrations").fetchone() == (1,)
    with closing(SqliteStore(path)) as store:
        is_whole(store)


UPGRADE = "import sys; from phalanx.store.sql.sqlite.store import SqliteStore; SqliteStore(sys.argv[1])"


def dies(script, place, armed):
    child = subprocess.run(
        [sys.executable, "-c", script, place],
        env={**os.environ, ENVIRONMENT_VARIABLE: armed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, f"{armed} was not reached: {child.stderr}"


POINTS = [
    (name, nth)
    for name, failures in FAILPOINTS.items()
    if name.startswith(("store.migrate.", "upgrade.copy."))
    and FailureMode.KILL in failures
    and name not in ("store.migrate.rollback", "upgrade.copy.remove")
    for nth in ((1, 2, 3) if name.startswith("store.migrate.") else (1,))
]


@pytest.mark.parametrize(("name", "nth"), POINTS)
def test_an_upgrade_that_is_killed_anywhere_goes_on_at_the_next_start(tmp_path, name, nth):
    path = older(tmp_path, 1)
    dies(UPGRADE, path, f"{name}=kill:{nth}")
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    copies = [file for file in os.listdir(tmp_path) if ".before-" in file]
    assert copies
    assert not any(file.endswith(".part") for file in copies)
    assert rows_in(str(tmp_path / "phalanx.db.before-2")) == ROWS


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
def test_an_upgrade_that_is_killed_where_it_takes_half_a_copy_away_goes_on_at_the_next_start(tmp_path, failure):
    path = older(tmp_path, 1)
    with open(path + ".before-2.part", "wb") as half:
        half.write(b"half")
    dies(UPGRADE, path, f"upgrade.copy.remove={failure.value}")
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    assert rows_in(path + ".before-2") == ROWS


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not())
def test_an_old_database_moves_to_postgres(tmp_path):
    """The way of a site that began on SQLite."""
    from phalanx.store.sql.postgres.store import PostgresStore

    path = older(tmp_path, 1)
    SqliteStore(path).close()
    dsn = postgres_here.server().empty()
    backup(DatabaseLocation(path=path), str(tmp_path / "b.phx"), lambda *_: None)
    restore(str(tmp_path / "b.phx"), DatabaseLocation(dsn=dsn), lambda *_: None, replace=False)
    with closing(PostgresStore(dsn)) as store:
        is_whole(store)
    postgres_here.server().drop(dsn)


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not())
def test_postgres_is_upgraded_wholly_and_kept_as_it_was(monkeypatch, caplog):
    from phalanx.store.sql.migrations import Migration
    from phalanx.store.sql.postgres import connections
    from phalanx.store.sql.postgres.store import PostgresStore

    server = postgres_here.server()
    dsn = server.empty()
    with closing(PostgresStore(dsn)) as store:
        store.commit(Batch(records=[job(1)]))
    known = migrations("postgres")
    bad = Migration(len(known) + 1, "bad", "CREATE TABLE half (x int); CREATE TABLE half (x int);")
    monkeypatch.setattr(connections, "migrations", lambda dialect: (*known, bad))
    with pytest.raises(StoreRefused, match="half"):
        PostgresStore(dsn)
    good = Migration(len(known) + 1, "good", "ALTER TABLE jobs ADD COLUMN more int NOT NULL DEFAULT 7;")
    monkeypatch.setattr(connections, "migrations", lambda dialect: (*known, good))
    with closing(PostgresStore(dsn)) as store:
        assert store.job(JobId("1")) == job(1)
        store.commit(Batch(records=[job(2)]))
    name = dsn.rpartition("/")[2]
    kept = [
        row[0] for row in server.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'phalanx_before%'", name)
    ]
    assert len(kept) == 1
    assert kept[0] in caplog.text
    assert server.execute(f"SELECT count(*) FROM {kept[0]}.jobs", name) == [(1,)]
    assert server.execute("SELECT to_regclass('phalanx.half')", name) == [(None,)]
    server.drop(dsn)


LATER = """
import sys
from phalanx.store.sql.migrations import Migration, migrations
from phalanx.store.sql.postgres import connections
from phalanx.store.sql.postgres.store import PostgresStore
known = migrations("postgres")
more = Migration(len(known) + 1, "more", "ALTER TABLE jobs ADD COLUMN more int NOT NULL DEFAULT 7;")
connections.migrations = lambda dialect: (*known, more)
PostgresStore(sys.argv[1]).close()
"""


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not())
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        (name, failure)
        for name in FAILPOINTS
        if name in ("upgrade.schema", "upgrade.table", "postgres.migrate.record", "postgres.migrate.commit")
        for failure in sorted(FAILPOINTS[name] & {FailureMode.KILL, FailureMode.AFTER})
    ],
)
def test_an_upgrade_of_postgres_that_is_killed_has_changed_nothing_and_goes_on_at_the_next_start(name, failure):
    from phalanx.store.sql.postgres.store import PostgresStore

    server = postgres_here.server()
    dsn = server.fresh()
    with closing(PostgresStore(dsn)) as store:
        store.commit(Batch(records=[job(1)]))
    dies(LATER, dsn, f"{name}={failure.value}")
    with closing(PostgresStore(dsn)) as store:  # today's release still takes it for its own
        store.commit(Batch(records=[job(2)]))
    subprocess.run([sys.executable, "-c", LATER, dsn], timeout=60, check=True)
    with pytest.raises(StoreUnusable, match="newer Phalanx"):
        PostgresStore(dsn)
    database = dsn.rpartition("/")[2]
    kept = server.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'phalanx_before%'", database)
    assert len(kept) == 1
    assert server.execute(f"SELECT count(*) FROM {kept[0][0]}.jobs", database) == [(2,)]
    assert server.execute("SELECT sum(more) FROM phalanx.jobs", database) == [(14,)]
    server.drop(dsn)
