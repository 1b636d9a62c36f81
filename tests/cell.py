"""Records and a `Scheduler` in virtual time, without a controller or processes: what the plans say is carried out at once and to the letter.

cell = Cell(make_fleet("r: n0=8"), name="fifo")
cell.submit(job("a", gpus=8))
cell.go_on(60.0)                      # a minute later; plans are made as often as they ask for
cell.end("a")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx.core.ids import JobId
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.transitions import TransitionContext
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.plan import Plan
from phalanx.core.state.records import Record
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import Fleet, T

PLANS_MAX = (
    1000  # in one stretch of time, beside one every ten seconds: past it the scheduler asks again and again for nothing
)
EVERY_S = 10.0


class Cell:
    """See the module.

    Attributes:
        plans: every plan that decided something, oldest first.
        lasts: how long a job runs by itself, by id; the others run until `end`.
        save_s: how long a stopped job still holds its place.
    """

    def __init__(self, fleet: Fleet, *, save_s: float = 0.0, **policy: Any) -> None:
        self.policy = PolicySettings(**policy)
        self.scheduler = Scheduler(self.policy)
        self.world = World()
        self.now_s = T
        self.save_s = save_s
        self.plans: list[Plan] = []
        self.lasts: dict[JobId, float] = {}
        self._leaving: dict[JobId, tuple[float, WaitReasonCode]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.put(*fleet.queues.values(), *fleet.nodes.values(), *fleet.reservations.values(), *fleet.spent.values())
        self.put(*fleet.licences.values())

    def put(self, *records: Record) -> None:
        """These records are new or changed; the scheduler is told."""
        change = WorldChange(world=self.world)
        for record in records:
            change.put(record)
        self.scheduler.update(self.world, change.records, self.now_s)

    def submit(self, *jobs: Job, lasts_s: float | None = None) -> None:
        """They come now, in this order."""
        for one in jobs:
            seq = 1 + max((job.seq for job in self.world.jobs.values()), default=0)
            if lasts_s is not None:
                self.lasts[one.id] = lasts_s
            self.put(replace(one, seq=seq, submit_s=self.now_s))

    def end(self, name: str, state: JobState = JobState.SUCCEEDED) -> None:
        """The job is over; if it runs its place is free."""
        job_id = JobId(name)
        self._leaving.pop(job_id, None)
        self._settle(job_id, state=state, ended_s=self.now_s)

    def fails(self, name: str, reason: WaitReasonCode = WaitReasonCode.NODE_FAIL) -> None:
        """The attempt ended without its job's doing, and nothing of it is kept: the job waits again."""
        self._settle(JobId(name), state=JobState.PENDING, reason=reason)

    def plan(self) -> Plan:
        """Decide now, and carry it out."""
        plan = self.scheduler.plan(self.world, self.now_s)
        for stop in plan.stops:
            reason = WaitReasonCode.PREEMPTED if stop.cause is EndCause.PREEMPTED else WaitReasonCode.MOVED
            self._leaving[stop.job_id] = (self.now_s + self.save_s, reason)
        for placement in plan.placements:
            why_not = rejection_reason(self.world, placement)
            if why_not:  # as the controller does: who is leaving still counts against its queue and its array
                assert self._leaving, why_not
                self.scheduler.record_rejection(placement.job_id, self.now_s)
                continue
            job = self.world.jobs[placement.job_id]
            outcome = place(job, placement.allocation, TransitionContext(now_s=self.now_s), placement.speed)
            assert outcome.attempt is not None
            self.put(outcome.job, replace(outcome.attempt, state=AttemptState.RUNNING))
            self._will_end(outcome.job)
        if plan.stops or plan.placements:
            self.plans.append(plan)
        return plan

    def go_on(self, seconds: float) -> None:
        """Let so much time pass. Plans are made now, whenever one asked to be, and whenever something happened."""
        end_s = self.now_s + seconds
        plans_max = PLANS_MAX + int(seconds / EVERY_S)
        for _ in range(plans_max):
            wake_s = self.plan().wake_s
            left_s = min((at_s for at_s, _ in self._leaving.values()), default=float("inf"))
            ends_s = min((at_s for at_s, _, _ in self._due), default=float("inf"))
            next_s = min(wake_s, left_s, ends_s)
            if next_s > end_s:
                self.now_s = end_s
                return
            self.now_s = max(self.now_s, next_s)
            self._happen()
        raise AssertionError(f"{plans_max} plans in {seconds} s")

    def runs(self, name: str) -> bool:
        return JobId(name) in self.world.attempts and JobId(name) not in self._leaving

    def place_of(self, name: str) -> str:
        """`n0:0,1 n1:0,1`; empty while it waits."""
        attempt = self.world.attempts.get(JobId(name))
        return (
            ""
            if attempt is None
            else " ".join(f"{one.node_id}:{','.join(map(str, one.devices))}" for one in attempt.allocation.grants)
        )

    def why(self, name: str) -> WaitReasonCode | None:
        found = self.scheduler.wait_reason(self.world.jobs[JobId(name)])
        return None if found is None else found.reason

    def _happen(self) -> None:
        for job_id, (at_s, reason) in list(self._leaving.items()):
            if at_s <= self.now_s:
                del self._leaving[job_id]
                self._settle(job_id, state=JobState.PENDING, reason=reason)
        due, self._due = (
            [one for one in self._due if one[0] <= self.now_s],
            [one for one in self._due if one[0] > self.now_s],
        )
        for _, _, what in sorted(due, key=lambda one: one[:2]):
            what()

    def _will_end(self, job: Job) -> None:
        lasts_s = self.lasts.get(job.id)
        if lasts_s is None:
            return
        epoch = job.epoch

        def over() -> None:
            attempt = self.world.attempts.get(job.id)
            if attempt is not None and attempt.epoch == epoch and job.id not in self._leaving:
                self.end(job.id)

        self._order += 1
        self._due.append((self.now_s + max(1.0, lasts_s - job.attained_s), self._order, over))

    def _settle(self, job_id: JobId, **changes: Any) -> None:
        """The attempt, if there is one, has ended: the job has become so."""
        job, attempt = self.world.jobs[job_id], self.world.attempts.get(job_id)
        stopped = changes.get("reason") in (WaitReasonCode.PREEMPTED, WaitReasonCode.MOVED)
        if attempt is not None and (stopped or changes["state"] is not JobState.PENDING):
            changes["attained_s"] = job.attained_s + (self.now_s - attempt.placed_s if job.spec.saves_on_stop else 0.0)
        changes["preemptions"] = job.preemptions + (changes.get("reason") is WaitReasonCode.PREEMPTED)
        changes["moves"] = job.moves + (changes.get("reason") is WaitReasonCode.MOVED)
        ended = [] if attempt is None else [replace(attempt, state=AttemptState.ENDED, ended_s=self.now_s)]
        self.put(replace(job, **changes), *ended)
