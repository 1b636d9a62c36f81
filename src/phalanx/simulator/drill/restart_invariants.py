"""Invariant 13 of DESIGN 3: number of restarts of a job, counted from the cause of each generation's end. Called by `invariants`.

It does not use the job's own counters, since these may be wrong.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.lifecycle.transitions import NO_PROGRESS_BUDGET
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import NO_EPOCH, Job
from phalanx.simulator.drill.violations import require

CHARGED: Final = (EndCause.CRASH, EndCause.NODE_FAIL, EndCause.FAULT, EndCause.START_FAIL, EndCause.HANG)


class RestartChecker:
    """Counts the causes that ended the generations of one job."""

    def __init__(self) -> None:
        self._epoch, self._causes = NO_EPOCH, 0  # counted causes of this attempt
        self._step = self._in_vain = self._failed = 0

    def check(self, attempt: Attempt, job: Job) -> None:
        """Check a commit of the attempt, with the job at that time."""
        fresh = attempt.causes[self._causes if attempt.epoch == self._epoch else 0 :]
        self._epoch, self._causes = attempt.epoch, len(attempt.causes)
        if job.progress_step > self._step:
            self._step, self._in_vain = job.progress_step, 0
        self._in_vain += sum(cause in CHARGED for cause in fresh)
        self._failed += fresh.count(EndCause.FAILED)
        if job.state.terminal or job.replica is not None:  # a service restarts its replicas however often they fail
            return
        require(
            self._in_vain <= NO_PROGRESS_BUDGET,
            13,
            f"job {job.id} continues after {self._in_vain} restarts without progress",
        )
        retry = job.spec.retry
        require(
            self._failed <= retry,
            13,
            f"job {job.id} continues after {self._failed} failures with {retry} retries",
        )
