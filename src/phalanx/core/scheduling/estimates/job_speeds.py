"""The speed of each job on the models of the board's fleet: gathers what the policy observed, facts of devices, and what the job states.

Called by the scheduler when it assigns a job to its class, and for explanations. On a fleet of one model it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.core.ids import JobId, UserId
from phalanx.core.scheduling.estimates.device_speeds import (
    NO_ESTIMATE,
    NO_FACTS,
    SpeedEstimate,
    SpeedEvidence,
    SpeedFacts,
    SpeedSource,
    by_model,
    by_table,
    combined,
    speed_ratio_text,
)
from phalanx.core.scheduling.estimates.run_time_prediction import traits_of
from phalanx.core.scheduling.policy import Policy, SpeedSamples
from phalanx.core.work.job import Job
from phalanx.core.work.pace import MeasuredPace


def estimate_texts(models: Sequence[str], estimate: SpeedEstimate) -> list[str]:
    """The estimate for users, the fastest model first: `fastest on h100`, `2.1x slower on a100 (observed, 3 runs)`."""
    known = [(-speed, number) for number, speed in enumerate(estimate.speeds) if estimate.sources[number] is not None]
    texts = []
    for share, number in sorted(known):
        source = estimate.source_text(number)
        texts.append(
            f"fastest on {models[number]}"
            if share == -1.0
            else f"{speed_ratio_text(-share)} on {models[number]} ({source})"
        )
    return list(dict.fromkeys(texts))  # nodes with MIG mode on are models of their own


TABLES_KEPT: Final = 10_000  # distinct tables of jobs; some hundred bytes each
REFRESH_S: Final = 60.0  # new observations take effect this often; a policy's round is as long


class JobSpeeds:
    """The estimates of one scheduler.

    Attributes:
        facts: of the devices; set by the scheduler's owner.
        changed: owners and names of jobs of which something new was learned since the last refresh.
    """

    def __init__(self, policy: Policy) -> None:
        self.facts = NO_FACTS
        self.changed: set[tuple[UserId, str]] = set()
        self._policy = policy
        self._models: tuple[str, ...] = ()
        self._of_facts: tuple[SpeedEvidence, SpeedEvidence] | None = None
        self._facts_only = NO_ESTIMATE
        self._refreshed_s = float("-inf")
        self._learned: dict[JobId, tuple[MeasuredPace, ...]] = {}  # of jobs that have not ended
        self._of_tables: dict[
            tuple[object, ...], SpeedEstimate
        ] = {}  # of jobs of which nothing was observed, by their tables

    @property
    def refresh_s(self) -> float:
        """When what was learned takes effect; infinite if nothing was."""
        return self._refreshed_s + REFRESH_S if self.changed and len(self._models) > 1 else float("inf")

    def set_models(self, models: Sequence[str]) -> None:
        """The models of the fleet, by number; "" for nodes without devices."""
        self._models = tuple(models)
        self._of_facts = None
        self._of_tables.clear()

    def set_facts(self, facts: SpeedFacts) -> bool:
        """What is known of devices; returns whether it changed."""
        if facts is self.facts or facts == self.facts:
            return False
        self.facts, self._of_facts = facts, None
        self._of_tables.clear()
        return True

    def learn(self, job: Job) -> None:
        """Pass the job's measured paces to the policy. Idempotent."""
        ended = job.state.terminal
        known = self._learned.pop(job.id, ()) if ended else self._learned.get(job.id, ())
        if job.paces == known:
            return
        if not ended:
            self._learned[job.id] = job.paces
        for measured in job.paces:
            if self._policy.learn_pace(job.id, traits_of(job), measured):
                self.changed.add((job.user, job.spec.name))

    def take_changed(self, now_s: float) -> set[tuple[UserId, str]]:
        """The names whose jobs need a new estimate now; empty until the next refresh."""
        if now_s < self.refresh_s:
            return set()
        self._refreshed_s = now_s
        changed, self.changed = self.changed, set()
        return changed

    def estimate(self, job: Job) -> SpeedEstimate:
        """The job's speed on each model. Cost: what the policy has of its name; for a job that nothing is known of, one look."""
        models, spec = self._models, job.spec
        if len(models) < 2 or not spec.role.gpus.milli or spec.role.others:
            return NO_ESTIMATE
        if self._of_facts is None:
            self._of_facts = (
                SpeedEvidence(source=SpeedSource.CALIBRATED, speeds=by_model(models, self.facts.calibrated)),
                SpeedEvidence(source=SpeedSource.PEAK, speeds=by_model(models, self.facts.peak)),
            )
            self._facts_only = combined(len(models), self._of_facts)
        samples = self._policy.pace_samples(job.id, traits_of(job))
        if not (samples.speeds or spec.speeds or spec.planned_speeds):
            return self._facts_only
        if samples.speeds:
            return self._combined(job, samples)
        tables = (spec.planned_speeds, spec.speeds)
        known = self._of_tables.get(tables)
        if known is None:
            if len(self._of_tables) >= TABLES_KEPT:
                self._of_tables.clear()
            known = self._of_tables[tables] = self._combined(job, samples)
        return known

    def _combined(self, job: Job, samples: SpeedSamples) -> SpeedEstimate:
        assert self._of_facts is not None  # set by `estimate`
        models, (calibrated, peak) = self._models, self._of_facts
        planned = by_table(models, job.spec.planned_speeds, rest=False)
        return combined(
            len(models),
            (
                SpeedEvidence(source=SpeedSource.OBSERVED, speeds=by_model(models, samples.speeds), runs=samples.runs),
                calibrated,
                SpeedEvidence(source=SpeedSource.PLANNED, speeds=planned),
                SpeedEvidence(source=SpeedSource.STATED, speeds=by_table(models, job.spec.speeds)),
                peak,
            ),
        )
