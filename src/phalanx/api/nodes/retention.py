"""Retention of the head's copies of checkpoints and outputs: tracks uploads, and removes copies that are no longer needed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.ports.store import Store
from phalanx.store.checkpoints.copies import CheckpointCopies, CheckpointKey
from phalanx.store.outputs.copies import OutputCopies

_PAUSE_S: Final = 5.0  # before a failed job is retried, and after each failure once two in a row have failed
_TRIES_MAX: Final = 100  # per job, in a row; at _PAUSE_S each that is longer than the restart of a database
_log: Final = logging.getLogger("phalanx.api")


@dataclass(slots=True)
class PendingUploads:
    """Counts the pieces being received, and records which nodes have sent all their files of each checkpoint. Event loop only."""

    pieces_in_progress: int = 0
    nodes_done: dict[CheckpointKey, set[NodeId]] = field(default_factory=dict)


class RetentionWorker:
    """A thread that removes copies that are no longer needed, whenever a commit touched a job that has copies.

    A failed job is retried after `pause_s`, while other jobs proceed. The thread never ends.
    """

    def __init__(
        self,
        store: Store,
        checkpoints: CheckpointCopies,
        outputs: OutputCopies,
        uploads: PendingUploads,
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._store, self._checkpoints, self._outputs, self._uploads = store, checkpoints, outputs, uploads
        self._pause_s = pause_s
        self._failed: Counter[JobId] = Counter()  # failures in a row, by job
        self._in_row = 0  # failures in a row, over all jobs
        self._touched: dict[JobId, None] = {}  # an ordered set
        self._retry_at_s: dict[JobId, float] = {}  # when to retry failed jobs, on the monotonic clock
        self._wake = threading.Condition()

    def start(self) -> None:
        """Start the thread; it first checks all copies that an earlier process of the head left."""
        self.on_commit(self._checkpoints.jobs)
        threading.Thread(target=self._run, name="retention", daemon=True).start()

    def on_commit(self, job_ids: frozenset[JobId]) -> None:
        """Queue these jobs, which a commit touched. Returns at once."""
        found = job_ids & (self._checkpoints.jobs | self._outputs.jobs)
        if found:
            with self._wake:
                self._touched.update(dict.fromkeys(found))
                self._wake.notify()

    def _run(self) -> None:
        while True:
            job_id = self._next()
            try:
                self._settle(job_id)
            except Exception:  # noqa: BLE001  no error may end the thread; it is logged with its traceback
                _log.exception("the head's copies of job %s could not be cleaned up", job_id)
                self._schedule_retry(job_id)
                self._in_row += 1
                if self._in_row > 1:  # probably the disk or the database, so all jobs would fail
                    time.sleep(self._pause_s)
            else:
                self._in_row = 0
                self._failed.pop(job_id, None)

    def _next(self) -> JobId:
        """Wait for and return the next job: the one queued first, or a failed one whose pause is over."""
        with self._wake:
            while True:
                now_s = time.monotonic()
                due = [job_id for job_id, at_s in self._retry_at_s.items() if at_s <= now_s]
                for job_id in due:
                    del self._retry_at_s[job_id]
                self._touched.update(dict.fromkeys(due))
                found = next((job_id for job_id in self._touched if job_id not in self._retry_at_s), None)
                if found is not None:
                    del self._touched[found]
                    return found
                next_s = min(self._retry_at_s.values(), default=None)
                self._wake.wait(None if next_s is None else max(0.0, next_s - now_s))

    def _schedule_retry(self, job_id: JobId) -> None:
        self._failed[job_id] += 1
        if self._failed[job_id] < _TRIES_MAX:
            with self._wake:
                self._retry_at_s[job_id] = time.monotonic() + self._pause_s
        else:
            del self._failed[job_id]

    def _settle(self, job_id: JobId) -> None:
        # Read the attempts before the job, so that the job lists all checkpoints published before an attempt ended.
        attempts = self._store.attempts(job_id)
        job = self._store.job(job_id)
        if job is None:  # files of a job that a restored database has lost: leave them to the operator
            return
        attempt = _live(attempts)
        live = None if attempt is None else attempt.epoch
        # A new attempt may start and upload files at any moment: only the attempts read above are known to have ended.
        newest = max((one.epoch for one in attempts), default=Epoch(0))
        self._checkpoints.remove_unneeded(job, attempts)
        self._outputs.remove_stale_uploads(job_id, live, newest=newest)
        for place in [p for p in list(self._uploads.nodes_done) if p.job_id == job_id]:
            if place.epoch != live and place.epoch <= newest:
                self._uploads.nodes_done.pop(place, None)


def live_attempt(store: Store, job_id: JobId) -> Attempt | None:
    """Return the attempt that holds an allocation now, or None."""
    return _live(store.attempts(job_id))


def _live(attempts: Sequence[Attempt]) -> Attempt | None:
    return next((attempt for attempt in reversed(attempts) if attempt.holds_allocation), None)
