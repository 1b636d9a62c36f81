"""What becomes of the head's copies: who has brought what, and the removal of those that are no use any more."""

from __future__ import annotations

import queue
import threading
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


@dataclass(slots=True)
class Carried:
    """Which nodes have brought all that they have of which checkpoint, and how many pieces are under way. On the event loop alone."""

    pieces: int = 0
    done: dict[Place, set[NodeId]] = field(default_factory=dict)


class Settling:
    """A thread that removes what is no use any more, whenever a commit touched a job of which there are copies."""

    def __init__(self, store: Store, kept: KeptFiles, outputs: KeptOutputs, carried: Carried) -> None:
        self._store, self._kept, self._outputs, self._carried = store, kept, outputs, carried
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
            self._settle(self._touched.get())

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
