"""Explanations for users: why each job waits, and why one was stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.entry import Because, Decision, Verb
from phalanx.core.scheduling.known import Known
from phalanx.core.state.plan import Stop, Waiting
from phalanx.core.work.attempt import Cause
from phalanx.core.work.job import Job, JobState

_REASON_TEXT: Final = {
    Because.VALUE: ", which is expected to end sooner on the same GPUs",
    Because.PRIORITY: ", which has a higher priority",
    Because.RECLAIM: ", whose queue reclaims the GPUs it had lent",
    Because.OVERDUE: ", which has waited past its limit",
    Because.REPAIR: ", which lost a node and gets its place back",
    Because.SHRINK: ": an elastic job shrinks",
    Because.GROW: ": more nodes are idle",
}


class Waits(Mapping[JobId, Waiting]):
    """Why each pending job waits, computed on demand."""

    def __init__(self, scheduler: Known, jobs: Mapping[JobId, Job]) -> None:
        self._scheduler, self._jobs = scheduler, jobs

    def __getitem__(self, job_id: JobId) -> Waiting:
        job = self._jobs.get(job_id)
        why = None if job is None or job.state is not JobState.PENDING else self._scheduler.why(job)
        if why is None:
            raise KeyError(job_id)
        return why

    def __iter__(self) -> Iterator[JobId]:
        scheduler, jobs = self._scheduler, self._jobs
        waiting = [scheduler.ids[seq] for seq in scheduler.board.waiting]
        known = [(job_id, jobs.get(job_id)) for job_id in (*scheduler.parked, *waiting, *scheduler.due)]
        # The board is ahead of the records: a job that a plan stops or moves already waits there, but still runs here.
        return iter([job_id for job_id, job in known if job is not None and job.state is JobState.PENDING])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def stop_of(scheduler: Known, job_id: JobId, decision: Decision) -> Stop:
    """A stop or a move as the plan states it, with the other job and the reason."""
    other = None if decision.other is None else scheduler.ids.get(decision.other.seq)
    reason_text = _REASON_TEXT.get(decision.because, "") if decision.because is not None else ""
    if decision.verb is Verb.MOVE:
        names = ", ".join(scheduler.fit.nodes[number].id for number, _ in decision.places[:4])
        other_text = f" to make room for job {other}" if other is not None else ""
        return Stop(
            job_id=job_id,
            cause=Cause.MOVED,
            why=f"moved to {names}{other_text}{reason_text}",
            other=other,
        )
    other_text = f" by job {other}" if other is not None else ""
    return Stop(job_id=job_id, cause=Cause.PREEMPTED, why=f"preempted{other_text}{reason_text}", other=other)
