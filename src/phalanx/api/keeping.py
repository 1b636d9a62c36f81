"""What becomes of the head's copies: who has brought what, and the removal of those that are no use any more."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.api.kept_files import KeptFiles, Place
from phalanx.api.output_files import KeptOutputs
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.ports.store import Store

_PAUSE_S: Final = 5.0  # before a job that failed is looked at again; and between any two, once two in a row have failed
_TRIES_MAX: Final = 100  # of one job, in a row: at _PAUSE_S each that is longer than a database is away for a restart
_log: Final = logging.getLogger("phalanx.api")


@dataclass(slots=True)
class Carried:
    """Which nodes have brought all that they have of which checkpoint, and how many pieces are under way. On the event loop alone."""

    pieces: int = 0
    done: dict[Place, set[NodeId]] = field(default_factory=dict)


class Settling:
    """A thread that removes what is no use any more, whenever a commit touched a job of which there are copies.

    What fails is tried again after `pause_s`, and others meanwhile; the thread never ends.
    """

    def __init__(
        self, store: Store, kept: KeptFiles, outputs: KeptOutputs, carried: Carried, *, pause_s: float = _PAUSE_S
    ) -> None:
        self._store, self._kept, self._outputs, self._carried = store, kept, outputs, carried
        self._pause_s = pause_s
        self._failed: Counter[JobId] = Counter()  # tries in a row
        self._in_row = 0  # failures of whichever jobs since the last success
        self._touched: dict[JobId, None] = {}  # in order, each once
        self._again_s: dict[JobId, float] = {}  # when one that failed is looked at again, on the monotonic clock
        self._wake = threading.Condition()

    def begin(self) -> None:
        """Look at all that an earlier life of the head left, then at what changes."""
        self.touched(self._kept.jobs)
        threading.Thread(target=self._run, name="kept", daemon=True).start()

    def touched(self, job_ids: frozenset[JobId]) -> None:
        """A commit touched these jobs. Returns at once."""
        found = job_ids & (self._kept.jobs | self._outputs.jobs)
        if found:
            with self._wake:
                self._touched.update(dict.fromkeys(found))
                self._wake.notify()

    def _run(self) -> None:
        while True:
            job_id = self._next()
            try:
                self._settle(job_id)
            except Exception:  # noqa: BLE001  whatever it is, it must not end the thread; it is logged whole
                _log.exception("what the head keeps of job %s could not be settled", job_id)
                self._try_again(job_id)
                self._in_row += 1
                if self._in_row > 1:  # the disk, or the database: it would be every job's
                    time.sleep(self._pause_s)
            else:
                self._in_row = 0
                self._failed.pop(job_id, None)

    def _next(self) -> JobId:
        """The one touched longest ago, or one that failed and has waited; waits until there is one."""
        with self._wake:
            while True:
                now_s = time.monotonic()
                due = [job_id for job_id, at_s in self._again_s.items() if at_s <= now_s]
                for job_id in due:
                    del self._again_s[job_id]
                self._touched.update(dict.fromkeys(due))
                found = next((job_id for job_id in self._touched if job_id not in self._again_s), None)
                if found is not None:
                    del self._touched[found]
                    return found
                next_s = min(self._again_s.values(), default=None)
                self._wake.wait(None if next_s is None else max(0.0, next_s - now_s))

    def _try_again(self, job_id: JobId) -> None:
        self._failed[job_id] += 1
        if self._failed[job_id] < _TRIES_MAX:
            with self._wake:
                self._again_s[job_id] = time.monotonic() + self._pause_s
        else:
            del self._failed[job_id]

    def _settle(self, job_id: JobId) -> None:
        # Before the job: what is published until an attempt's end is in the job then.
        attempts = self._store.attempts(job_id)
        job = self._store.job(job_id)
        if job is None:  # of another database: for a person to look at
            return
        attempt = _live(attempts)
        live = None if attempt is None else attempt.epoch
        # An attempt may come at any moment, and bring files: only of those that were read is it known that they are over.
        newest = max((one.epoch for one in attempts), default=Epoch(0))
        published = frozenset((one.epoch, one.step) for one in job.checkpoints)
        self._kept.settle(job_id, live, published, newest=newest)
        self._outputs.settle(job_id, live, newest=newest)
        for place in [p for p in list(self._carried.done) if p.job_id == job_id]:
            if place.epoch != live and place.epoch <= newest:
                self._carried.done.pop(place, None)


def live_attempt(store: Store, job_id: JobId) -> Attempt | None:
    """The attempt that holds its allocation now; None without one."""
    return _live(store.attempts(job_id))


def _live(attempts: Sequence[Attempt]) -> Attempt | None:
    return next((attempt for attempt in reversed(attempts) if attempt.live), None)
