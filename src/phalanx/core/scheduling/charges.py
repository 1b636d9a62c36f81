"""Charges running jobs to the quota tree: each job to its queue from its start to its end, in Unix time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.core.ids import JobId
from phalanx.core.scheduling.quota import QuotaTree
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.queue import Spent


class Charges:
    """Queue and GPUs of each charged job. `quotas` is None on a board without quotas, where nothing is charged."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[JobId, tuple[int, int]] = {}

    def clear(self) -> None:
        """The quota tree is new: nothing is charged in it."""
        self._held.clear()

    def begin(self, quotas: QuotaTree | None, job_id: JobId, queue: int, attempt: Attempt, wall_s: float) -> None:
        """The job runs; its run time before now is charged too. Idempotent."""
        if quotas is not None and job_id not in self._held:
            self._held[job_id] = (queue, attempt.allocation.gpus)
            quotas.charge(queue, attempt.allocation.gpus, wall_s, attempt.placed_s)

    def end(self, quotas: QuotaTree | None, job_id: JobId, wall_s: float) -> None:
        """The job no longer runs. Does nothing if it was not charged."""
        if quotas is not None and job_id in self._held:
            queue, gpus = self._held.pop(job_id)
            quotas.charge(queue, -gpus, wall_s)

    def begin_anew(
        self, quotas: QuotaTree | None, spent: Iterable[Spent], attempts: Mapping[JobId, Attempt], wall_s: float
    ) -> None:
        """The clock was set, and the quota tree cannot go back in time: reset it to the records, and charge running jobs from their start."""
        if quotas is None:
            return
        quotas.begin(spent, wall_s)
        for job_id, (queue, gpus) in self._held.items():
            attempt = attempts.get(job_id)
            quotas.charge(queue, gpus, wall_s, None if attempt is None else attempt.placed_s)
