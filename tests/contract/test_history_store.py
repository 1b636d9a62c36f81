"""One suite for every history store, and what only the file on this machine can go through: damage, a full disk, a place that cannot be written."""

import os

import pytest

from phalanx.failpoints import FailureMode, armed
from phalanx.ports.history import ChunkKind, HistoryUnavailable, StoredChunk
from phalanx.store.history.memory import MemoryHistory
from phalanx.store.sql.sqlite.history_file import HistoryFile
from tests import postgres_here

TEN, FIVE, JOBS = ChunkKind.TEN_SECONDS, ChunkKind.FIVE_MINUTES, ChunkKind.JOB_CURVE
here = pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here")


@pytest.fixture(params=["memory", "file", pytest.param("postgres", marks=here)])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryHistory()
        return
    if request.param == "file":
        opened = HistoryFile(str(tmp_path / "history.db"))
        yield opened
        opened.close()
        return
    from phalanx.store.sql.postgres.history_table import HistoryTable
    from phalanx.store.sql.postgres.store import PostgresStore

    dsn = postgres_here.server().fresh()
    records = PostgresStore(dsn)
    table = HistoryTable(dsn, term=records.term)
    yield table
    table.close()
    records.close()
    postgres_here.server().drop(dsn)


def chunk(series="n0", begin_s=0, kind=TEN, data=b"\x00some bytes\xff", *, pending=False):
    return StoredChunk(series=series, kind=kind, begin_s=begin_s, data=data, pending=pending)


def test_chunks_of_a_span_are_read_by_time(store):
    chunks = [chunk(begin_s=begin_s) for begin_s in (7200, 0, 3600)]
    store.put([*chunks, chunk("n1"), chunk(kind=FIVE), chunk("", 3600)])
    assert store.read(TEN, "n0", 0, 7200) == [chunks[1], chunks[2]]
    assert store.read(TEN, "", 0, 7200) == [chunk("", 3600)]
    assert store.read(TEN, "n2", 0, 7200) == []


def test_a_chunk_replaces_the_one_before(store):
    store.put([chunk(data=b"old", pending=True)])
    store.put([chunk(data=b"new")])
    assert store.read(TEN, "n0", 0, 1) == [chunk(data=b"new")]


def test_what_is_not_rolled_up_is_found_oldest_first(store):
    waiting = [chunk(series, begin_s, pending=True) for begin_s in (0, 3600) for series in ("n0", "n1")]
    store.put([*waiting[::-1], chunk("n2"), chunk(kind=FIVE, pending=True)])
    assert store.pending(TEN, 3601, 10) == waiting
    assert store.pending(TEN, 3601, 3) == waiting[:3]
    assert store.pending(TEN, 3600, 10) == waiting[:2]


def test_old_chunks_are_dropped_by_kind(store):
    store.put([chunk(begin_s=begin_s, kind=kind) for begin_s in (0, 3600, 7200) for kind in (TEN, FIVE)])
    assert store.drop(TEN, 3600) == 1
    assert [one.begin_s for one in store.read(TEN, "n0", 0, 9999)] == [3600, 7200]
    assert len(store.read(FIVE, "n0", 0, 9999)) == 3


def test_only_the_newest_chunks_of_a_kind_are_kept(store):
    store.put([chunk(str(number), number, JOBS) for number in range(5)])
    assert store.keep_newest(JOBS, 2) == 3
    assert store.keep_newest(JOBS, 2) == 0
    assert [len(store.read(JOBS, str(number), 0, 9)) for number in range(5)] == [0, 0, 0, 1, 1]


def test_the_size_grows_with_what_is_stored(store):
    before = store.size_bytes()
    store.put([chunk(data=os.urandom(300_000))])
    assert store.size_bytes() >= before + 300_000


def test_a_closed_store_says_so(store):
    if isinstance(store, MemoryHistory):
        pytest.skip("a dict cannot be closed")
    store.close()
    store.close()
    with pytest.raises(HistoryUnavailable, match="stopping"):
        store.read(TEN, "n0", 0, 1)


@here
def test_a_head_that_no_longer_leads_writes_nothing():
    from phalanx.store.sql.postgres.history_table import HistoryTable
    from phalanx.store.sql.postgres.store import PostgresStore

    dsn = postgres_here.server().fresh()
    first = PostgresStore(dsn)
    old = HistoryTable(dsn, term=first.term)
    old.put([chunk(data=b"by the first")])
    second = PostgresStore(dsn)  # takes the next term
    old.put([chunk(data=b"too late")])
    new = HistoryTable(dsn, term=second.term)
    assert new.read(TEN, "n0", 0, 1) == [chunk(data=b"by the first")]
    for one in (old, new, first, second):
        one.close()
    postgres_here.server().drop(dsn)


@here
def test_a_database_that_is_gone_is_an_error_and_comes_back():
    from phalanx.store.sql.postgres.history_table import HistoryTable

    table = HistoryTable("postgresql://nobody@127.0.0.1:1/none", term=1)
    with pytest.raises(HistoryUnavailable, match="does not answer"):
        table.put([chunk()])
    table.close()


def test_a_damaged_file_is_moved_aside_and_a_new_one_begins(tmp_path):
    path = tmp_path / "history.db"
    store = HistoryFile(str(path))
    store.put([chunk(data=os.urandom(100_000))])
    store.close()
    path.write_bytes(b"no database at all" * 1000)
    store = HistoryFile(str(path))
    with pytest.raises(HistoryUnavailable, match="damaged"):
        store.put([chunk()])
    store.put([chunk(data=b"after")])
    assert store.read(TEN, "n0", 0, 1) == [chunk(data=b"after")]
    assert (tmp_path / "history.db.damaged").read_bytes().startswith(b"no database")
    store.close()


def test_a_damaged_file_that_cannot_be_moved_is_an_error_and_is_moved_later(tmp_path):
    path = tmp_path / "history.db"
    path.write_bytes(b"no database at all" * 1000)
    store = HistoryFile(str(path))
    with armed("history.aside.rename", FailureMode.FULL), pytest.raises(HistoryUnavailable, match="Errno 28"):
        store.put([chunk()])
    with pytest.raises(HistoryUnavailable, match="damaged"):
        store.put([chunk()])
    store.put([chunk()])
    assert store.read(TEN, "n0", 0, 1) == [chunk()]
    store.close()


def test_a_page_that_is_damaged_while_the_head_runs_is_found_and_moved_aside(tmp_path):
    path = tmp_path / "history.db"
    store = HistoryFile(str(path))
    store.put([chunk(begin_s=number, data=os.urandom(5000)) for number in range(50)])
    store.close()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(40_000))
    store = HistoryFile(str(path))
    with pytest.raises(HistoryUnavailable, match="damaged"):
        store.read(TEN, "n0", 0, 50)
    store.put([chunk(data=b"after")])
    assert store.read(TEN, "n0", 0, 1) == [chunk(data=b"after")]
    store.close()


@pytest.mark.parametrize("point", ["history.put.rows", "history.put.commit", "history.open.begin"])
def test_a_full_disk_loses_the_batch_and_nothing_else(tmp_path, point):
    store = HistoryFile(str(tmp_path / "history.db"))
    if point != "history.open.begin":
        store.put([chunk(data=b"before")])
    with armed(point, FailureMode.FULL), pytest.raises(HistoryUnavailable, match="Errno 28"):
        store.put([chunk(data=b"lost"), chunk("n1")])
    assert store.read(TEN, "n1", 0, 1) == []
    store.put([chunk(data=b"after")])
    assert store.read(TEN, "n0", 0, 1) == [chunk(data=b"after")]
    store.close()


def test_a_place_that_does_not_exist_is_an_error_at_each_use(tmp_path):
    store = HistoryFile(str(tmp_path / "missing" / "history.db"))
    for _ in range(2):
        with pytest.raises(HistoryUnavailable, match="unable to open"):
            store.put([chunk()])
    (tmp_path / "missing").mkdir()
    store.put([chunk()])
    assert store.read(TEN, "n0", 0, 1) == [chunk()]
    store.close()
