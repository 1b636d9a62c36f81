"""The thread that removes what the head need not keep: it outlives whatever fails under it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import threading
import time
from types import SimpleNamespace

from phalanx.api.nodes import retention
from phalanx.api.nodes.retention import PendingUploads, RetentionWorker
from phalanx.ports.store import StoreRefused

PATIENCE_S = 100.0


class Kept:
    """Copies of some jobs; to settle one fails as often as is told."""

    def __init__(self, **failures):
        self.jobs, self.failures = frozenset(failures), failures
        self.settled, self.tries, self.told = [], [], threading.Event()

    def remove_unneeded(self, job, _attempts):
        job_id = job.id
        self.tries.append(job_id)
        if self.failures[job_id] > 0:
            self.failures[job_id] -= 1
            raise OSError("the disk is away")
        self.settled.append(job_id)
        if set(self.settled) == self.jobs:
            self.told.set()


class Store:
    """Refuses once, then knows every job as over."""

    def __init__(self):
        self.refuses = 1

    def attempts(self, _job_id):
        if self.refuses:
            self.refuses -= 1
            raise StoreRefused("the database is away")
        return []

    def job(self, job_id):
        return SimpleNamespace(id=job_id)


def settling(kept, pause_s=0.0):
    outputs = SimpleNamespace(jobs=frozenset(), remove_stale_uploads=lambda _job_id, _live, *, newest: None)
    return RetentionWorker(Store(), kept, outputs, PendingUploads(), pause_s=pause_s)


def until(true):
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it did not come about"
        threading.Event().wait(0.005)


def test_what_could_not_be_settled_is_settled_later():
    """Found by reading: the first refusal of the store or the disk ended the thread, and nothing was ever removed again."""
    kept = Kept(a=1, b=0)
    settling(kept).start()
    assert kept.told.wait(100)
    assert set(kept.settled) == {"a", "b"}


def test_a_job_that_never_settles_is_given_up_until_it_is_touched_again(monkeypatch):
    monkeypatch.setattr(retention, "_TRIES_MAX", 3)
    kept = Kept(a=10**6)
    over = threading.Event()
    found = settling(kept)
    given_up = found._schedule_retry

    def trying(job_id):
        given_up(job_id)
        if not found._failed:
            over.set()

    monkeypatch.setattr(found, "_schedule_retry", trying)
    found.start()
    assert over.wait(100)
    assert len(kept.tries) == 2  # the store refused one of three


def test_a_job_that_never_settles_holds_up_no_other():
    """Found by reading: every commit that touched it put it into the queue once more, and each of these held all others up for a pause."""
    kept = Kept(bad=10**6, good=0)
    found = settling(kept, pause_s=PATIENCE_S * 3)
    found._store.refuses = 0
    found.start()
    until(lambda: "bad" in kept.tries and "good" in kept.settled)
    for _ in range(100):
        found.on_commit(frozenset({"bad"}))
    found.on_commit(frozenset({"good"}))
    until(lambda: kept.settled.count("good") == 2)
    assert kept.tries.count("bad") == 1, "it is looked at again after the pause alone"


def test_two_failures_in_a_row_are_everybodys(monkeypatch):
    """The disk, or the database: nobody is tried while it pauses, so that ten thousand jobs do not fill the log."""
    slept = threading.Event()
    monkeypatch.setattr(retention.time, "sleep", lambda _s: slept.set())
    kept = Kept(a=10**6, b=10**6)
    settling(kept, pause_s=PATIENCE_S * 3).start()
    assert slept.wait(PATIENCE_S)
    assert len(kept.tries) == 1, "the store refused the first of the two"
