"""Exports the traces of ended jobs. Its thread follows the stored history, so no commit waits for it or does any work for it.

Each trace is sent at least once: a head that stops after a send and before it has stored its position sends the same spans again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from phalanx.api.services import HeadServices, JobTracing
from phalanx.core.accounting.job_trace import JobSpan, job_trace
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.states import TERMINAL_STATES

TICK_S: Final = 2.0
RETRY_S: Final = (10.0, 30.0, 120.0, 600.0)  # after failures in a row; then always the last
TRIES_MAX: Final = 6  # of one batch, about 23 minutes
PENDING_MAX: Final = 1000  # jobs that wait; past that the oldest are dropped
BATCH_SPANS: Final = 500  # in one request, or those of one job
LINES_MAX: Final = 5000  # of one job that are read
_PAGE: Final = 1000
_ENDS: Final = frozenset(state.value for state in TERMINAL_STATES)
_log: Final = logging.getLogger("phalanx.traces")


class JobTracer:
    """See the module. `newest_seq`: the seq of the newest line of the history.

    Attributes:
        exported, dropped: spans that the collector accepted, and jobs that were given up, since the start.
        failure: why the newest export failed; empty if it did not.
    """

    def __init__(self, services: HeadServices, tracing: JobTracing, newest_seq: Callable[[], int]) -> None:
        self._services, self._tracing, self._newest_seq = services, tracing, newest_seq
        self._closing = threading.Event()
        self._seq: int | None = None
        self._stored: int | None = None
        self._settled = 0
        self._pending: deque[tuple[int, JobId]] = deque()
        self._failures, self._tries, self._next_s = 0, 0, 0.0
        self.exported, self.dropped, self.failure = 0, 0, ""

    @property
    def pending(self) -> int:
        """The number of ended jobs whose traces wait."""
        return len(self._pending)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="traces", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next tick; an export is not waited for."""
        self._closing.set()

    def step(self) -> None:
        """Read new lines of the history, and export what waits. Called by the thread."""
        self._read()
        while self._pending and not self._closing.is_set() and self._services.clock.boottime_s() >= self._next_s:
            self._export()
        self._store_position()

    def _run(self) -> None:
        while not self._closing.wait(until_tick_s(TICK_S, time.monotonic())):
            try:
                self.step()
            except PhalanxError as error:
                _log.warning("traces: %s", error)
            except Exception:  # noqa: BLE001  an internal error must not end the thread; the next tick tries again
                _log.exception("internal error in the export of traces")

    def _read(self) -> None:
        if self._seq is None:
            stored, newest = self._tracing.read_position(), self._newest_seq()
            # A new option begins with the jobs that end from now on; a restored database may be older than the position.
            self._seq = newest if stored is None else min(stored, newest)
        while lines := self._services.store.history(after=self._seq, limit=_PAGE):
            for line in lines:
                if line.job_id is not None and line.kind in _ENDS:
                    self._pending.append((line.seq, line.job_id))
            self._seq = lines[-1].seq
            while len(self._pending) > PENDING_MAX:
                self._drop(1)
            if len(lines) < _PAGE:
                return

    def _export(self) -> None:
        """Send one batch."""
        spans: list[JobSpan] = []
        jobs = 0
        for _, job_id in self._pending:
            try:
                more = self._spans(job_id)
            except PhalanxError:
                raise
            except Exception:  # noqa: BLE001  one job whose records are odd must not stop the traces of all others
                _log.exception("internal error in the trace of job %s", job_id)
                more = []
            if jobs and len(spans) + len(more) > BATCH_SPANS:
                break
            spans, jobs = spans + more, jobs + 1
        try:
            if spans:
                self._tracing.exporter.export(spans)
        except TryLater as error:
            self._failed(str(error), jobs)
            return
        self.exported += len(spans)
        self._failures, self._tries, self.failure = 0, 0, ""
        for _ in range(jobs):
            self._pending.popleft()

    def _failed(self, reason: str, jobs: int) -> None:
        self._next_s = self._services.clock.boottime_s() + RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        self._failures, self._tries, self.failure = self._failures + 1, self._tries + 1, reason
        _log.warning("traces of %d jobs wait: %s", len(self._pending), reason)
        if self._tries >= TRIES_MAX:
            self._drop(jobs)

    def _drop(self, jobs: int) -> None:
        for _ in range(jobs):
            self._pending.popleft()
        self.dropped, self._tries = self.dropped + jobs, 0
        _log.warning("traces of %d jobs were dropped", jobs)

    def _spans(self, job_id: JobId) -> list[JobSpan]:
        store = self._services.store
        job = store.job(job_id)
        if job is None or not job.state.terminal:  # its records are archived
            return []
        lines: list[HistoryLine] = []
        while len(lines) < LINES_MAX:
            page = store.history(job_id=job_id, after=lines[-1].seq if lines else 0, limit=_PAGE)
            lines += page
            if len(page) < _PAGE:
                break
        return job_trace(job, store.attempts(job_id), lines)

    def _store_position(self) -> None:
        """Store the seq up to which all traces are sent or dropped, if one was since the last time: each write is a sync of the disk."""
        done = self._pending[0][0] - 1 if self._pending else self._seq
        settled = self.exported + self.dropped
        if done is not None and (self._stored is None or settled != self._settled):
            self._tracing.write_position(done)
            self._stored, self._settled = done, settled
