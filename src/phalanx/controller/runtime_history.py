"""Run times of ended jobs: recorded at each durable end, learned when a prediction is requested.

Recording costs the controller one append; replays of a trace, which request no prediction, pay no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.core.scheduling.estimates.run_time_prediction import (
    INFORMATIVE_END_STATES,
    JobTraits,
    RunTimePredictor,
    traits_of,
)
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job

RECORDED_MAX: Final = 20_000  # recorded and not yet learned; the newest, if there are more


class RuntimeHistory:
    """Written by the controller's thread, read by one other thread at a time."""

    def __init__(self) -> None:
        self._noted: deque[tuple[JobTraits, float]] = deque(maxlen=RECORDED_MAX)
        self._predictor = RunTimePredictor()

    def load(self, jobs: Iterable[Job]) -> None:
        """Record jobs that ended before this head started, oldest first.

        Only jobs with one attempt: the record of others does not separate running from waiting.
        """
        for job in jobs:
            if (
                job.state in INFORMATIVE_END_STATES
                and job.epoch == 1
                and job.started_s is not None
                and job.ended_s is not None
            ):
                self._noted.append((traits_of(job), max(0.0, job.ended_s - job.started_s)))

    def record(self, ended: Iterable[Job], attempts: Mapping[tuple[JobId, Epoch], Attempt]) -> None:
        """Record committed ends: the work kept from earlier attempts plus the last attempt's running time."""
        for job in ended:
            attempt = attempts.get((job.id, job.epoch))
            began_s = None if attempt is None else attempt.first_running_s
            if job.state in INFORMATIVE_END_STATES and began_s is not None and job.ended_s is not None:
                self._noted.append((traits_of(job), job.attained_s + max(0.0, job.ended_s - began_s)))

    def predictor(self) -> RunTimePredictor:
        """The predictor after learning everything recorded. Valid until the next call."""
        noted, predictor = self._noted, self._predictor
        while noted:
            predictor.record_end(*noted.popleft())
        return predictor
