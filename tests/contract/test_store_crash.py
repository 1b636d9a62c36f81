"""Kill -9 at every failpoint, in a real process: what was acknowledged is there, and of what was not, nothing or all."""

import os
import signal
import subprocess
import sys

import pytest

from phalanx.core.state.records import IDEMPOTENCY
from phalanx.failpoints import ENVIRONMENT_VARIABLE, FAILPOINTS, FailureMode
from phalanx.ports.history import ChunkKind, HistoryUnavailable
from phalanx.ports.store import JobFilter
from phalanx.store.blobs.files import FileBlobs
from phalanx.store.logs.files import FileLogs
from phalanx.store.sql.postgres.history_table import HistoryTable
from phalanx.store.sql.postgres.store import PostgresStore
from phalanx.store.sql.sqlite.history_file import HistoryFile
from phalanx.store.sql.sqlite.store import SqliteStore
from tests import postgres_here
from tests.contract.crash_script import JOBS_AT_ONCE, ROUNDS, archive, chunks, digest, piece, stream
from tests.contract.records import attempt, submitted

# Points that a child passes only after something else failed; their own tests arm them.
AFTER_FAILURE = {
    "store.migrate.rollback",
    "store.commit.rollback",
    "store.settle.checkpoint",
    "blobs.sweep.remove",
    "history.aside.rename",
    "postgres.migrate.rollback",
    "postgres.commit.rollback",
}


ONCE = {
    "store.open",
    "store.migrate",
    "store.close",
    "history.open",
    "postgres.open",
    "postgres.migrate",
    "logs.open",
    "logs.delete",
    "store.open.lock",
    "store.open.mark",
    "blobs.open",
}  # passed once in a life
TWICE = {"logs.append.directory", "logs.append.create"}  # once for each of two streams


def part_of(name):
    """The part of the child that passes a point."""
    return "postgres.history" if name.startswith("postgres.history.") else name.partition(".")[0]


def points(part):
    """(point, failure, pass) for every way in which a part can die."""
    ways: list[object] = []
    for name, failures in FAILPOINTS.items():
        if part_of(name) == part and name not in AFTER_FAILURE and ".take_back." not in name:
            passes = (1,) if name.rpartition(".")[0] in ONCE else (1, 2) if name in TWICE else (1, 4)
            for failure in sorted(failures & {FailureMode.KILL, FailureMode.AFTER, FailureMode.TORN}):
                ways.extend(pytest.param(name, failure, nth, id=f"{name}-{failure.value}-{nth}") for nth in passes)
    return ways


def die(part, folder, name, failure, nth):
    """Run the child until it dies at the point; the number of rounds it had acknowledged, -1 for none at all."""
    return die_of(part, folder, f"{name}={failure.value}:{nth}")


def die_of(part, folder, armed):
    environment = {**os.environ, ENVIRONMENT_VARIABLE: armed}
    child = subprocess.run(
        [sys.executable, "-m", "tests.contract.crash_script", part, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, f"{armed} was not reached: {child.stderr}"
    return int(child.stdout.split()[-1]) if child.stdout else -1


@pytest.mark.parametrize(("name", "failure", "nth"), points("store"))
def test_store_survives_a_kill(tmp_path, name, failure, nth):
    rounds = die("store", tmp_path, name, failure, nth)
    store = SqliteStore(str(tmp_path / "phalanx.db"))
    held = len(store.jobs(JobFilter(limit=1000)))
    assert held in {max(0, rounds) * JOBS_AT_ONCE, (max(0, rounds) + 1) * JOBS_AT_ONCE if 0 <= rounds < ROUNDS else 0}
    assert [line.seq for line in store.history()] == list(range(1, held + 1))
    assert len(store.load().table(IDEMPOTENCY)) == held
    store.commit(submitted(held + 1))
    store.close()


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it can run")
@pytest.mark.parametrize(("name", "failure", "nth"), points("postgres"))
def test_postgres_survives_a_kill_of_its_head(name, failure, nth):
    """A real server; only the client dies."""
    server = postgres_here.server()
    dsn = server.empty()
    try:
        rounds = die("postgres", dsn, name, failure, nth)
        store = PostgresStore(dsn)
        held = len(store.jobs(JobFilter(limit=1000)))
        begun = (max(0, rounds) + 1) * JOBS_AT_ONCE if 0 <= rounds < ROUNDS else 0
        assert held in {max(0, rounds) * JOBS_AT_ONCE, begun}
        assert [line.seq for line in store.history()] == list(range(1, held + 1))
        assert len(store.load().table(IDEMPOTENCY)) == held
        store.commit(submitted(held + 1))
        store.close()
    finally:
        server.drop(dsn)


@pytest.mark.parametrize(("name", "failure", "nth"), points("history"))
def test_history_survives_a_kill(tmp_path, name, failure, nth):
    rounds = die("history", tmp_path, name, failure, nth)
    history = HistoryFile(str(tmp_path / "history.db"))
    check_history(history, rounds)
    history.close()


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it can run")
@pytest.mark.parametrize(("name", "failure", "nth"), points("postgres.history"))
def test_history_on_postgres_survives_a_kill_of_its_head(name, failure, nth):
    dsn = postgres_here.server().fresh()
    rounds = die("postgres.history", dsn, name, failure, nth)
    records = PostgresStore(dsn)
    history = HistoryTable(dsn, term=records.term)
    check_history(history, rounds)
    history.close()
    records.close()
    postgres_here.server().drop(dsn)


def check_history(history, rounds):
    """A round is there whole or not at all; those that were acknowledged are there until they are dropped, the oldest first."""
    nodes = [history.read(ChunkKind.TEN_SECONDS, series, 0, ROUNDS) for series in ("n0", "n1")]
    curves = history.read(ChunkKind.JOB_CURVE, "7", 0, ROUNDS)
    for kept, place in ((nodes[0], 0), (nodes[1], 1), (curves, 2)):
        last = max((one.begin_s for one in kept), default=-1)
        assert kept == [chunks(number)[place] for number in range(last + 1 - len(kept), last + 1)]
        if rounds < ROUNDS:
            assert len(kept) == last + 1, "nothing is dropped yet"
            assert len(kept) in (rounds, rounds + 1)
    assert len(nodes[0]) == len(nodes[1])
    assert len(nodes[0]) == len(curves) or rounds == ROUNDS
    history.put(chunks(ROUNDS))
    assert history.read(ChunkKind.TEN_SECONDS, "n1", ROUNDS, ROUNDS + 1) == chunks(ROUNDS)[1:2]


@pytest.mark.parametrize("failure", [FailureMode.KILL, FailureMode.AFTER])
def test_a_damaged_history_is_moved_aside_although_a_head_was_killed_as_it_did_so(tmp_path, failure):
    damaged = b"no database at all" * 1000
    (tmp_path / "history.db").write_bytes(damaged)
    die_of("history", tmp_path, f"history.aside.rename={failure.value}")
    history = HistoryFile(str(tmp_path / "history.db"))
    if failure is FailureMode.KILL:
        with pytest.raises(HistoryUnavailable, match="damaged"):
            history.put(chunks(0))
    history.put(chunks(0))
    assert (tmp_path / "history.db.damaged").read_bytes() == damaged
    history.close()


@pytest.mark.parametrize(("name", "failure", "nth"), points("logs"))
def test_logs_survive_a_kill(tmp_path, name, failure, nth):
    rounds = die("logs", tmp_path, name, failure, nth)
    logs = FileLogs(str(tmp_path / "logs"))
    if name == "logs.delete.remove":
        logs.delete("7-k")
        assert logs.streams([attempt(7, 1), attempt(7, 2)]) == []
        return
    whole = b"".join(piece(number) for number in range(ROUNDS))
    acknowledged = sum(len(piece(number)) for number in range(max(0, rounds)))
    for epoch in (1, 2):
        key = stream(epoch)
        end = logs.end(key)
        assert acknowledged <= end
        assert logs.read(key, 0, 10**6) == whole[:end]
        # The supervisor sends again from what it knows to be acknowledged; neither gap nor double comes of it.
        assert logs.append([(key, acknowledged, whole[acknowledged:])]) == {key: len(whole)}
        assert logs.read(key, 0, 10**6) == whole
    logs.close()


@pytest.mark.parametrize(("name", "failure", "nth"), points("blobs"))
def test_blobs_survive_a_kill(tmp_path, name, failure, nth):
    rounds = die("blobs", tmp_path, name, failure, nth)
    blobs = FileBlobs(str(tmp_path / "blobs"))
    for number in range(max(0, rounds)):
        assert blobs.has(digest(number))
    for number in range(ROUNDS):
        if blobs.has(digest(number)):
            with open(blobs.path(digest(number)), "rb") as file:
                assert file.read() == b"".join(archive(number))
        assert blobs.put(digest(number), iter(archive(number))) == sum(map(len, archive(number)))
    assert [name for name in os.listdir(tmp_path / "blobs") if name.startswith(".")] == []


# ---- killed while it puts a failure right ----------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["store.commit.rollback", "store.settle.checkpoint"])
@pytest.mark.parametrize("first", ["store.commit.rows=error:7", "store.commit.commit=full:3"])
def test_store_survives_a_kill_after_a_refusal(tmp_path, first, point):
    rounds = die_of("store", tmp_path, f"{first},{point}=kill")
    store = SqliteStore(str(tmp_path / "phalanx.db"))
    assert len(store.jobs(JobFilter(limit=1000))) == rounds * JOBS_AT_ONCE
    assert store.check_integrity() == []
    store.close()


@pytest.mark.parametrize(
    "line", ["logs.append.sync=error:3,logs.take_back.cut=kill", "logs.append.sync=full:2,logs.take_back.remove=kill"]
)
def test_logs_survive_a_kill_after_a_refusal(tmp_path, line):
    rounds = die_of("logs", tmp_path, line)
    logs = FileLogs(str(tmp_path / "logs"))
    whole = b"".join(piece(number) for number in range(ROUNDS))
    for epoch in (1, 2):
        key = stream(epoch)
        assert logs.end(key) >= sum(len(piece(number)) for number in range(rounds))
        assert logs.append([(key, 0, whole)]) == {key: len(whole)}
        assert logs.read(key, 0, 10**6) == whole
    logs.close()


@pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it can run")
def test_a_deposed_store_that_is_killed_before_it_rolls_back_leaves_what_was_acknowledged():
    dsn = postgres_here.server().fresh()
    assert die_of("deposed", dsn, "postgres.commit.rollback=kill") == 1
    store = PostgresStore(dsn)
    assert len(store.jobs(JobFilter(limit=1000))) == JOBS_AT_ONCE
    store.commit(submitted(1 + JOBS_AT_ONCE, JOBS_AT_ONCE))
    store.close()


def test_an_upgrade_killed_while_it_rolls_back_starts_anew(tmp_path):
    assert die_of("store", tmp_path, "store.migrate.commit=error,store.migrate.rollback=kill") == -1
    store = SqliteStore(str(tmp_path / "phalanx.db"))
    store.commit(submitted(1))
    store.close()


def test_a_sweep_killed_in_the_middle_is_finished_by_the_next(tmp_path):
    die_of("blobs", tmp_path, "blobs.put.sync=kill")
    (partial,) = (tmp_path / "blobs").iterdir()
    os.utime(partial, (0, 0))  # an upload that was not continued
    die_of("blobs", tmp_path, "blobs.sweep.remove=kill")
    blobs = FileBlobs(str(tmp_path / "blobs"))
    assert os.listdir(tmp_path / "blobs") == []
    assert not blobs.has(digest(0))
