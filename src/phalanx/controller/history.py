"""How long jobs ran, as the loop hears of it: noted at each durable end, learned when somebody asks for a prediction.

Noting costs the loop an append; replays of a trace, in which nobody asks, pay no more than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.core.scheduling.predict import ENDS_ITS_WAY, Predictor, Traits, traits_of
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job

NOTED_MAX: Final = 20_000  # ends noted and not yet learned; of more than that since the last question, the newest


class History:
    """Written by the controller's thread, read by one other at a time."""

    def __init__(self) -> None:
        self._noted: deque[tuple[Traits, float]] = deque(maxlen=NOTED_MAX)
        self._predictor = Predictor()

    def remember(self, jobs: Iterable[Job]) -> None:
        """Note jobs that ended before this life of the head, oldest first.

        Only those with one attempt: of the others the record does not say how long they ran and how long they waited.
        """
        for job in jobs:
            if job.state in ENDS_ITS_WAY and job.epoch == 1 and job.started_s is not None and job.ended_s is not None:
                self._noted.append((traits_of(job), max(0.0, job.ended_s - job.started_s)))

    def note(self, ended: Iterable[Job], attempts: Mapping[tuple[JobId, Epoch], Attempt]) -> None:
        """Note ends just committed: the work kept over all attempts, and the last one from its start."""
        for job in ended:
            attempt = attempts.get((job.id, job.epoch))
            began_s = None if attempt is None else attempt.first_running_s
            if job.state in ENDS_ITS_WAY and began_s is not None and job.ended_s is not None:
                self._noted.append((traits_of(job), job.attained_s + max(0.0, job.ended_s - began_s)))

    def predictor(self) -> Predictor:
        """All that has been noted, learned. It may be used until this is called again."""
        noted, predictor = self._noted, self._predictor
        while noted:
            predictor.ended(*noted.popleft())
        return predictor
