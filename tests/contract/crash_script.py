"""What the child process of the crash tests does: write, and say each time what was acknowledged. The parent arms a failpoint.

python -m tests.contract.crash_script store|history|logs|blobs FOLDER
python -m tests.contract.crash_script postgres|postgres.history|deposed ADDRESS (of the database)
"""

import hashlib
import sys
from math import inf

from phalanx.ports.history import ChunkKind, StoredChunk
from phalanx.ports.logs import stream_key
from phalanx.store.blobs.files import FileBlobs
from phalanx.store.logs.files import FileLogs
from phalanx.store.sql.sqlite.history_file import HistoryFile
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract.records import attempt, submitted

ROUNDS = 6
JOBS_AT_ONCE = 4


def piece(number):
    """What is appended in one round; no two alike."""
    return f"line {number} of the stream\n".encode() * (number + 1)


def archive(number):
    """What is uploaded in one round, in chunks."""
    return [f"{number}-{chunk}".encode() * 1000 for chunk in range(4)]


def stream(epoch):
    """One of the two streams that are written."""
    return stream_key(attempt(7, epoch), "rank-0")


def chunks(number):
    """What is put into the history in one round: two nodes and a job."""
    series = (("n0", ChunkKind.TEN_SECONDS), ("n1", ChunkKind.TEN_SECONDS), ("7", ChunkKind.JOB_CURVE))
    return [StoredChunk(series=name, kind=kind, begin_s=number, data=piece(number)) for name, kind in series]


def digest(number):
    """Its hash."""
    return hashlib.sha256(b"".join(archive(number))).hexdigest()


def say(number):
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def write_store(folder):
    write_jobs(SqliteStore(folder + "/phalanx.db"))


def write_postgres(dsn):
    from phalanx.store.sql.postgres.store import PostgresStore  # its driver is an extra

    write_jobs(PostgresStore(dsn))


def write_deposed(dsn):
    """Of a store whose term another takes before its second round: its commit is refused, and its transaction rolled back."""
    from phalanx.store.sql.postgres.store import PostgresStore  # its driver is an extra

    store = PostgresStore(dsn)
    say(0)
    store.commit(submitted(1, JOBS_AT_ONCE))
    say(1)
    PostgresStore(dsn).close()
    store.commit(submitted(1 + JOBS_AT_ONCE, JOBS_AT_ONCE))
    say(2)


def write_jobs(store):
    say(0)
    for number in range(ROUNDS):
        store.commit(submitted(1 + number * JOBS_AT_ONCE, JOBS_AT_ONCE))
        say(number + 1)
    store.close()


def write_history(folder):
    write_chunks(HistoryFile(folder + "/history.db"))


def write_postgres_history(dsn):
    from phalanx.store.sql.postgres.history_table import HistoryTable  # its driver is an extra
    from phalanx.store.sql.postgres.store import PostgresStore

    write_chunks(HistoryTable(dsn, term=PostgresStore(dsn).term))


def write_chunks(history):
    say(0)
    for number in range(ROUNDS):
        history.put(chunks(number))
        say(number + 1)
    for number in range(ROUNDS):
        history.drop(ChunkKind.TEN_SECONDS, number + 1)
    for number in range(ROUNDS):
        history.keep_newest(ChunkKind.JOB_CURVE, ROUNDS - 1 - number)


def write_logs(folder):
    logs = FileLogs(folder + "/logs")
    ends = dict.fromkeys((1, 2), 0)
    say(0)
    for number in range(ROUNDS):
        chunks = [(stream(epoch), ends[epoch], piece(number)) for epoch in ends]
        ends = {key.epoch: end for key, end in logs.append(chunks).items()}
        say(number + 1)
    logs.delete("7-k")


def write_blobs(folder):
    blobs = FileBlobs(folder + "/blobs")
    say(0)
    for number in range(ROUNDS):
        blobs.put(digest(number), iter(archive(number)))
        assert blobs.has(digest(number))
        say(number + 1)
    for number in range(ROUNDS, 2 * ROUNDS):  # and some that nobody needs
        blobs.put(digest(number), iter(archive(number)))
        blobs.remove_unused(digest(number), before_s=inf)


PARTS = {
    "store": write_store,
    "postgres": write_postgres,
    "postgres.history": write_postgres_history,
    "deposed": write_deposed,
    "history": write_history,
    "logs": write_logs,
    "blobs": write_blobs,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2])
