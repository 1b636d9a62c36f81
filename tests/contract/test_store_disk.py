"""SQLite on disks that fill up, fail, lose their power or flip bits: nothing acknowledged is lost, nothing else is half there."""

import os
import random
import shutil
import sqlite3
import stat
from pathlib import Path

import apsw
import pytest

from phalanx.core.errors import Conflict
from phalanx.core.ids import JobId, ProjectId, QueueId, UserId
from phalanx.failpoints import FAILPOINTS, FailureMode, armed
from phalanx.ports.store import Batch, JobFilter, JobOrder, StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql import reading
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.queries import SQLITE
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract.failing_disk import Disk
from tests.contract.records import attempt, dump, job, line, node, queue, submitted, token, user


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.unregister()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "phalanx.db")


def jobs_in(store):
    return len(store.jobs(JobFilter(limit=100_000)))


# ---- durable when it says so -----------------------------------------------------------------------------------------


def test_each_commit_syncs_the_wal_before_it_returns(disk, path):
    store = SqliteStore(path, vfs=disk.name)
    for seq in range(1, 4):
        disk.syncs.clear()
        store.commit(submitted(seq))
        assert disk.syncs == [path + "-wal"]
        assert path + "-wal" not in disk.written
    store.close()


def test_files_are_readable_by_their_owner_alone(path):
    store = SqliteStore(path)
    store.commit(submitted(1))
    modes = {
        name: stat.S_IMODE(os.stat(os.path.join(os.path.dirname(path), name)).st_mode)
        for name in os.listdir(os.path.dirname(path))
    }
    store.close()
    assert {"phalanx.db", "phalanx.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_power_cut_at_any_write_keeps_what_was_acknowledged(tmp_path, disk):
    """Each run cuts the power before another operation of a life of eight commits with checkpoints, and tries several leftovers."""
    base = tmp_path / "base.db"
    SqliteStore(str(base)).close()
    lives = set()
    for run, cut_at in enumerate(range(1, 400, 8)):
        home = tmp_path / f"run-{run}"
        home.mkdir()
        path = str(home / "phalanx.db")
        shutil.copy(base, path)
        disk.operations, disk.cut_at = 0, None
        disk.synced.clear()
        disk.written.clear()
        acknowledged = _live(path, disk, cut_at)
        lives.add(acknowledged)
        for seed in range(2):
            folder = tmp_path / f"image-{run}-{seed}"
            folder.mkdir()
            disk.image(str(folder), seed)
            _same_as_acknowledged(str(folder / "phalanx.db"), acknowledged)
    assert lives == set(range(0, 25, 3)), "some commits were never interrupted: widen the range of operations"


def _live(path, disk, cut_at):
    store, acknowledged = SqliteStore(path, vfs=disk.name), 0
    assert store._writer is not None
    store._writer.wal_autocheckpoint(30)  # several checkpoints in so short a life
    disk.cut_at = disk.operations + cut_at
    try:
        for seq in range(1, 25, 3):
            store.commit(submitted(seq, 3))
            acknowledged = seq + 2
    except StoreRefused:
        pass
    store.close()
    return acknowledged


def _same_as_acknowledged(path, acknowledged):
    store = SqliteStore(path)
    held = jobs_in(store)
    assert held in (acknowledged, acknowledged + 3), f"{held} jobs after {acknowledged} were acknowledged"
    assert [line.seq for line in store.history()] == list(range(1, held + 1))
    store.commit(submitted(held + 1))
    store.close()


def test_a_torn_wal_keeps_a_whole_beginning(tmp_path, path):
    store = SqliteStore(path)
    for seq in range(1, 11):
        store.commit(submitted(seq))
    copy = tmp_path / "copy"
    copy.mkdir()
    sizes = os.path.getsize(path + "-wal")
    for size in (*range(0, sizes, sizes // 12), sizes - 1):
        shutil.copy(path, copy / "phalanx.db")
        shutil.copy(path + "-wal", copy / "phalanx.db-wal")
        os.truncate(copy / "phalanx.db-wal", size)
        torn = SqliteStore(str(copy / "phalanx.db"))
        held = torn.jobs(JobFilter())
        assert [job.seq for job in held] == list(range(len(held), 0, -1))
        assert len(torn.history()) == len(held)
        torn.close()
        shutil.rmtree(copy)
        copy.mkdir()
    store.close()


# ---- full and failing disks ------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_whole_batches_and_goes_on_when_there_is_room(disk, path):
    store = SqliteStore(path, vfs=disk.name)
    store.commit(submitted(1, 5))
    before = dump(store)
    for room in (0, 3_000, 20_000, 60_000):
        disk.room = room
        with pytest.raises(StoreRefused, match="disk is full"):
            store.commit(submitted(6, 200))
        assert dump(store) == before
    disk.room = None
    store.commit(submitted(6, 200))
    assert jobs_in(store) == 205
    assert store.check_integrity() == []
    store.close()
    again = SqliteStore(path)
    assert jobs_in(again) == 205
    again.close()


FAILING = [
    (name, failure, nth)
    for name, failures in FAILPOINTS.items()
    if name.startswith("store.commit.")
    for failure in sorted(failures & {FailureMode.ERROR, FailureMode.FULL})
    for nth in ((1, 2, 3) if name == "store.commit.rows" else (1,))
]


@pytest.mark.parametrize(("name", "failure", "nth"), FAILING)
def test_a_commit_that_fails_anywhere_is_refused_whole_and_may_be_repeated(path, name, failure, nth):
    store = SqliteStore(path)
    store.commit(submitted(1, 3))
    before = dump(store)
    with armed(name, failure, nth), pytest.raises(StoreRefused):
        store.commit(submitted(4, 3))
    assert dump(store) == before
    store.commit(submitted(4, 3))
    assert jobs_in(store) == 6
    store.close()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, failures in FAILPOINTS.items()
        if name.startswith(("store.open", "store.migrate")) and FailureMode.FULL in failures
    ],
)
def test_a_start_that_fails_anywhere_is_refused_and_may_be_repeated(path, name):
    with armed(name, FailureMode.FULL), pytest.raises(StoreRefused, match="disk is full"):
        SqliteStore(path)
    store = SqliteStore(path)
    store.commit(submitted(1))
    store.close()


def test_a_failed_sync_refuses_the_batch_also_after_a_crash(tmp_path, disk, path):
    store = SqliteStore(path, vfs=disk.name)
    store.commit(submitted(1, 5))
    disk.fail_syncs = True
    with pytest.raises(StoreRefused, match="the database failed"):
        store.commit(submitted(6, 5))
    assert jobs_in(store) == 5
    disk.fail_syncs = False
    with pytest.raises(StoreRefused, match="does not follow"):
        store.commit(Batch(history=[line(99)]))  # writes nothing, but settles what the failure left
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in ("phalanx.db", "phalanx.db-wal"):
        shutil.copy(tmp_path / name, crashed / name)
    survivor = SqliteStore(str(crashed / "phalanx.db"))
    assert jobs_in(survivor) == 5
    survivor.close()
    store.commit(submitted(6, 5))
    assert jobs_in(store) == 10
    store.close()


def test_a_connection_that_broke_is_replaced_by_the_next_commit(path):
    store = SqliteStore(path)
    store.commit(submitted(1))
    store._writer = None  # as after a rollback that failed
    store.commit(submitted(2))
    assert jobs_in(store) == 2
    store._writer = None
    with armed("store.open.begin", FailureMode.ERROR), pytest.raises(StoreRefused):
        store.commit(submitted(3))
    store.commit(submitted(3))
    store.close()


def test_no_room_at_the_start_is_said_and_leaves_nothing_in_the_way(disk, path):
    disk.room = 8192
    with pytest.raises(StoreRefused, match="disk is full"):
        SqliteStore(path, vfs=disk.name)
    disk.room = None
    store = SqliteStore(path, vfs=disk.name)
    store.commit(submitted(1))
    store.close()


# ---- what is not a sound database of ours ----------------------------------------------------------------------------


def test_two_heads_never_share_a_database(path):
    store = SqliteStore(path)
    with pytest.raises(Conflict, match="in use by another head"):
        SqliteStore(path)
    store.close()
    SqliteStore(path).close()


def test_a_newer_database_is_refused(path):
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO migrations VALUES (99, '0099_later', 'x', 0)")
    connection.close()
    with pytest.raises(StoreUnusable, match=r"newer Phalanx: it has migration 99"):
        SqliteStore(path)


def test_a_database_made_by_another_first_migration_is_refused(path):
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE migrations SET sha256 = 'x'")
    connection.close()
    with pytest.raises(StoreUnusable, match="differs from this release's 0001_initial"):
        SqliteStore(path)


def test_a_database_of_something_else_is_left_alone(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreUnusable, match="database of another program"):
        SqliteStore(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]
    connection.close()


def test_a_file_that_is_no_database_is_refused(path):
    with open(path, "wb") as file:
        file.write(b"a letter to somebody\n" * 400)
    with pytest.raises(StoreUnusable, match="damaged"):
        SqliteStore(path)


def test_an_older_database_is_upgraded_and_a_failed_upgrade_leaves_it_as_it_was(path, monkeypatch):
    from phalanx.store.sql import migrations as module
    from phalanx.store.sql.sqlite import connections

    SqliteStore(path).close()
    known = migrations("sqlite")
    following = len(known) + 1
    bad = module.Migration(following, "bad", "CREATE TABLE half (x); CREATE TABLE half (x);")
    monkeypatch.setattr(connections, "migrations", lambda dialect: (*known, bad))
    with pytest.raises(StoreRefused, match="half already exists"):
        SqliteStore(path)
    good = module.Migration(following, "good", "CREATE TABLE whole (x INTEGER) STRICT;")
    monkeypatch.setattr(connections, "migrations", lambda dialect: (*known, good))
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
        assert connection.execute("SELECT number, name FROM migrations").fetchall() == [
            *((one.number, one.name) for one in known),
            (following, "good"),
        ]
    connection.close()
    assert "whole" in names
    assert "half" not in names
    monkeypatch.undo()
    with pytest.raises(StoreUnusable, match="newer"):
        SqliteStore(path)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(path):
    store = SqliteStore(path)
    store.commit(Batch(records=[user(), token(), queue(), node("n0")]))
    store.commit(submitted(1, 30))
    store.commit(Batch(records=[attempt(seq, node="n0", devices=()) for seq in range(1, 9)]))
    content = dump(store)
    store.close()
    return path, content


def reads_the_same_or_refuses(path, content):
    """Whether damage was refused; damage that changes an answer fails the test."""
    try:
        store = SqliteStore(path)
    except (StoreUnusable, StoreRefused):
        return True
    try:
        found = dump(store)
    except (StoreUnusable, StoreRefused):
        return True
    finally:
        store.close()
    assert found == content
    return False


def test_flipped_bits_change_no_answer(filled, tmp_path):
    path, content = filled
    whole = Path(path).read_bytes()
    written = [place for place, byte in enumerate(whole) if byte]  # most of each table's pages is empty
    dice = random.Random(20)
    refused = 0
    for number in range(120):
        damaged = bytearray(whole)
        at = dice.choice(written) if number % 4 else dice.randrange(200)
        damaged[at] ^= 1 << dice.randrange(8)
        copy = str(tmp_path / f"flipped-{number}.db")
        with open(copy, "wb") as file:
            file.write(damaged)
        refused += reads_the_same_or_refuses(copy, content)
    assert refused > 30


def test_a_truncated_database_is_refused(filled, tmp_path):
    path, content = filled
    whole = Path(path).read_bytes()
    dice = random.Random(21)
    for number in range(25):
        size = dice.randrange(1, len(whole))
        copy = str(tmp_path / f"short-{number}.db")
        with open(copy, "wb") as file:
            file.write(whole[:size])
        assert reads_the_same_or_refuses(copy, content), f"{size} of {len(whole)} bytes were taken for a database"


def test_a_column_that_contradicts_its_document_is_refused(filled):
    path, _ = filled
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE jobs SET epoch = 5 WHERE seq = 3")
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(StoreUnusable, match="job 3: its columns"):
        store.load()
    store.close()


def test_a_document_that_was_edited_is_refused_by_name(filled):
    path, _ = filled
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE jobs SET doc = replace(doc, 'ann', 'eve') WHERE seq = 3")
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(StoreUnusable, match="kind job is damaged"):
        store.job(JobId("3"))
    assert store.job(JobId("4")) == job(4)
    store.close()


# ---- how it asks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        JobFilter(),
        JobFilter(user=UserId("ann")),
        JobFilter(project=ProjectId("p"), before_seq=9),
        JobFilter(queue=QueueId("q")),
        JobFilter(name="n"),
        JobFilter(user=UserId("ann"), queue=QueueId("q")),
        *(JobFilter(order=order) for order in JobOrder),
        JobFilter(order=JobOrder.NAME, ascending=True, after=("n", 3)),
        JobFilter(order=JobOrder.GPUS, after=(8000, 3)),
        JobFilter(order=JobOrder.USER, user=UserId("ann"), after=("ann", 9)),
    ],
)
def test_no_list_of_jobs_reads_the_whole_table_or_sorts_a_state(path, wanted):
    store = SqliteStore(path)
    plan: list[tuple[int, str]] = []

    def explain(sql, values=()):
        plan.extend((up, step) for _, up, _, step in connection.execute("EXPLAIN QUERY PLAN " + sql, values))
        return []

    connection = apsw.Connection(path)
    reading.list_jobs(reading.SqlReader(SQLITE, explain), wanted)
    connection.close()
    store.close()
    searches = [(up, step) for up, step in plan if "SEARCH jobs USING" in step and "PRIMARY KEY" not in step]
    assert len(searches) == 6, plan
    assert not any(step.startswith("SCAN jobs") for _, step in plan), plan
    sorted_inside = [step for up, step in plan if "TEMP B-TREE" in step and up in {inside for inside, _ in searches}]
    assert sorted_inside == []


def test_jobs_that_ended_lately_are_found_by_their_end(path):
    store = SqliteStore(path)
    plan: list[str] = []

    def explain(sql, values=()):
        plan.extend(step for *_, step in connection.execute("EXPLAIN QUERY PLAN " + sql, values))
        return []

    connection = apsw.Connection(path)
    for owner in (None, UserId("ann")):
        reading.list_jobs(reading.SqlReader(SQLITE, explain), JobFilter(user=owner, ended_since_s=1.0))
    connection.close()
    store.close()
    assert not any("jobs_by_state" in step or "SCAN jobs" in step for step in plan), plan
    assert sum("jobs_by_end" in step for step in plan) >= 6, plan
