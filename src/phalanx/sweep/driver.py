"""One turn of a sweep: reads how the jobs of its trials are, stops the bad ones, and starts the next. It has no clock and no connection.

The order of writes makes a kill at any point safe. A trial is stored before its job is submitted, with an idempotency key of its number. The
decision to stop it is stored before its job is cancelled; the next process cancels live jobs of trials that have ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.study import SweepStudy, TrialRecord

_RUNGS: Final = 3  # below the full length, if the first rung is derived: a bad trial gets 1/27 of it with eta 3
_RUNGS_MAX: Final = 40  # 3**40 steps are more than any training has
EventKind = Literal["started", "resumed", "running", "stopped", "complete", "failed", "freed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """The job of a trial. `state`: pending, running, or how it ended; `ended_s`: Unix time."""

    job_id: str
    state: str
    ended: bool = False
    step: int | None = None
    steps_total: int | None = None
    ended_s: float | None = None
    node: str = ""
    why: str = ""


class TrialJobs(Protocol):
    """Where trials run: a cluster, or a simulation."""

    def submit(self, trial: TrialRecord) -> str:
        """Submit the job of a trial, or find the one submitted before; return its id."""
        ...

    def look(self, job_ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Return these jobs by id."""
        ...

    def curve(self, job_id: str) -> Sequence[tuple[int, float | None]]:
        """Return the metric by step, ascending; None where it is no number."""
        ...

    def cancel(self, job_id: str, why: str) -> None:
        """Stop a job; one that has ended stays as it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEvent:
    """What happened to a trial. `at_s`: when this process saw it; `freed_s`: from the decision to stop it to the end of its job."""

    kind: EventKind
    trial: int
    at_s: float
    job_id: str = ""
    values: Mapping[str, str]
    step: int | None = None
    value: float | None = None
    why: str = ""
    freed_s: float | None = None


class SweepDriver:
    """Drives one sweep; the caller holds its lock and calls `turn` until `done`."""

    def __init__(self, definition: SweepDefinition, study: SweepStudy, jobs: TrialJobs) -> None:
        self.definition = definition
        self.study = study
        self.seen: dict[str, TrialJob] = {}
        self._jobs = jobs
        self._live: dict[int, TrialRecord] = {}
        self._stopping: dict[str, tuple[TrialRecord, float]] = {}  # job: the trial, and when it was decided
        self._events: list[SweepEvent] = []
        self._started = False

    @property
    def done(self) -> bool:
        """Whether all trials have ended, and the GPUs of stopped ones are free."""
        started = self._started and self.study.count >= self.definition.samples
        return started and not self._live and not self._stopping

    def turn(self, now_s: float) -> list[SweepEvent]:
        """Do what is due; return what happened."""
        self._events = []
        if not self._started:
            self._resume(now_s)
            self._started = True
        self._look(now_s)
        while len(self._live) < self.definition.max_parallel and self.study.count < self.definition.samples:
            self._submit(self.study.ask(), "started", now_s)
        return self._events

    def _resume(self, now_s: float) -> None:
        for trial in self.study.resume_trials():
            if trial.job_id:
                self._live[trial.number] = trial
                self._note("resumed", trial, now_s)
            else:
                self._submit(trial, "resumed", now_s)
        ended = {one.job_id: one for one in self.study.trials() if one.state != "running" and one.job_id}
        for job_id, job in self._jobs.look(list(ended)).items():
            if not job.ended:
                self._cancel(ended[job_id], now_s)

    def _submit(self, trial: TrialRecord, kind: EventKind, now_s: float) -> None:
        self.study.set_job(trial.number, self._jobs.submit(trial))
        self._live[trial.number] = self.study.trial(trial.number)
        self._note(kind, self._live[trial.number], now_s)

    def _look(self, now_s: float) -> None:
        ids = [one.job_id for one in self._live.values()]
        found = self._jobs.look([*ids, *self._stopping])
        for trial in list(self._live.values()):
            job = found[trial.job_id]
            before = self.seen.get(trial.job_id)
            self.seen[trial.job_id] = job
            if job.state == "running" and (before is None or before.state != "running"):
                self._note("running", trial, now_s, why=job.node)
            self._judge(trial, job, now_s)
        for job_id, (trial, decided_s) in list(self._stopping.items()):
            self.seen[job_id] = job = found[job_id]
            if job.ended:
                del self._stopping[job_id]
                freed_s = max(0.0, (now_s if job.ended_s is None else job.ended_s) - decided_s)
                self._note("freed", trial, now_s, freed_s=freed_s)

    def _judge(self, trial: TrialRecord, job: TrialJob, now_s: float) -> None:
        """Report the rungs that a trial has passed, and end it if ASHA or its job says so."""
        self._derive_first_rung(job)
        rung = self._next_rung(trial.number)
        passed = self.definition.asha and rung is not None and job.step is not None and job.step >= rung
        if not passed and not job.ended:
            return
        curve = self._jobs.curve(trial.job_id)
        succeeded = job.ended and job.state == "succeeded"
        # The last rung of a trial that has ended well would stop nothing, and its final value counts more.
        while not succeeded and self.definition.asha and (rung := self._next_rung(trial.number)) is not None:
            value = _value_at(curve, rung)
            if value is None:
                break
            if self.study.report(trial.number, rung, value):
                self._stop(trial, rung, value, now_s, ended=job.ended)
                return
        if job.ended:
            self._end(trial, job, curve, now_s)

    def _stop(self, trial: TrialRecord, step: int, value: float, now_s: float, *, ended: bool) -> None:
        self.study.tell(trial.number, "stopped", why=f"stopped at step {step}")
        del self._live[trial.number]
        self._note("stopped", trial, now_s, step=step, value=value)
        if not ended:
            self._cancel(trial, now_s)

    def _cancel(self, trial: TrialRecord, now_s: float) -> None:
        self._jobs.cancel(trial.job_id, f"sweep {self.definition.name}: trial {trial.number} is stopped early")
        self._stopping[trial.job_id] = (trial, now_s)

    def _end(self, trial: TrialRecord, job: TrialJob, curve: Sequence[tuple[int, float | None]], now_s: float) -> None:
        known = [(step, value) for step, value in curve if value is not None]
        del self._live[trial.number]
        metric = self.definition.metric
        if job.state != "succeeded":
            why = job.why or f"its job ended as {job.state}"
        elif not known:
            why = f"it reported no {metric}; call phalanx.torch.init() once, and phalanx.torch.report(step=..., loss=...) after each step"
        elif curve[-1][1] is None:
            why = f"its {metric} is no number at step {curve[-1][0]}"
        else:
            why = ""
        step, value = known[-1] if known else (None, None)
        if why:
            self.study.tell(trial.number, "failed", why=why)
            self._note("failed", trial, now_s, step=step, why=why)
            return
        assert value is not None
        self.study.tell(trial.number, "complete", value)
        self._note("complete", trial, now_s, step=step, value=value)
        if self.definition.asha and not self.study.min_steps and step:
            self.study.set_min_steps(max(1, step // self.definition.eta**_RUNGS))

    def _derive_first_rung(self, job: TrialJob) -> None:
        if self.definition.asha and not self.study.min_steps and job.steps_total:
            self.study.set_min_steps(max(1, job.steps_total // self.definition.eta**_RUNGS))

    def _next_rung(self, number: int) -> int | None:
        """Return the lowest rung that the trial has not reported; None while no rung is known."""
        first = self.study.min_steps
        if not first:
            return None
        reported = self.study.trial(number).reports
        rungs = (first * self.definition.eta**place for place in range(_RUNGS_MAX))
        return next((step for step in rungs if step not in reported), None)

    def _note(
        self,
        kind: EventKind,
        trial: TrialRecord,
        now_s: float,
        *,
        step: int | None = None,
        value: float | None = None,
        why: str = "",
        freed_s: float | None = None,
    ) -> None:
        self._events.append(
            SweepEvent(
                kind=kind,
                trial=trial.number,
                at_s=now_s,
                job_id=trial.job_id,
                values=trial.values,
                step=step,
                value=value,
                why=why,
                freed_s=freed_s,
            )
        )


def best_trial(trials: Sequence[TrialRecord], *, maximize: bool) -> TrialRecord | None:
    """Return the complete trial with the best value, of equal ones the first; None without any."""
    complete = [one for one in trials if one.state == "complete" and one.value is not None]
    sign = -1.0 if maximize else 1.0
    return min(complete, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def _value_at(curve: Sequence[tuple[int, float | None]], rung: int) -> float | None:
    """Return the metric at the first point from the rung on; NaN if it was a number only before; None without one."""
    later = next((value for step, value in curve if step >= rung), None)
    reached = bool(curve) and curve[-1][0] >= rung
    if later is None and reached and any(value is not None for _, value in curve):
        return math.nan
    return later
