"""What becomes of the head's copies: who has brought what, and the removal of those that are no use any more."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from phalanx.api.kept_files import KeptFiles, Place
from phalanx.api.output_files import KeptOutputs
from phalanx.core.ids import JobId, NodeId
from phalanx.core.work.attempt import Attempt
from phalanx.ports.store import Store

_SETTLES_MAX: Final = (
    10_000  # jobs waiting to be looked at; what is dropped here is looked at again by the next commit or start
)
_PAUSE_S: Final = 5.0  # after a failure, which is mostly the disk's or the database's and so the next job's too
_TRIES_MAX: Final = 100  # of one job, in a row: at _PAUSE_S each that is longer than a database is away for a restart
_log: Final = logging.getLogger("phalanx.api")


@dataclass(slots=True)
class Carried:
    """Which nodes have brought all that they have of which checkpoint, and how many pieces are under way. On the event loop alone."""

    pieces: int = 0
    done: dict[Place, set[NodeId]] = field(default_factory=dict)


class Settling:
    """A thread that removes what is no use any more, whenever a commit touched a job of which there are copies.

    What fails is tried again after `pause_s`; the thread never ends.
    """

    def __init__(
        self, store: Store, kept: KeptFiles, outputs: KeptOutputs, carried: Carried, *, pause_s: float = _PAUSE_S
    ) -> None:
        self._store, self._kept, self._outputs, self._carried = store, kept, outputs, carried
        self._pause_s = pause_s
        self._failed: Counter[JobId] = Counter()  # tries in a row
        self._touched: queue.Queue[JobId] = queue.Queue(maxsize=_SETTLES_MAX)

    def begin(self) -> None:
        """Look at all that an earlier life of the head left, then at what changes."""
        self.touched(self._kept.jobs)
        threading.Thread(target=self._run, name="kept", daemon=True).start()

    def touched(self, job_ids: frozenset[JobId]) -> None:
        """A commit touched these jobs. Returns at once."""
        for job_id in job_ids & (self._kept.jobs | self._outputs.jobs):
            try:
                self._touched.put_nowait(job_id)
            except queue.Full:
                return

    def _run(self) -> None:
        while True:
            job_id = self._touched.get()
            try:
                self._settle(job_id)
            except Exception:  # noqa: BLE001  whatever it is, it must not end the thread; it is logged whole
                _log.exception("what the head keeps of job %s could not be settled", job_id)
                time.sleep(self._pause_s)
                self._try_again(job_id)
            else:
                self._failed.pop(job_id, None)

    def _try_again(self, job_id: JobId) -> None:
        self._failed[job_id] += 1
        if self._failed[job_id] < _TRIES_MAX:
            self.touched(frozenset({job_id}))
        else:
            del self._failed[job_id]

    def _settle(self, job_id: JobId) -> None:
        attempt = live_attempt(
            self._store, job_id
        )  # before the job: what is published until its end is in the job then
        job = self._store.job(job_id)
        if job is None:  # of another database: for a person to look at
            return
        live = None if attempt is None else attempt.epoch
        self._kept.settle(job_id, live, frozenset((one.epoch, one.step) for one in job.checkpoints))
        self._outputs.settle(job_id, live)
        for place in [p for p in list(self._carried.done) if p.job_id == job_id and p.epoch != live]:
            self._carried.done.pop(place, None)


def live_attempt(store: Store, job_id: JobId) -> Attempt | None:
    """The attempt that holds its allocation now; None without one."""
    return next((attempt for attempt in reversed(store.attempts(job_id)) if attempt.live), None)
