"""Backup and restore, of either database into either: what comes back is what was there, or it is refused and nothing has changed."""

import fcntl
import gzip
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import apsw
import msgspec
import pytest

from phalanx.core.access.audit import AuditLine
from phalanx.core.errors import BadFile, Conflict, NotFound
from phalanx.core.ids import TokenId, UserId
from phalanx.core.state.records import IDEMPOTENCY, RESERVATIONS
from phalanx.core.work.states import AttemptState
from phalanx.failpoints import (
    ENVIRONMENT_VARIABLE,
    FAILPOINTS,
    FailureMode,
    armed,
    around,
)
from phalanx.ports.store import Batch, JobFilter, StaleLeader, StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.backups import (
    DatabaseLocation,
    backup,
    check,
    restore,
)
from phalanx.store.sql.sqlite import connections
from phalanx.store.sql.sqlite.store import SqliteStore
from phalanx.store.unknown_files import describe_unknown
from tests import postgres_here
from tests.contract.cut_wire import Wire
from tests.contract.records import (
    RUNNING,
    SUCCEEDED,
    attempt,
    dump,
    job,
    key,
    line,
    node,
    one_of_each_kind,
    queue,
    reservation,
    scoped_token,
    submitted,
)


def quiet(done, of):
    assert 0 <= done <= of


def slow(done, of):
    time.sleep(0.4)


def opened(place):
    if place.dsn:
        from phalanx.store.sql.postgres.store import PostgresStore

        return closing(PostgresStore(place.dsn))
    return closing(SqliteStore(place.path))


def fill(place, lines=2499):
    """Some of everything; keys in an order that is not theirs by name."""
    with opened(place) as store:
        more = [queue("ünï"), scoped_token(), node("n1"), reservation("over", ended=True)]
        store.commit(Batch(records=[*one_of_each_kind(), *more]))
        store.commit(
            Batch(
                records=[job(1, RUNNING, epoch=2), attempt(1, 1, AttemptState.ENDED), attempt(1, 2), key(1, word="z")]
            )
        )
        second = job(2, SUCCEEDED)
        second = replace(second, spec=replace(second.spec, labels=(("exp", "7"),)))
        store.commit(Batch(records=[second, key(2, word="a"), job(3, name='naïve \\ "quoted"\n\t\0'[:-1])]))
        store.commit(
            Batch(history=[line(seq, seq % 4 or None, "n0" if seq % 2 else None) for seq in range(1, lines + 1)])
        )
        store.commit(Batch(audit=[audit_line(seq) for seq in range(1, 4)]))
        return everything(store)


def audit_line(seq):
    return AuditLine(
        seq=seq,
        at_s=10.0 + seq,
        user=UserId("ann"),
        token_id=TokenId("t1"),
        origin="127.0.0.1",
        action="PUT /v1/users",
        target="bob",
        detail="role user",
        result="done",
        mac=f"{seq:064x}",
    )


def rows_in(place):
    """How many rows each table has, by the database's own list of tables; without what belongs to the database and not to the records."""
    if place.dsn:
        execute, name = postgres_here.server().execute, place.dsn.rpartition("/")[2]
        tables = [row[0] for row in execute("SELECT tablename FROM pg_tables WHERE schemaname = 'phalanx'", name)]
        counts = {table: execute(f"SELECT count(*) FROM phalanx.{table}", name)[0][0] for table in tables}
    else:
        with closing(sqlite3.connect(place.path)) as connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            counts = {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
    return {table: count for table, count in counts.items() if table not in NOT_RECORDS}


# Of the database itself: its schema, who leads, which heads there are and what they share; and the history of devices, which is no record.
NOT_RECORDS = {"migrations", "leader", "last_commit", "heads", "shared", "history_chunks"}


def everything(store):
    keys = list(store.load().table(IDEMPOTENCY))
    return {
        **dump(store),
        "order of keys": keys,
        "over": store.record(RESERVATIONS, "over"),
        "long": len(store.history(limit=10**6)),
    }


@pytest.mark.parametrize("source", ["sqlite", "postgres"])
@pytest.mark.parametrize("target", ["sqlite", "postgres"])
def test_what_was_backed_up_comes_back_in_either_database(places, tmp_path, source, target):
    before, after, file = places(source), places(target, ready=False), str(tmp_path / "b.phx")
    held = fill(before)
    manifest = backup(before, file, quiet)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert (manifest.database, manifest.counts["job"], manifest.counts["history line"], manifest.last_job_seq) == (
        source,
        3,
        2499,
        3,
    )
    assert check(file, quiet) == manifest
    done = restore(file, after, quiet, replace=False)
    assert done.aside == ""
    assert rows_in(after) == rows_in(before)
    assert 0 not in rows_in(before).values(), "a table without a row here would not be missed: fill it"
    with opened(after) as store:
        assert everything(store) == held
        store.commit(Batch(records=[job(4), key(4)], history=[line(2500, 4)]))
    again = str(tmp_path / "again.phx")
    backup(after, again, quiet)
    assert check(again, quiet).counts["history line"] == 2500


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_head_that_runs_is_backed_up_as_of_one_moment(places, tmp_path, kind):
    place, stop, sizes = places(kind), threading.Event(), []
    with opened(place) as store:
        written = [5]
        store.commit(submitted(1, 5))

        def work():
            while not stop.is_set():
                store.commit(submitted(written[-1] + 1, 5))
                written.append(written[-1] + 5)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for number in range(4):
                backup(place, str(tmp_path / f"{number}.phx"), quiet)
                goes_on(written)
        finally:
            stop.set()
            worker.join(30)
    for number in range(4):
        target = places("sqlite")
        restore(str(tmp_path / f"{number}.phx"), target, quiet, replace=False)
        with opened(target) as store:
            count = len(store.jobs(JobFilter(limit=10**6)))
            assert count % 5 == 0
            assert [told.seq for told in store.history(limit=10**6)] == list(range(1, count + 1))
            sizes.append(count)
    assert sizes == sorted(set(sizes)), "the head wrote between any two"


def goes_on(written):
    """Two commits from now, so that one has begun after now."""
    wanted, end_s = len(written) + 2, time.monotonic() + 30
    while len(written) < wanted:
        assert time.monotonic() < end_s, "the head writes no more"
        time.sleep(0.001)


@pytest.mark.parametrize("act", ["backup", "restore"])
def test_a_slow_disk_between_two_statements_ends_neither_a_backup_nor_a_restore(places, tmp_path, monkeypatch, act):
    """PostgreSQL lets go of a head that says nothing in a transaction; these have no head's hurry."""
    place, file = places("postgres"), str(tmp_path / "b.phx")
    held = fill(place, lines=40)
    from phalanx.store.sql.postgres import connections as to_postgres

    monkeypatch.setattr(to_postgres, "IDLE_IN_TRANSACTION_MAX_S", 0.1)
    backup(place, file, slow if act == "backup" else quiet)
    restore(file, place, slow if act == "restore" else quiet, replace=True)
    with opened(place) as store:
        assert everything(store) == held


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_nothing_is_replaced_unless_told_and_what_was_there_is_kept(places, tmp_path, kind):
    place, file = places(kind), str(tmp_path / "b.phx")
    with opened(place) as store:
        store.commit(submitted(1, 3))
    backup(place, file, quiet)
    with pytest.raises(Conflict, match="already exists"):
        backup(place, file, quiet)
    with opened(place) as store:
        store.commit(submitted(4, 3))
        with pytest.raises(Conflict, match="use"):
            restore(file, place, quiet, replace=True)
    with pytest.raises(Conflict, match="already") as caught:
        restore(file, place, quiet, replace=False)
    assert "replace" in caught.value.hint
    done = restore(file, place, quiet, replace=True)
    with opened(place) as store:
        assert len(store.jobs(JobFilter())) == 3
    if kind == "sqlite":
        with opened(DatabaseLocation(path=done.aside)) as kept:
            assert len(kept.jobs(JobFilter())) == 6
    else:
        kept = postgres_here.server().execute(f"SELECT count(*) FROM {done.aside}.jobs", place.dsn.rpartition("/")[2])
        assert kept == [(6,)]


def test_a_restore_puts_every_table_of_records_aside(places):
    place = places("postgres")
    from phalanx.store.sql.postgres.restoring import TABLES

    assert sorted(TABLES) == sorted(rows_in(place)), "what is not there is mixed with what is restored"


def test_a_head_that_was_cut_off_during_a_restore_writes_nothing_more(places, tmp_path):
    place, file = places("postgres"), str(tmp_path / "b.phx")
    with opened(place) as store:
        store.commit(submitted(1))
        backup(place, file, quiet)
        store._drop()  # its cable is cut: the server does not see it
        store._readers.close()
        restore(file, place, quiet, replace=True)
        with pytest.raises(StaleLeader):
            store.commit(submitted(2))


def test_a_head_that_starts_during_a_restore_writes_nothing_into_it(places, tmp_path, monkeypatch):
    source, target, file = places("postgres"), places("postgres"), str(tmp_path / "b.phx")
    held = fill(source, lines=40)
    backup(source, file, quiet)
    from phalanx.store.sql.postgres import connections as to_postgres
    from phalanx.store.sql.postgres.store import PostgresStore

    monkeypatch.setattr(to_postgres, "LOCK_WAIT_MAX_S", 0.2)
    with opened(target) as store:
        term = store.term
    told: list[int] = []

    def start(done, of):
        told.append(done)
        if len(told) == 2:  # the file has been read to its end, and its records are being written
            with (
                closing(PostgresStore(target.dsn, term=term)) as late,
                pytest.raises(StoreRefused, match="took too long"),
            ):
                late.commit(submitted(1))

    restore(file, target, start, replace=False)
    assert len(told) == 2
    with opened(target) as store:
        assert everything(store) == held


def test_a_restore_that_a_head_is_in_the_way_of_brings_no_schema_up_to_date(places, tmp_path, monkeypatch):
    """The head may be of an older release, and would not know the new schema."""
    place, file = places("postgres"), str(tmp_path / "b.phx")
    fill(place, lines=40)
    backup(place, file, quiet)
    from phalanx.store.sql.migrations import Migration, migrations
    from phalanx.store.sql.postgres import connections as to_postgres

    later = (*migrations("postgres"), Migration(99, "later", "CREATE TABLE later (x int)"))
    with opened(place) as store:
        monkeypatch.setattr(to_postgres, "migrations", lambda dialect: later)
        with pytest.raises(Conflict, match="a head uses the database"):
            restore(file, place, quiet, replace=True)
        monkeypatch.undo()
        store.commit(Batch(records=[job(4)]))
    assert "later" not in rows_in(place)


def test_a_backup_that_is_damaged_or_none_is_refused_before_anything_is_touched(places, tmp_path):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place)
    backup(place, file, quiet)
    with open(file, "rb") as source:
        whole = source.read()
    dice, bad = random.Random(3), str(tmp_path / "bad.phx")
    damaged = [whole[: dice.randrange(len(whole))] for _ in range(25)]
    # All of gzip's own end, and of the rest all but the byte before it, which may have bits that say nothing.
    places_hit = [*range(len(whole) - 8, len(whole)), *(dice.randrange(10, len(whole) - 9) for _ in range(60))]
    for at in places_hit:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << dice.randrange(8)
        damaged.append(bytes(flipped))
    target = places("sqlite")
    for content in [*damaged, b"", b"a letter", gzip.compress(b"a letter\n"), gzip.compress(b"")]:
        with open(bad, "wb") as out:
            out.write(content)
        with pytest.raises(BadFile) as caught:
            restore(bad, target, quiet, replace=False)
        assert caught.value.hint
    assert not os.path.exists(target.path)


def test_lines_that_were_edited_left_out_or_added_are_seen(places, tmp_path):
    """Whoever unpacks, edits and packs again is told; gzip's own checksum is sound then."""
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place)
    backup(place, file, quiet)
    with gzip.open(file) as packed:
        lines = packed.readlines()
    for edited in (
        lines[:5] + lines[6:],
        [*lines[:5], lines[5], *lines[5:]],
        [text.replace(b"ann", b"eve") for text in lines],
        lines[:-1],
        [*lines[:-1], b"{}\n"],
        [*lines, lines[5]],
        [*lines, lines[-1]],
        [*lines[:3], b'["riddle",{}]\n', *lines[3:]],
        [*lines[:3], b"[", *lines[3:]],
    ):
        with gzip.open(file, "wb") as packed:
            packed.writelines(edited)
        with pytest.raises(BadFile, match="damaged"):
            check(file, quiet)


def test_a_backup_of_a_newer_release_is_refused(places, tmp_path):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place)
    backup(place, file, quiet)
    with gzip.open(file) as packed:
        first, *rest = packed.readlines()
    for change in ({"migration": 99}, {"version": 2}, {"database": "cuneiform"}):
        with gzip.open(file, "wb") as packed:
            packed.writelines([msgspec.json.encode({**msgspec.json.decode(first), **change}) + b"\n", *rest])
        with pytest.raises(BadFile, match="newer Phalanx"):
            restore(file, places("sqlite"), quiet, replace=False)


def test_a_damaged_database_gives_no_backup(places, tmp_path):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place)
    with sqlite3.connect(place.path) as connection:
        connection.execute("UPDATE jobs SET doc = replace(doc, 'ann', 'eve') WHERE seq = 2")
    connection.close()
    with pytest.raises(StoreUnusable, match="kind job is damaged"):
        backup(place, file, quiet)
    assert os.listdir(tmp_path) == ["db0"]


def test_a_damaged_database_is_set_aside_by_a_restore(places, tmp_path):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    held = fill(place)
    backup(place, file, quiet)
    with open(place.path, "r+b") as database:
        database.write(b"noise" * 1000)
    done = restore(file, place, quiet, replace=True)
    with opened(place) as store:
        assert everything(store) == held
    with open(done.aside, "rb") as kept:
        assert kept.read(5) == b"noise"


def left_by_a_crash(place):
    """The WAL of a head that was killed, beside its database."""
    with opened(place) as store:
        store.commit(Batch(records=[job(50)]))
        with open(place.path + "-wal", "rb") as file:
            wal = file.read()
    with open(place.path + "-wal", "wb") as file:
        file.write(wal)
    return wal


@pytest.mark.parametrize("lost", [os.unlink, lambda path: os.truncate(path, 0)], ids=["gone", "empty"])
def test_a_database_that_was_lost_is_restored_and_no_old_wal_comes_into_it(places, tmp_path, lost):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    held = fill(place)
    backup(place, file, quiet)
    wal = left_by_a_crash(place)
    lost(place.path)
    with pytest.raises(StoreUnusable, match="it contained a database before"):
        SqliteStore(place.path)
    with pytest.raises(NotFound, match="no database"):
        backup(place, str(tmp_path / "of-nothing.phx"), quiet)
    done = restore(file, place, quiet, replace=False)
    with opened(place) as store:
        assert everything(store) == held
        assert store.check_integrity() == []
    assert done.aside.endswith("-wal")
    with open(done.aside, "rb") as kept:
        assert kept.read() == wal


def test_what_was_restored_into_an_empty_folder_is_missed_when_it_is_lost(places, tmp_path):
    source, target, file = places("sqlite"), places("sqlite"), str(tmp_path / "b.phx")
    fill(source, lines=40)
    backup(source, file, quiet)
    restore(file, target, quiet, replace=False)
    assert sorted(os.listdir(os.path.dirname(target.path))) == ["phalanx.db", "phalanx.db.lock"]
    os.unlink(target.path)
    with pytest.raises(StoreUnusable, match="it contained a database before"):
        SqliteStore(target.path)


def test_a_restored_database_is_put_in_place_with_its_wal_in_it_or_not_at_all(places, tmp_path, monkeypatch):
    """Who has it open meanwhile keeps the WAL out of the file, as a full disk does, and it is the file alone that gets the name."""
    source, target, file = places("sqlite"), places("sqlite"), str(tmp_path / "b.phx")
    held = fill(source, lines=40)
    backup(source, file, quiet)
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_MS", 100)
    with ExitStack() as looking:

        def look(*_):
            if os.path.exists(target.path + ".restoring"):
                reader = looking.enter_context(closing(apsw.Connection(target.path + ".restoring")))
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM jobs").fetchall()

        with pytest.raises(StoreRefused, match="locked by another process"):
            restore(file, target, look, replace=False)
        assert not os.path.exists(target.path)
    restore(file, target, quiet, replace=False)
    with opened(target) as store:
        assert everything(store) == held


def test_no_database_is_said(tmp_path):
    with pytest.raises(NotFound, match="no database"):
        backup(DatabaseLocation(path=str(tmp_path / "none.db")), str(tmp_path / "b.phx"), quiet)


def test_a_full_disk_leaves_no_half_backup(places, tmp_path):
    place = places("sqlite")
    fill(place)
    for name in ("backup.create", "backup.write", "backup.sync", "backup.rename"):
        with armed(name, FailureMode.FULL), pytest.raises(StoreRefused):
            backup(place, str(tmp_path / "b.phx"), quiet)
        assert os.listdir(tmp_path) == ["db0"]


def test_a_backup_that_becomes_whole_under_the_hand_of_another_stays_as_it_is(places, tmp_path, monkeypatch):
    """Between the look for a file of this name and the lock of its part, another backup of the same name ended."""
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place)
    flock = fcntl.flock

    def and_it_ends(fd, how):
        with open(file + ".part", "wb") as part:
            part.write(b"a whole backup")
        os.rename(file + ".part", file)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", and_it_ends)
    with pytest.raises(Conflict, match="another backup is writing"):
        backup(place, file, quiet)
    with open(file, "rb") as kept:
        assert kept.read() == b"a whole backup"


def test_a_restore_whose_last_answer_is_lost_does_not_say_that_nothing_was_written(places, tmp_path, monkeypatch):
    source, target, file = places("sqlite"), places("postgres"), str(tmp_path / "b.phx")
    held = fill(source, lines=40)
    backup(source, file, quiet)
    from phalanx.store.sql.postgres import restoring

    wire = Wire(target.dsn)

    def losing(name):
        wire.deaf = wire.deaf or name == "restore.end"
        return around(name)

    monkeypatch.setattr(restoring, "around", losing)
    with closing(wire), pytest.raises(StoreRefused, match="outcome is unknown") as caught:
        restore(file, DatabaseLocation(dsn=wire.dsn), quiet, replace=True)
    assert "replace" in caught.value.hint
    assert not wire.deaf, "no answer was lost"
    with opened(target) as store:
        assert everything(store) == held
    restore(file, target, quiet, replace=True)
    with opened(target) as store:
        assert everything(store) == held


# ---- killed in the middle --------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from phalanx.store.sql.backups import DatabaseLocation, backup, restore
what, path, file = sys.argv[1:]
place = DatabaseLocation(dsn=path) if path.startswith("postgresql") else DatabaseLocation(path=path)
backup(place, file, print) if what == "backup" else restore(file, place, print, replace=True)
"""
# Passed only where something lies in the way, and what; each has a test of its own below.
IN_THE_WAY = {
    "restore.wal.rename": "of a database that was lost",
    "restore.shm.remove": "of a database that was lost",
    "restore.remove": "of a restore that was killed",
    "backup.take_back.remove": "half a file",
}
OF_POSTGRES = {
    name
    for name in FAILPOINTS
    if name
    in {
        "restore.put",
        "restore.term",
        "restore.end",
        "restore.schema",
        "restore.copy",
        "restore.truncate",
    }
}


def ways(part):
    """(point, failure): before every write, and after those that make a name or end a transaction."""
    ends = (".rename", ".aside", ".commit", ".end", ".truncate")
    return [
        (name, failure)
        for name in sorted(FAILPOINTS)
        if name.startswith(part) and name not in IN_THE_WAY
        for failure in (FailureMode.KILL, FailureMode.AFTER)
        if failure is FailureMode.KILL or name.endswith(ends)
    ]


def killed(what, place, file, point, failure):
    environment = {**os.environ, ENVIRONMENT_VARIABLE: f"{point}={failure.value}"}
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, place.dsn or place.path, file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, f"{point} was not reached: {child.stderr}"


@pytest.mark.parametrize(("point", "failure"), ways("backup."))
def test_a_backup_that_is_killed_leaves_a_whole_file_or_none_under_its_name(places, tmp_path, point, failure):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place, lines=40)
    killed("backup", place, file, point, failure)
    if os.path.exists(file):
        check(file, quiet)
    else:
        backup(place, file, quiet)
    assert not os.path.exists(file + ".part")


@pytest.mark.parametrize(("point", "failure"), ways("restore."))
def test_a_restore_that_is_killed_leaves_the_old_records_or_the_new_ones(places, tmp_path, point, failure):
    place, file = places("postgres" if point in OF_POSTGRES else "sqlite"), str(tmp_path / "b.phx")
    held = fill(place, lines=40)
    backup(place, file, quiet)
    with opened(place) as store:
        store.commit(Batch(records=[job(7)]))
        later = everything(store)
    killed("restore", place, file, point, failure)
    with opened(place) as store:
        assert everything(store) in (held, later)
    restore(file, place, quiet, replace=True)
    with opened(place) as store:
        assert everything(store) == held


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
@pytest.mark.parametrize("point", ["restore.wal.rename", "restore.shm.remove"])
def test_a_restore_of_a_lost_database_that_is_killed_lets_no_head_begin_anew(places, tmp_path, point, failure):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    held = fill(place, lines=40)
    backup(place, file, quiet)
    left_by_a_crash(place)
    os.unlink(place.path)
    with open(place.path + "-shm", "wb") as shm:
        shm.write(b"left")
    killed("restore", place, file, point, failure)
    with pytest.raises(StoreUnusable, match="it contained a database before"):
        SqliteStore(place.path)
    restore(file, place, quiet, replace=True)
    with opened(place) as store:
        assert everything(store) == held


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
def test_a_restore_that_is_killed_where_it_takes_away_what_another_left_may_be_repeated(places, tmp_path, failure):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    held = fill(place, lines=40)
    backup(place, file, quiet)
    for name in (".restoring", ".restoring-wal"):
        with open(place.path + name, "wb") as left:
            left.write(b"half of it")
    killed("restore", place, file, "restore.remove", failure)
    with opened(place) as store:
        assert everything(store) == held
    restore(file, place, quiet, replace=True)
    with opened(place) as store:
        assert everything(store) == held


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
def test_a_backup_that_failed_and_is_killed_where_it_takes_its_half_back_may_be_repeated(places, tmp_path, failure):
    place, file = places("sqlite"), str(tmp_path / "b.phx")
    fill(place, lines=40)
    killed("backup", place, file, "backup.write=error,backup.take_back.remove", failure)
    assert not os.path.exists(file)
    backup(place, file, quiet)
    check(file, quiet)
    assert not os.path.exists(file + ".part")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_of_jobs_that_the_database_has_lost_are_named_and_stay(tmp_path):
    known = ["checkpoints/8-k/epoch-1-k", "logs/.tmp", "logs/5_11-k/epoch-1-k", "outputs/.from", "outputs/8-old"]
    lost = [
        "checkpoints/9-old/epoch-1-old",
        "logs/9_0-old/epoch-1-old",
        *(f"outputs/{number}-old" for number in range(9, 21)),
    ]
    for path in (*known, *lost):
        (tmp_path / path).mkdir(parents=True)
    logs, outputs, checkpoints = describe_unknown(str(tmp_path), 8)
    assert logs.startswith(f"{tmp_path}/logs contains files of jobs that the database does not know: 9_0-old. ")
    assert " and 2 more. " in outputs
    assert "9-old" in checkpoints
    assert all((tmp_path / path).is_dir() for path in (*known, *lost))
    assert describe_unknown(str(tmp_path), 20) == describe_unknown(str(tmp_path / "nothing"), 0) == []
