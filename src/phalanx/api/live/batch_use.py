"""Records what batches report of their requests and tokens, so that it is in the ledger beside the use of services that gateways report."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from phalanx.api.services import HeadServices
from phalanx.api.views.service_use import HOUR_S, with_batches
from phalanx.controller.telemetry import TokenCount
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import JobId, ServiceId
from phalanx.core.state.events import RecordBatchUse
from phalanx.core.state.records import SERVICES
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.services.service_use import BATCH_SERVICE_LABEL, BatchUse, ServiceUseHour

RECORD_S: Final = 2.0
BATCHES_MAX: Final = 20_000  # of one hour: the record is written as a whole
HOURS_LATE: Final = 2  # a count comes in its hour, or shortly after


class BatchUseRecorder:
    """Takes the counts of telemetry and records them every few seconds.

    Args:
        services: of the head.
        lock: held while hours are read and written.
        request: asks the controller.
        run_in_thread: for reads of the store.
    """

    def __init__(
        self,
        services: HeadServices,
        lock: asyncio.Lock,
        request: Callable[[RecordBatchUse], Awaitable[None]],
        run_in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._services, self._lock, self._request, self._in_thread = services, lock, request, run_in_thread
        self._mutex = threading.Lock()
        self._pending: dict[tuple[JobId, int], TokenCount] = {}
        services.telemetry.token_listeners.append(self._on_counts)

    def _on_counts(self, job_id: JobId, counts: Sequence[TokenCount]) -> None:
        hour_s = int(self._services.clock.now_s()) // HOUR_S * HOUR_S
        with self._mutex:
            for count in counts:
                if count.hour_s % HOUR_S == 0 and abs(hour_s - count.hour_s) <= HOURS_LATE * HOUR_S:
                    self._pending[job_id, count.hour_s] = count

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(RECORD_S, time.monotonic()))
            with contextlib.suppress(PhalanxError):  # such as a full disk: the next round tries again
                await self.record()

    async def record(self) -> None:
        """Record what has come."""
        with self._mutex:
            taken, self._pending = self._pending, {}
        if not taken:
            return
        try:
            async with self._lock:
                hours = await self._in_thread(self._hours, taken)
                if hours:
                    await self._request(RecordBatchUse(hours=hours))
        except BaseException:
            with self._mutex:
                self._pending = taken | self._pending
            raise

    def _hours(self, taken: dict[tuple[JobId, int], TokenCount]) -> tuple[ServiceUseHour, ...]:
        store = self._services.store
        uses: dict[int, list[BatchUse]] = {}
        for (job_id, hour_s), count in taken.items():
            job = store.job(job_id)
            service_id = ServiceId("" if job is None else dict(job.spec.labels).get(BATCH_SERVICE_LABEL, ""))
            service = store.record(SERVICES, service_id) if service_id else None
            # Labels are the user's own words: a batch of a service is in its project.
            if job is None or service is None or service.project != job.project:
                continue
            uses.setdefault(hour_s, []).append(
                BatchUse(
                    service=service_id,
                    job=job_id,
                    project=job.project,
                    user=job.user,
                    requests=count.requests,
                    prompt_tokens=count.prompt_tokens,
                    answer_tokens=count.answer_tokens,
                )
            )
        found = (with_batches(store, str(hour_s), uses[hour_s], BATCHES_MAX) for hour_s in sorted(uses))
        return tuple(hour for hour in found if hour is not None)
