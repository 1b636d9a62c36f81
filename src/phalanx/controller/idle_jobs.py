"""Applies idle policies to jobs that do nothing: those of queues to jobs that do not use their GPUs, and the idle limit of a job to itself.

Called in each step. It warns, notifies, and releases, parks or stops jobs.

The facts come as `IdleJobsObserved` from the thread that keeps the ledger of states; the decision is made here, by the newest records. All in
memory: a head that starts counts idleness from its own start, so that a job is never ended sooner than its queue says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.controller.requests import services
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import AuditCall
from phalanx.core.ids import JobId, TokenId, UserId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.events import StopRequested
from phalanx.core.lifecycle.service import desired_replicas
from phalanx.core.state.events import SleepReplicas
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import REVISIONS, SERVICES
from phalanx.core.state.reports import IdleJob, IdleJobsObserved
from phalanx.core.state.world import World
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.queue import idle_policy
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import AttemptState
from phalanx.core.work.usage.waste_terms import IdleAction, IdlePolicy, IdleStage, WasteKind

IDLE_POLICY: Final = UserId("idle-policy")  # `by` of what a policy does
WARNING: Final = "idle_warning"  # kinds of history lines
NOTICE: Final = "idle_notice"
ENDED: Final = "idle_ended"
GRACE_MAX_S: Final = 600.0  # the warning of a job's own limit comes so long before, at most half of the limit
NOTIFY_FACT: Final = "notify"  # in the facts of lines that a channel sends to somebody: to whom
OWNER: Final = "owner"
_STATE_TEXT: Final[Mapping[WasteKind, str]] = {
    WasteKind.UNOCCUPIED: "no process has used",
    WasteKind.IDLE: "its processes have not used",
    WasteKind.LOW: "it has used less than 10 % of",
    WasteKind.HUNG: "it has made no step on",
}


@dataclass(slots=True)
class _Idle:
    """A job that is idle. `since_s`: by CLOCK_BOOTTIME."""

    seen: IdleJob
    since_s: float


class _Progress(NamedTuple):
    """How far a policy is with a job. `at_s`: when it got there (CLOCK_BOOTTIME)."""

    policy: IdlePolicy | None = None
    stage: IdleStage = IdleStage.NONE
    at_s: float = 0.0

    def under(self, policy: IdlePolicy) -> _Progress:
        """How far this policy is: another one than before begins with its warning."""
        return self if self.policy == policy else _NOTHING

    def next_s(self, policy: IdlePolicy, idle: _Idle) -> float:
        """When the next stage is due. A job that was idle for longer when the policy was set still gets its whole grace."""
        match self.stage:
            case IdleStage.NONE:
                return idle.since_s + policy.warn_after_s
            case IdleStage.WARNED:
                return max(idle.since_s + policy.after_s, self.at_s + policy.after_s - policy.warn_after_s)
            case IdleStage.DUE:
                return math.inf


_NOTHING: Final = _Progress()


@dataclass(slots=True)
class IdlePolicyKeeper:
    """See the module.

    Attributes:
        own: it applies the idle limits of jobs, not the policies of queues.
        _jobs: those that are idle.
        _progress: how far the policy is with each of them.
        _over: jobs that were warned and no longer count as idle, since they work or the policy is gone; the next step records it.
        _before: `_progress` and `_over` before a step that is not durable yet, for `undo`.
    """

    own: bool = False
    _jobs: dict[JobId, _Idle] = field(default_factory=dict)
    _progress: dict[JobId, _Progress] = field(default_factory=dict)
    _over: dict[JobId, None] = field(default_factory=dict)
    _before: tuple[dict[JobId, _Progress], dict[JobId, None]] | None = None

    def observe(self, report: IdleJobsObserved, boot_s: float) -> None:
        """Take the jobs that are idle. Idempotent: a repeated report changes nothing."""
        known, self._jobs = self._jobs, {}
        for seen in report.quiet if self.own else report.jobs:
            before = known.pop(seen.job_id, None)
            if before is not None and (before.seen.epoch, before.seen.since_ms) == (seen.epoch, seen.since_ms):
                self._jobs[seen.job_id] = _Idle(seen, before.since_s)
                continue
            self._jobs[seen.job_id] = _Idle(seen, boot_s - max(0, report.at_ms - seen.since_ms) / 1000)
            if self._progress.pop(seen.job_id, _NOTHING).stage is IdleStage.WARNED:
                self._over[seen.job_id] = None
        for job_id in known:
            if self._progress.pop(job_id, _NOTHING).stage is IdleStage.WARNED:
                self._over[job_id] = None

    def update(self, context: StepContext) -> None:
        """Do what is due by now."""
        self._before = None
        if not self._jobs and not self._over:
            return
        self._before = dict(self._progress), dict(self._over)
        over, self._over = self._over, {}
        for job_id in over:
            _record_end(context, job_id, "idle limit" if self.own else "idle policy")
        for job_id in sorted(self._jobs):
            idle = self._jobs[job_id]
            found = self._subject(context.world, idle.seen)
            if found is None:
                continue
            job, attempt, policy = found
            now_s, progress = context.now.boot_s, self._progress.get(job_id, _NOTHING).under(policy)
            if progress.next_s(policy, idle) <= now_s:
                warns = policy.ends_use and progress.stage is IdleStage.NONE
                after = _Progress(policy, IdleStage.WARNED if warns else IdleStage.DUE, now_s)
                self._progress[job_id] = after
                left_s = after.next_s(policy, idle) - now_s
                enforcement = _Enforcement(
                    context, job, attempt, policy, idle.seen.state, now_s - idle.since_s, own=self.own
                )
                enforcement.warn(left_s) if warns else enforcement.act()

    def settle(self) -> None:
        """The newest step is durable."""
        self._before = None

    def undo(self) -> None:
        """The newest step was undone."""
        if self._before is not None:
            self._progress, self._over = self._before
            self._before = None

    def due_in_s(self, world: World, boot_s: float) -> float:
        """Time until a policy has something to do; infinite for never."""
        due_s = math.inf
        for job_id, idle in self._jobs.items():
            found = self._subject(world, idle.seen)
            if found is not None:
                policy = found[2]
                due_s = min(due_s, self._progress.get(job_id, _NOTHING).under(policy).next_s(policy, idle) - boot_s)
        return due_s

    def _subject(self, world: World, seen: IdleJob) -> tuple[Job, Attempt, IdlePolicy] | None:
        """The job with its attempt and policy, if the policy applies to it now."""
        job, attempt = world.jobs.get(seen.job_id), world.attempts.get(seen.job_id)
        if (
            seen.paused
            or job is None
            or attempt is None
            or attempt.epoch != seen.epoch
            or attempt.state is not AttemptState.RUNNING
        ):
            return None
        if self.own:
            policy = _limit_of(job)
        else:
            policy = idle_policy(world.queues, job.queue)
        if policy is None or seen.state not in policy.states or policy.exempts(dict(job.spec.labels)):
            return None
        return job, attempt, policy


def _limit_of(job: Job) -> IdlePolicy | None:
    """The idle limit of a job, as a policy."""
    idle_s = job.spec.idle_s
    return (
        None
        if idle_s is None
        else IdlePolicy(action=IdleAction.RELEASE, after_s=idle_s, grace_s=min(GRACE_MAX_S, idle_s / 2))
    )


def _record_end(context: StepContext, job_id: JobId, rule: str) -> None:
    job, attempt = context.world.jobs.get(job_id), context.world.attempts.get(job_id)
    if job is not None and attempt is not None and attempt.state is AttemptState.RUNNING:
        text = f"it no longer counts as idle: the warning of the {rule} is withdrawn"
        context.change.add_history(
            HistoryLine(
                seq=0, at_s=context.now.wall_s, kind=ENDED, text=text, job_id=job_id, epoch=job.epoch, by=IDLE_POLICY
            )
        )


@dataclass(frozen=True, slots=True)
class _Enforcement:
    """What a policy does with one job now."""

    context: StepContext
    job: Job
    attempt: Attempt
    policy: IdlePolicy
    state: WasteKind
    idle_s: float
    own: bool = False

    def warn(self, left_s: float) -> None:
        """Say what follows in so many seconds if nothing changes."""
        if self.job.replica is not None:
            deed = f"a replica of service {self.job.replica.service} falls asleep, if it can and another serves"
        elif self.policy.action is IdleAction.STOP:
            deed = "it is cancelled"
        elif self.own:
            deed = "it is parked: its GPUs are taken back until it is resumed"
        else:
            deed = "its GPUs are taken back and it is held"
        self._record(WARNING, f"{self._why}; in {format_duration(left_s)} {deed}", notify=True)

    def act(self) -> None:
        """Do what the policy says."""
        match self.policy.action:
            case IdleAction.OFF | IdleAction.WARN:
                self._record(WARNING, self._why, notify=False)
            case IdleAction.NOTIFY:
                self._record(NOTICE, self._why, notify=True)
            case IdleAction.RELEASE | IdleAction.STOP if self.job.replica is not None:
                self._sleep_replica()
            case IdleAction.RELEASE:
                cause = EndCause.PARKED if self.own else EndCause.IDLE
                self._audit(f"{'park' if self.own else 'release'}: {self._why}")
                self.context.apply_event(self.job.id, StopRequested(cause=cause, why=self._why, by=IDLE_POLICY))
            case IdleAction.STOP:
                self._audit(f"stop: {self._why}")
                case = self.context.case(self.job.id)
                self.context.apply(jobs.cancel(case, IDLE_POLICY, self._why, self.context.facts))

    @property
    def _why(self) -> str:
        """The facts in a sentence; only numbers and names that all users may see."""
        if self.own:
            return f"no GPU work, no CPU above noise and no input for {format_duration(self.idle_s)}"
        gpus = gpus_of(self.attempt.allocation.milli)
        what = f"its {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
        return f"{_STATE_TEXT[self.state]} {what} for {format_duration(self.idle_s)} (idle policy of queue {self.job.queue})"

    def _record(self, kind: str, text: str, *, notify: bool) -> None:
        facts: dict[str, str | int | float | None] = {
            "state": self.state.value,
            "gpus": gpus_of(self.attempt.allocation.milli),
            "idle_s": round(self.idle_s, 1),
            "action": self.policy.action.value,
            "queue": self.job.queue,
        }
        if notify:
            facts[NOTIFY_FACT] = OWNER
        line = HistoryLine(
            seq=0,
            at_s=self.context.now.wall_s,
            kind=kind,
            text=text,
            job_id=self.job.id,
            epoch=self.job.epoch,
            by=IDLE_POLICY,
            facts=facts,
        )
        self.context.change.add_history(line)

    def _sleep_replica(self) -> None:
        """Let one more replica of the service sleep if it can, as long as another one stays awake; else only say so."""
        assert self.job.replica is not None
        world = self.context.world
        service = world.table(SERVICES).get(self.job.replica.service)
        revision = None if service is None else world.table(REVISIONS).get((service.id, service.revision))
        if service is None or revision is None or service.stopped_by:
            return
        awake = desired_replicas(service, revision) - service.asleep
        if not revision.terms.sleep or awake <= 1:
            why = "it has no sleep hook" if not revision.terms.sleep else "no other replica would serve"
            self._record(WARNING, f"{self._why}; service {service.id} keeps it: {why}", notify=True)
            return
        self._audit(f"sleep: {self._why}")
        self._record(WARNING, f"{self._why}; a replica of service {service.id} falls asleep", notify=True)
        services.sleep(self.context, SleepReplicas(service_id=service.id, by=IDLE_POLICY, asleep=service.asleep + 1))

    def _audit(self, detail: str) -> None:
        self.context.audit_calls.append(
            AuditCall(
                user=IDLE_POLICY,
                token_id=TokenId(""),
                origin="head",
                action="idle policy",
                target=f"job {self.job.id}",
                detail=detail,
            )
        )
