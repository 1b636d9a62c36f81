"""Replay through the whole lifecycle: every transition is one that `Controller.step` makes, as it does live, in virtual time.

Each job is submitted, placed, prepared, started, perhaps stopped and started again, and ends, by the same events and commands that cross
the network of a live cluster. A job runs exactly its duration, plus the restart cost for each preemption and move. What happens at one
instant is told in one step, ends before arrivals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.core.errors import NeverFits, PhalanxError
from phalanx.core.ids import JobId, QueueId, UserId
from phalanx.core.scheduling.settings import Policy
from phalanx.core.scheduling.shape import shapes_of
from phalanx.core.state.events import Event, Submit
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import JobSpec, Launch, Role
from phalanx.simulator.cluster import PROJECT, QUEUE, Cluster, Turned
from phalanx.simulator.fleet import SimNode
from phalanx.simulator.outcome import Outcome, Replayed
from phalanx.simulator.supervisors import Course
from phalanx.simulator.trace import TraceJob

_FOREVER = float("inf")
_PROGRESS_EVERY = 1024  # ends


@dataclass(slots=True)
class _Life:
    """One job on its way: what its user cannot know and its processes would.

    Attributes:
        left_s: work still to do.
        began_s: since when its tasks run; below 0 while they do not.
        due_s: when they will be done; below 0 while they do not run.
        waits_from_s: since when it waits without a break.
    """

    outcome: Outcome
    left_s: float
    waits_from_s: float
    began_s: float = -1.0
    due_s: float = -1.0


def replay_live(
    jobs: Sequence[TraceJob],
    nodes: Sequence[SimNode],
    policy: Policy,
    *,
    restart_cost_s: Callable[[int], float] | float = 60.0,
    curve_step_s: float = 0.0,
    skip_never: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_end: Callable[[TraceJob], None] | None = None,
    queues: Sequence[Queue] = (),
) -> Replayed:
    """Replay `jobs` on `nodes`.

    Args:
        jobs: by submit time.
        nodes: the fleet.
        policy: the controller's.
        restart_cost_s: extra work per preemption or move; by GPUs when it differs.
        curve_step_s: least time between points of the curve; 0 draws none.
        skip_never: leave out jobs that the empty fleet could not hold, and name them in the result, instead of refusing.
        on_progress: told (ended, all) now and then.
        on_end: told each job whose work is done, before what else happens at that instant.
        queues: with their quotas; a job waits in the one that its label names, else in the default one.

    Raises:
        NeverFits: a job does not fit the empty fleet, or jobs wait on an idle fleet with nothing left to happen.
    """
    replay = _Replay(jobs, nodes, policy, restart_cost_s, skip_never=skip_never, on_end=on_end, queues=queues)
    replay.run(curve_step_s, on_progress)
    result = replay.result
    if result.refused:
        result.outcomes = [outcome for outcome in result.outcomes if outcome.end_s >= 0.0]
    return result


class _Replay:
    """The event loop: arrivals, ends, and what the controller itself has due."""

    def __init__(self, jobs: Sequence[TraceJob], nodes: Sequence[SimNode], policy: Policy,
                 restart_cost_s: Callable[[int], float] | float, *, skip_never: bool,
                 on_end: Callable[[TraceJob], None] | None = None, queues: Sequence[Queue] = ()) -> None:  # fmt: skip
        self.jobs = jobs
        self.on_end = on_end
        self.skip_never = skip_never
        self.cost = restart_cost_s if callable(restart_cost_s) else (lambda _gpus: restart_cost_s)
        self.cluster = Cluster(
            nodes, policy, users=sorted({_user_of(job) for job in jobs}), start_s=jobs[0].submit_s if jobs else 0.0, queues=queues,
        )  # fmt: skip
        self.submits = _submits(jobs, nodes, queues)
        if not skip_never:
            self._refuse_never()
        self.lives: dict[JobId, _Life] = {}
        self.ends: list[tuple[float, int, JobId]] = []
        self.held = 0
        self.ended = 0
        self.result = Replayed(outcomes=[Outcome(job=job) for job in jobs], gpus=sum(node.gpus for node in nodes))

    def _refuse_never(self) -> None:
        """As the controller will, but now, not after minutes: each request is judged once."""
        fleet = self.cluster.controller.world.fleet()
        judged: set[int] = set()
        for job, submit in zip(self.jobs, self.submits, strict=True):
            role = submit.spec.role  # one object for equal requests
            if id(role) not in judged:
                judged.add(id(role))
                try:
                    shapes_of(role, fleet)
                except NeverFits as error:
                    raise _never(job, error) from None

    def run(self, curve_step_s: float, on_progress: Callable[[int, int], None] | None) -> None:
        """Until the last job has ended."""
        jobs, total = self.jobs, len(self.jobs)
        arrived, told, wake_s = 0, 0, _FOREVER
        while self.ended < total:
            now_s = min(jobs[arrived].submit_s if arrived < total else _FOREVER, self._next_end_s(), wake_s)
            if now_s == _FOREVER:
                waiting = next(life.outcome.job for life in self.lives.values() if life.due_s < 0.0)
                raise NeverFits(f"job {waiting.id} (line {waiting.line}) waits for ever on an idle fleet",
                                hint="simulate a larger fleet or another policy")  # fmt: skip
            inbox = self._ending(now_s)
            ends = len(inbox)
            first = arrived
            while arrived < total and jobs[arrived].submit_s <= now_s:
                inbox.append(self.submits[arrived])
                arrived += 1
            turned = self.cluster.instant(now_s, inbox)
            self._admit(first, turned.answers[ends:], now_s)
            self._follow(turned, now_s)
            wake_s = now_s + turned.due_in_s
            if curve_step_s:
                self._draw(now_s, arrived, curve_step_s)
            if on_progress is not None and self.ended - told >= _PROGRESS_EVERY:
                told = self.ended
                on_progress(told, total)

    def _next_end_s(self) -> float:
        ends = self.ends
        while ends:
            due_s, _, job_id = ends[0]
            life = self.lives.get(job_id)
            if life is not None and life.due_s == due_s:
                return due_s
            heapq.heappop(ends)  # it was stopped meanwhile
        return _FOREVER

    def _ending(self, now_s: float) -> list[Event]:
        """What the supervisors report of the jobs whose work is done."""
        inbox: list[Event] = []
        while self._next_end_s() <= now_s:
            _, _, job_id = heapq.heappop(self.ends)
            life = self.lives[job_id]
            life.due_s = -1.0
            if self.on_end is not None:
                self.on_end(life.outcome.job)
            inbox += self.cluster.supervisors.finish(job_id, now_s)
        return inbox

    def _admit(self, first: int, answers: Sequence[object], now_s: float) -> None:
        for number, answer in enumerate(answers, start=first):
            if isinstance(answer, PhalanxError):
                job = self.jobs[number]
                if self.skip_never:
                    self.result.refused.append((job, answer.message))
                    self.ended += 1
                    continue
                raise _never(job, answer)
            assert isinstance(answer, Job)
            self.lives[answer.id] = _Life(
                outcome=self.result.outcomes[number], left_s=self.jobs[number].duration_s, waits_from_s=now_s
            )

    def _follow(self, turned: Turned, now_s: float) -> None:
        """Bring the lives up to what happened in the instant."""
        for course, job_id in turned.courses:
            life = self.lives[job_id]
            match course:
                case Course.STARTED:
                    self._started(job_id, life, now_s)
                case Course.STOPPED:
                    self._stopped(life, now_s)
                case Course.OVER:
                    self._over(job_id, life, now_s)

    def _started(self, job_id: JobId, life: _Life, now_s: float) -> None:
        outcome = life.outcome
        if outcome.first_start_s < 0.0:
            outcome.first_start_s = now_s
        outcome.wait_max_s = max(outcome.wait_max_s, now_s - life.waits_from_s)
        life.began_s = now_s
        life.due_s = now_s + life.left_s
        self.held += outcome.job.gpus
        self.result.decisions += 1
        heapq.heappush(self.ends, (life.due_s, self.result.decisions, job_id))

    def _stopped(self, life: _Life, now_s: float) -> None:
        gpus = life.outcome.job.gpus
        cost_s = self.cost(gpus)
        life.left_s += cost_s - (now_s - life.began_s)
        life.began_s = life.due_s = -1.0
        life.waits_from_s = now_s
        self.held -= gpus
        self.result.lost_gpu_s += cost_s * gpus

    def _over(self, job_id: JobId, life: _Life, now_s: float) -> None:
        job = self.cluster.controller.world.jobs.get(
            job_id
        )  # None: so many ended at once that the head forgot this one
        outcome = life.outcome
        if job is not None:
            self.result.preemptions += job.preemptions - outcome.stops
            self.result.moves += job.moves - outcome.moves
            outcome.stops, outcome.moves = job.preemptions, job.moves
        if job is None or job.state.terminal:
            del self.lives[job_id]
            outcome.end_s = now_s
            self.held -= outcome.job.gpus
            self.ended += 1

    def _draw(self, now_s: float, arrived: int, step_s: float) -> None:
        """Note the curve's newest point; of those within one step the last stays, since it holds on."""
        curve = self.result.curve
        point = (now_s, self.held, arrived - self.ended - len(self.cluster.controller.world.attempts))
        if len(curve) > 1 and now_s - curve[-2][0] < step_s:
            curve[-1] = point
        else:
            curve.append(point)


def _never(job: TraceJob, error: PhalanxError) -> NeverFits:
    return NeverFits(f"job {job.id} (line {job.line}): {error.message}",
                     hint=f"{error.hint or 'simulate a larger fleet'}; --skip-bad leaves such jobs out")  # fmt: skip


def _submits(jobs: Sequence[TraceJob], nodes: Sequence[SimNode], queues: Sequence[Queue] = ()) -> list[Submit]:
    """What each job's user hands in. Equal requests share one role. Models count where the fleet names any."""
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
                total=job.gpus, model=models[0] if models else None, or_models=models[1:], uneven=job.gpus > largest
            )
            role = Role(argv=("replayed",), gpus=gpus, tasks_per_node=1, launch=Launch.FIXED)
            roles[job.gpus, models] = role
        spec = JobSpec(name=job.id, role=role, workdir="/", saves_on_stop=True)
        queue = QueueId(job.label) if job.label in known else QUEUE
        submits.append(Submit(spec=spec, user=_user_of(job), project=PROJECT, queue=queue))
    return submits


def _user_of(job: TraceJob) -> UserId:
    """A trace tells no users: its virtual cluster stands for them, in what is learned and in fair share."""
    return UserId(job.label or "trace")
