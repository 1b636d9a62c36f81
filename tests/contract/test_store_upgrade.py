"""Databases of older releases, opened by a newer one: completely upgraded, with a copy of what was there before.

No release exists that wrote another schema than today's, so the newer one is made up (`later_release`). Where today has several
migrations, their databases are upgraded here too.
"""

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest

from phalanx.core.ids import JobId
from phalanx.core.state.records import CALIBRATIONS, FAILURE_RULES, IDEMPOTENCY
from phalanx.core.work.states import AttemptState, JobState
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
from tests import postgres_here
from tests.contract import later_release, records
from tests.contract.records import attempt, job, key, line

NEWEST = len(later_release.KNOWN)
LEVELS = range(1, NEWEST + 1)
ROWS = {
    "users": 2,
    "projects": 1,
    "tokens": 2,
    "queues": 1,
    "queue_usage": 1,
    "reservations": 1,
    "calibrations": 1,
    "failure_rules": 1,
    "nodes": 2,
    "jobs": 5,
    "attempts": 3,
    "history": 20,
    "idempotency": 5,
}


@pytest.fixture(autouse=True)
def newer(monkeypatch):
    """These tests are the newer release."""
    later_release.install(monkeypatch.setattr)


def older(folder, level=1):
    """The database that a head of the release of that level has left: one job ended well, one failed, one runs, one waits, one was cancelled."""
    path = str(folder / "phalanx.db")
    with pytest.MonkeyPatch.context() as patch:
        later_release.install(patch.setattr, level=level)
        with closing(SqliteStore(path)) as store:
            store.commit(filled())
    return path


def filled():
    jobs = [
        job(1, JobState.SUCCEEDED, epoch=1, name="fine"),
        job(2, JobState.FAILED, epoch=1, name="fails"),
        job(3, JobState.RUNNING, epoch=1, name="never-ends"),
        job(4, name="waits"),
        job(5, JobState.CANCELLED, name="cancelled"),
    ]
    ended = [attempt(seq, state=AttemptState.ENDED) for seq in (1, 2)]
    people = [records.user("root"), records.user("alice"), records.project(), records.token("t1", "root")]
    settings = [records.queue(), records.spent(), records.reservation(), records.calibration(), records.failure_rules()]
    nodes = [records.node("n0"), records.node("n1")]
    keys = [key(seq) for seq in range(1, 6)]
    return Batch(
        records=[*people, records.token("t2", "alice"), *settings, *nodes, *jobs, *ended, attempt(3), *keys],
        history=[line(seq, job_id=1 + seq % 5) for seq in range(1, 21)],
    )


def rows_in(path):
    with closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ROWS}


def level_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT max(number) FROM migrations").fetchone()[0]


def each_was_applied_once(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT number, name FROM migrations ORDER BY number").fetchall() == [
            (one.number, one.name) for one in later_release.KNOWN
        ]
        assert connection.execute("SELECT x FROM later ORDER BY x").fetchall() == [(1,), (2,)]
        assert connection.execute("SELECT DISTINCT more FROM jobs WHERE seq <= 5").fetchall() == [(80,)]


def is_whole(store):
    assert [(held.name, held.state.value) for held in reversed(store.jobs(JobFilter()))] == [
        ("fine", "succeeded"),
        ("fails", "failed"),
        ("never-ends", "running"),
        ("waits", "pending"),
        ("cancelled", "cancelled"),
    ]
    assert [told.seq for told in store.history()] == list(range(1, 21))
    assert {held.id for held in store.users()} == {"root", "alice"}
    assert [len(held.devices) for held in store.nodes()] == [4, 4]
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
    assert (store.records(CALIBRATIONS), store.records(FAILURE_RULES)) == (
        [records.calibration()],
        [records.failure_rules()],
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_database_of_every_older_schema_is_upgraded_whole(tmp_path, level, caplog):
    path = older(tmp_path, level)
    assert rows_in(path) == ROWS
    with closing(SqliteStore(path)) as store:
        is_whole(store)
        store.commit(Batch(records=[job(6)], history=[line(21, 6)]))
        assert store.check_integrity() == []
    assert rows_in(path) == {**ROWS, "jobs": 6, "history": 21}
    assert level_of(path) == NEWEST
    newest = level == NEWEST
    assert (tmp_path / f"phalanx.db.before-{level + 1}").exists() is not newest
    assert ("a copy of the old one" in caplog.text) is not newest


def test_an_older_database_is_as_its_migrations_made_it_and_each_is_applied_once(tmp_path):
    path = older(tmp_path)
    SqliteStore(path).close()
    SqliteStore(path).close()
    each_was_applied_once(path)


@pytest.mark.parametrize("level", [level for level in LEVELS if level < NEWEST])
def test_the_copy_is_the_database_as_it_was_and_can_be_upgraded_again(tmp_path, level):
    path = older(tmp_path, level)
    SqliteStore(path).close()
    copy = f"{path}.before-{level + 1}"
    assert stat.S_IMODE(os.stat(copy).st_mode) == 0o600
    assert rows_in(copy) == ROWS
    assert level_of(copy) == level
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(copy, other / "phalanx.db")
    with closing(SqliteStore(str(other / "phalanx.db"))) as store:
        is_whole(store)


def test_the_copy_put_back_in_the_place_of_the_database_is_taken_and_a_gap_is_no_new_beginning(tmp_path):
    path = older(tmp_path)
    SqliteStore(path).close()
    os.unlink(path)  # its lock file stays, as in the words of docs/operations.md
    with pytest.raises(StoreUnusable, match="it contained a database before"):
        SqliteStore(path)
    shutil.copy(path + ".before-2", path)
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    assert os.path.exists(path + ".before-2-2")


def test_no_room_for_the_copy_refuses_the_upgrade_and_changes_nothing(tmp_path):
    path = older(tmp_path)
    for name in (name for name in FAILPOINTS if name.startswith("upgrade.copy.") and name != "upgrade.copy.remove"):
        with armed(name, FailureMode.FULL), pytest.raises(StoreRefused, match="disk is full"):
            SqliteStore(path)
        assert level_of(path) == 1
    with closing(SqliteStore(path)) as store:
        is_whole(store)


UPGRADE = """
import sys
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract import later_release
later_release.install(setattr)
SqliteStore(sys.argv[1])
"""


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
    path = older(tmp_path)
    dies(UPGRADE, path, f"{name}=kill:{nth}")
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    copies = [file for file in os.listdir(tmp_path) if ".before-" in file]
    assert copies
    assert not any(file.endswith(".part") for file in copies)
    assert rows_in(str(tmp_path / "phalanx.db.before-2")) == ROWS
    each_was_applied_once(path)


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
def test_an_upgrade_that_is_killed_where_it_takes_half_a_copy_away_goes_on_at_the_next_start(tmp_path, failure):
    path = older(tmp_path)
    with open(path + ".before-2.part", "wb") as half:
        half.write(b"half")
    dies(UPGRADE, path, f"upgrade.copy.remove={failure.value}")
    with closing(SqliteStore(path)) as store:
        is_whole(store)
    assert rows_in(path + ".before-2") == ROWS


def test_a_database_that_was_not_upgraded_yet_is_not_backed_up(tmp_path):
    with pytest.raises(StoreUnusable, match=f"of an older release: migration 1 of {NEWEST}"):
        backup(DatabaseLocation(path=older(tmp_path)), str(tmp_path / "b.phx"), lambda *_: None)
    assert not (tmp_path / "b.phx").exists()


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not())
def test_an_old_database_moves_to_postgres(tmp_path):
    """The way of a site that began on SQLite."""
    from phalanx.store.sql.postgres.store import PostgresStore

    path = older(tmp_path)
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
