"""Replay through the whole job lifecycle: `Controller.step` makes every transition, as in production, but in virtual time.

Jobs go through the same events and commands as on a production cluster. A job runs exactly its duration, plus the restart cost for each
preemption and move. Events at one instant go into one step, ends before arrivals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import NeverFits, PhalanxError
from phalanx.core.ids import JobId, QueueId, UserId
from phalanx.core.scheduling.feasibility.request import feasibility_request
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import Event, SubmitJob
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.simulator.cluster import (
    PROJECT,
    QUEUE,
    InstantResult,
    ReplayCluster,
)
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.rented_nodes import RentedPool
from phalanx.simulator.results import (
    PROGRESS_EVERY,
    ReplayedJob,
    ReplayEvent,
    ReplayListener,
    ReplayResult,
)
from phalanx.simulator.supervisors import GangEvent
from phalanx.simulator.trace import TraceJob

_FOREVER = float("inf")
IDLE_MAX_S: Final = 86_400.0  # time without a running job or an arrival, beyond a budget period, after which waiting jobs will never start


@dataclass(slots=True)
class _JobProgress:
    """Progress of one job.

    Attributes:
        left_s: remaining work, in seconds of `TraceJob.duration_s`.
        owed_s: time that it must still repeat after stops and moves.
        rate: work per second on its GPUs.
        began_s: when its tasks started; negative while they do not run.
        due_s: when they will finish; negative while they do not run.
        waits_from_s: start of the current wait.
    """

    outcome: ReplayedJob
    left_s: float
    waits_from_s: float
    owed_s: float = 0.0
    rate: float = 1.0
    began_s: float = -1.0
    due_s: float = -1.0


def replay_lifecycle(
    jobs: Sequence[TraceJob],
    nodes: Sequence[TraceNode],
    policy: PolicySettings,
    *,
    restart_cost_s: Callable[[int], float] | float = 60.0,
    curve_step_s: float = 0.0,
    skip_unplaceable: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_end: Callable[[TraceJob], None] | None = None,
    on_event: ReplayListener | None = None,
    queues: Sequence[Queue] = (),
    pools: Sequence[RentedPool] = (),
) -> ReplayResult:
    """Replay `jobs` on `nodes`.

    Args:
        jobs: by submit time.
        nodes: the fleet.
        policy: the controller's policy.
        restart_cost_s: extra work per preemption or move; a function of the job's GPUs, or a constant.
        curve_step_s: minimum time between points of the curve; 0 records none.
        skip_unplaceable: skip jobs that can never start and list them in the result, instead of raising.
        on_progress: called with (ended, total) at intervals.
        on_end: called for each job that finishes, before other events of that instant.
        on_event: called for each start, stop and end; a move is a stop and a start.
        queues: queues with quotas; a job's label names its queue, else it uses the default queue.
        pools: of nodes that are rented while jobs wait.

    Raises:
        NeverFits: a job can never start, or jobs wait on an idle fleet without further events.
    """
    replay = _Replay(
        jobs, nodes, policy, restart_cost_s, skip_never=skip_unplaceable, on_end=on_end, queues=queues, pools=pools
    )
    replay.on_event = on_event
    replay.run(curve_step_s, on_progress)
    result = replay.result
    if result.unplaceable:
        result.jobs = [outcome for outcome in result.jobs if outcome.end_s >= 0.0]
    return result


class _Replay:
    """The event loop: arrivals, ends, and the controller's timers."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: Sequence[TraceNode],
        policy: PolicySettings,
        restart_cost_s: Callable[[int], float] | float,
        *,
        skip_never: bool,
        on_end: Callable[[TraceJob], None] | None = None,
        queues: Sequence[Queue] = (),
        pools: Sequence[RentedPool] = (),
    ) -> None:
        self.jobs = jobs
        self.on_end = on_end
        self.on_event: ReplayListener | None = None
        self.skip_never = skip_never
        self.cost = restart_cost_s if callable(restart_cost_s) else (lambda _gpus: restart_cost_s)
        start_s = jobs[0].submit_s if jobs else 0.0
        self.idle_max_s = IDLE_MAX_S + max((one.budget_period_s for one in queues if one.budget_gpu_h), default=0.0)
        self.busy_s = start_s
        self.cluster = ReplayCluster(
            nodes,
            policy,
            users=sorted({_user_of(job) for job in jobs}),
            start_s=start_s,
            queues=queues,
            pools=pools,
        )
        self.cluster.supervisors.paces = {job.id: job.reported_pace for job in jobs if job.reported_pace is not None}
        self.submits = _submits(jobs, nodes, queues)
        if not skip_never:
            for job, error in judge_jobs(self.cluster, jobs, self.submits, start_s):
                raise never_fits(job, error)
        self.states: dict[JobId, _JobProgress] = {}
        self.ends: list[tuple[float, int, JobId]] = []
        self.held = 0
        self.ended = 0
        self.result = ReplayResult(jobs=[ReplayedJob(job=job) for job in jobs], gpus=sum(node.gpus for node in nodes))

    def run(self, curve_step_s: float, on_progress: Callable[[int, int], None] | None) -> None:
        """Run until the last job has ended."""
        jobs, total = self.jobs, len(self.jobs)
        arrived, reported, wake_s, last_s = 0, 0, _FOREVER, 0.0
        while self.ended < total:
            boot_s = self.cluster.provider.next_boot_s()
            now_s = min(jobs[arrived].submit_s if arrived < total else _FOREVER, self._next_end_s(), wake_s, boot_s)
            if self.held or arrived < total:
                self.busy_s = now_s
            if now_s == _FOREVER or now_s - self.busy_s > self.idle_max_s:
                waiting = next(state.outcome.job for state in self.states.values() if state.due_s < 0.0)
                raise NeverFits(
                    f"job {waiting.id} (line {waiting.line}) waits forever on an idle fleet",
                    hint="use a larger fleet or another policy",
                )
            inbox = self._finish_jobs(now_s)
            ends = len(inbox)
            first = arrived
            while arrived < total and jobs[arrived].submit_s <= now_s:
                inbox.append(self.submits[arrived])
                arrived += 1
            turned = self.cluster.run_instant(now_s, inbox)
            self._admit(first, turned.answers[ends:], now_s)
            self._follow(turned, now_s)
            wake_s = now_s + turned.due_in_s
            if curve_step_s:
                self._record_curve(now_s, arrived, curve_step_s)
            if on_progress is not None and self.ended - reported >= PROGRESS_EVERY:
                reported = self.ended
                on_progress(reported, total)
            last_s = now_s
        self.cluster.provider.close(last_s)
        self.result.rented = self.cluster.provider.nodes

    def _next_end_s(self) -> float:
        ends = self.ends
        while ends:
            due_s, _, job_id = ends[0]
            state = self.states.get(job_id)
            if state is not None and state.due_s == due_s:
                return due_s
            heapq.heappop(ends)  # the job was stopped meanwhile
        return _FOREVER

    def _finish_jobs(self, now_s: float) -> list[Event]:
        """Return the supervisors' reports for the jobs that finish now."""
        inbox: list[Event] = []
        while self._next_end_s() <= now_s:
            _, _, job_id = heapq.heappop(self.ends)
            state = self.states[job_id]
            state.due_s = -1.0
            if self.on_end is not None:
                self.on_end(state.outcome.job)
            if self.on_event is not None:
                self.on_event(now_s, ReplayEvent.END, state.outcome.job, ())
            inbox += self.cluster.supervisors.finish_job(job_id, now_s)
        return inbox

    def _admit(self, first: int, answers: Sequence[object], now_s: float) -> None:
        for number, answer in enumerate(answers, start=first):
            if isinstance(answer, PhalanxError):
                job = self.jobs[number]
                if self.skip_never:
                    self.result.unplaceable.append((job, answer.message))
                    self.ended += 1
                    continue
                raise never_fits(job, answer)
            assert isinstance(answer, Job)
            self.states[answer.id] = _JobProgress(
                outcome=self.result.jobs[number], left_s=self.jobs[number].duration_s, waits_from_s=now_s
            )

    def _follow(self, turned: InstantResult, now_s: float) -> None:
        """Update the jobs by the gang events of the instant."""
        for course, job_id in turned.gang_events:
            state = self.states[job_id]
            match course:
                case GangEvent.STARTED:
                    self._started(job_id, state, now_s)
                case GangEvent.STOPPED:
                    self._stopped(state, now_s)
                case GangEvent.ENDED:
                    self._over(job_id, state, now_s)

    def _started(self, job_id: JobId, state: _JobProgress, now_s: float) -> None:
        outcome = state.outcome
        if outcome.first_start_s < 0.0:
            outcome.first_start_s = now_s
        outcome.longest_wait_s = max(outcome.longest_wait_s, now_s - state.waits_from_s)
        state.began_s = now_s
        state.rate = self._rate(job_id, outcome.job)
        state.due_s = now_s + state.owed_s + state.left_s / state.rate
        self.held += outcome.job.gpus
        self.result.decisions += 1
        heapq.heappush(self.ends, (state.due_s, self.result.decisions, job_id))
        if self.on_event is not None:
            grants = self.cluster.supervisors.gangs[job_id].allocation.grants
            places = tuple((str(grant.node_id), len(grant.devices)) for grant in grants)
            self.on_event(now_s, ReplayEvent.START, outcome.job, places)

    def _stopped(self, state: _JobProgress, now_s: float) -> None:
        gpus = state.outcome.job.gpus
        cost_s = self.cost(gpus)
        self._count_run(state, now_s)
        state.owed_s += cost_s
        state.began_s = state.due_s = -1.0
        state.waits_from_s = now_s
        self.held -= gpus
        self.result.lost_gpu_s += cost_s * gpus
        if self.on_event is not None:
            self.on_event(now_s, ReplayEvent.STOP, state.outcome.job, ())

    def _rate(self, job_id: JobId, job: TraceJob) -> float:
        """Work per second of the job on the GPUs that it has."""
        if not job.run_time_by_model or not job.duration_s:
            return 1.0
        node_id = self.cluster.supervisors.gangs[job_id].allocation.grants[0].node_id
        model = self.cluster.controller.world.nodes[node_id].devices[0].model
        return job.duration_s / job.run_time_on(model)

    @staticmethod
    def _count_run(state: _JobProgress, now_s: float) -> None:
        """Count the run until now: first what it had to repeat, then new work."""
        ran_s = now_s - state.began_s
        repeated_s = min(state.owed_s, ran_s)
        state.owed_s -= repeated_s
        state.left_s -= (ran_s - repeated_s) * state.rate
        state.outcome.ran_s += ran_s - repeated_s

    def _over(self, job_id: JobId, state: _JobProgress, now_s: float) -> None:
        job = self.cluster.controller.world.jobs.get(
            job_id
        )  # None: the controller has already dropped it, because many jobs ended at once
        outcome = state.outcome
        if job is not None:
            self.result.preemptions += job.preemptions - outcome.preemptions
            self.result.moves += job.moves - outcome.moves
            outcome.preemptions, outcome.moves = job.preemptions, job.moves
        if job is None or job.state.terminal:
            del self.states[job_id]
            outcome.end_s = now_s
            self._count_run(state, now_s)
            self.held -= outcome.job.gpus
            self.ended += 1

    def _record_curve(self, now_s: float, arrived: int, step_s: float) -> None:
        """Record the curve's newest point; within one step the last point replaces earlier ones."""
        curve = self.result.curve
        point = (now_s, self.held, arrived - self.ended - len(self.cluster.controller.world.attempts))
        if len(curve) > 1 and now_s - curve[-2][0] < step_s:
            curve[-1] = point
        else:
            curve.append(point)


def judge_jobs(
    cluster: ReplayCluster, jobs: Sequence[TraceJob], submits: Sequence[SubmitJob], start_s: float
) -> Iterator[tuple[TraceJob, PhalanxError]]:
    """Yield the jobs that can never start, with the reason, as the controller will judge them; equal requests are judged once."""
    controller = cluster.controller
    checker = controller.feasibility.checker(controller.world, start_s)
    for job, submit in zip(jobs, submits, strict=True):
        outlook = checker.check(feasibility_request(submit.spec, submit.queue, submit.user))
        if outlook.never:
            yield job, outlook.error()


def find_unplaceable(jobs: Sequence[TraceJob], nodes: Sequence[TraceNode]) -> list[tuple[TraceJob, PhalanxError]]:
    """Return the jobs that can never start on these nodes, with the reason."""
    if not jobs:
        return []
    users, start_s = sorted({_user_of(job) for job in jobs}), jobs[0].submit_s
    cluster = ReplayCluster(nodes, PolicySettings(name="fifo"), users=users, start_s=start_s)
    return list(judge_jobs(cluster, jobs, _submits(jobs, nodes), start_s))


def never_fits(job: TraceJob, error: PhalanxError) -> NeverFits:
    """Return the error that names the job."""
    return NeverFits(
        f"job {job.id} (line {job.line}): {error.message}",
        hint=f"{error.hint or 'use a larger fleet'}; or skip such jobs with --skip-bad",
    )


def _submits(jobs: Sequence[TraceJob], nodes: Sequence[TraceNode], queues: Sequence[Queue] = ()) -> list[SubmitJob]:
    """Build the submits of all jobs. Equal requests share one role. GPU models apply only if the fleet names any."""
    largest = max((node.gpus for node in nodes), default=0)
    known = {queue.id for queue in queues}
    named = any(node.model for node in nodes)
    roles: dict[tuple[int, tuple[str, ...]], Role] = {}
    submits = []
    for job in jobs:
        models = job.models if named else ()
        role = roles.get((job.gpus, models))
        if role is None:
            gpus = GpuRequest(
                total=job.gpus,
                model=models[0] if models else None,
                alternative_models=models[1:],
                uneven=job.gpus > largest,
            )
            role = Role(argv=("replayed",), gpus=gpus, tasks_per_node=1, launch=LaunchMode.FIXED)
            roles[job.gpus, models] = role
        spec = JobSpec(name=job.id, role=role, workdir="/", saves_on_stop=True, speeds=job.speeds if named else ())
        queue = QueueId(job.virtual_cluster) if job.virtual_cluster in known else QUEUE
        submits.append(SubmitJob(spec=spec, user=_user_of(job), project=PROJECT, queue=queue))
    return submits


def _user_of(job: TraceJob) -> UserId:
    """Use the virtual cluster as user, since a trace names no users; affects forecasts and fair share."""
    return UserId(job.virtual_cluster or "trace")
