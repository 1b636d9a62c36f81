"""Compare the two databases of the store: durable commits, and loading at the start of a head.

python -m benchmarks.store [--json] [--runs N] [--only commits,load]

PostgreSQL runs on this machine with fsync on, over loopback. The client uses the same cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from benchmarks.figures import (
    Figure,
    argument_parser,
    at_most,
    plain_figure,
    print_progress,
    print_report,
)
from phalanx.ports.store import Batch, Store
from phalanx.store.sql.sqlite.store import SqliteStore
from tests import postgres_here
from tests.contract import records

COMMITS = 500  # of one submit
LOTS = 50  # of a hundred submits, as in a head under load
PENDING = 10_000
Opener = Callable[[], Store]


def main() -> None:
    """Measure and print."""
    given = argument_parser(__doc__ or "").parse_args()
    only = set(filter(None, given.only.split(",")))
    figures: list[Figure] = []
    for name, database in (("SQLite", _sqlite), ("PostgreSQL", _postgres)):
        if name == "PostgreSQL" and (why := postgres_here.why_not()):
            print_progress(why)
            continue
        if not only or "commits" in only:
            figures += _commits(name, database, given.runs or 5)
        if not only or "load" in only:
            figures += _load(name, database, given.runs or 5)
    print_report("Store", figures, as_json=given.json)


def _commits(name: str, database: Callable[[], AbstractContextManager[Opener]], runs: int) -> list[Figure]:
    single, lots, slowest = [], [], []
    for _ in range(runs):
        with database() as opener, closing(opener()) as store:
            times = [_seconds(store, submitted(seq)) for seq in range(1, COMMITS + 1)]
            single.append(COMMITS / sum(times))
            slowest.append(1000 * statistics.quantiles(times, n=100)[-1])
            seconds = sum(_seconds(store, submitted(1 + COMMITS + 100 * lot, 100)) for lot in range(LOTS))
            lots.append(LOTS / seconds)
        print_progress(f"{name}: {single[-1]:,.0f} commits/s of one submit, {lots[-1]:,.0f} of a hundred")
    return [
        plain_figure(f"{name}: durable commits of one submit", single, "/s", note=f"{COMMITS} one after another"),
        plain_figure(f"{name}: slowest of a hundred such", slowest, "ms"),
        plain_figure(f"{name}: durable commits of 100 submits", lots, "/s", note=f"{LOTS} one after another"),
    ]


def _load(name: str, database: Callable[[], AbstractContextManager[Opener]], runs: int) -> list[Figure]:
    seconds, ours = [], []
    with database() as opener:
        with closing(opener()) as store:
            for first in range(1, PENDING, 1000):
                store.commit(submitted(first, 1000))
        for _ in range(runs):
            began, began_cpu = time.perf_counter(), time.process_time()
            with closing(opener()) as store:
                world = store.load()
                seconds.append(time.perf_counter() - began)
                ours.append(time.process_time() - began_cpu)
            assert len(world.pending) == PENDING
    return [
        at_most(f"{name}: opened and {PENDING:,} pending jobs loaded", seconds, "s", 2.0),
        plain_figure(f"{name}: CPU time of that in the head", ours, "s", note="what a busy machine does not stretch"),
    ]


def submitted(first: int, count: int = 1) -> Batch:
    """Return the batch that the controller writes for submits."""
    batch: Batch = records.submitted(first, count)  # type: ignore[no-untyped-call]  # tests are untyped
    return batch


def _seconds(store: Store, batch: Batch) -> float:
    began = time.perf_counter()
    store.commit(batch)
    return time.perf_counter() - began


@contextmanager
def _sqlite() -> Iterator[Opener]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        yield lambda: SqliteStore(os.path.join(folder, "phalanx.db"))


@contextmanager
def _postgres() -> Iterator[Opener]:
    from phalanx.store.sql.postgres.store import PostgresStore

    with postgres_here.running(fsync=True) as server:
        dsn = server.fresh()
        yield lambda: PostgresStore(dsn)


if __name__ == "__main__":
    main()
