"""Which changes would start a waiting job now: the smallest ones, each verified by scheduling the changed state.

A change is only reported if the job starts in a plan made with it. Candidates are filtered on the board of the present state first, since
a trial costs a whole board. The smallest change costs the owner least: a release before a shorter limit, another shape before fewer GPUs,
the job's own changes before those of an operator; waiting for other jobs is always included if it helps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId
from phalanx.core.scheduling.blockers import in_the_way
from phalanx.core.scheduling.entry import Entry
from phalanx.core.scheduling.forecast import Forecast
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.trial import Trial, changed, tried
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.units import format_duration
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job, Reason
from phalanx.core.work.launchers import ONE_WORLD_PER_CALL, launcher_of
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import Launch

CHANGES_MAX: Final = 5  # changes reported
GONE_MAX: Final = 16  # jobs to wait for that are reported as a change; if there are more, see `blockers`
PRIORITY_MOST: Final = 10_000  # the limit for a job's priority (core.work.request)
LIMIT_SLACK_S: Final = 120.0  # a suggested time limit ends this long before the reserved time begins
_NODES_TRIED: Final = (1, 2, 4, 8, 16, 32)
_FEWER_TRIED: Final = 64


class Kind(enum.StrEnum):
    """What is changed, smallest first."""

    RELEASE = "release"
    BEGIN = "begin"
    TIME = "time"
    LEVEL = "level"
    SHAPE = "shape"
    MODEL = "model"
    QUEUE = "queue"
    PRIORITY = "priority"
    FEWER = "fewer"
    WAIT = "wait"
    UNDRAIN = "undrain"
    OPEN = "open"
    QUOTA = "quota"
    USER_LIMIT = "user_limit"


OPERATORS: Final = frozenset({Kind.UNDRAIN, Kind.OPEN, Kind.QUOTA, Kind.USER_LIMIT})  # need an operator
UPDATES: Final = frozenset(
    {Kind.BEGIN, Kind.TIME, Kind.QUEUE, Kind.PRIORITY}
)  # possible for a waiting job by `phalanx update`


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that starts the job.

    Attributes:
        text: for users.
        option: for submit or update; empty if the change is not one of the job.
        command: the whole command if the change is not one of the job; empty if there is none.
        jobs: the jobs concerned.
    """

    kind: Kind
    text: str
    option: str = ""
    command: str = ""
    jobs: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    change: Change
    seen: Snapshot


class Counterfactuals:
    """The search for one job.

    Attributes:
        blockers: running jobs whose end would let it start, as few as were found; set by the search.
        tried: number of trials.
    """

    def __init__(self, forecast: Forecast, job: Job, like: Scheduler, go_on: Callable[[], bool]) -> None:
        self.trial: Trial = forecast.trial
        self.seen = forecast.trial.seen
        self.scheduler = forecast.trial.scheduler
        self.job = job
        self.entry: Entry | None = self.scheduler.entries.get(job.id)
        waiting = self.scheduler.why(job)
        self.reason = Reason.NEW if waiting is None else waiting.reason
        self.blockers = in_the_way(forecast, self.entry)
        self.tried = 0
        self._live = like
        self._has_time = go_on

    def find(self) -> list[Change]:
        """At most CHANGES_MAX changes, smallest first; fewer if time runs out. Empty if the job starts without a change."""
        found: list[Change] = []
        if self.trial.starts(self.job.id):
            return found
        for candidates in (
            self._release,
            self._begin,
            self._time_limit,
            self._level,
            self._shapes,
            self._model,
            self._queues,
            self._priority,
            self._fewer,
            self._wait,
            self._undrain,
            self._open,
            self._raise_limit,
        ):
            for candidate in candidates():
                if len(found) >= CHANGES_MAX or not self._has_time():
                    return found
                if self._starts(candidate.seen):
                    found.append(candidate.change)
                    break  # at most one change of each kind
        return found

    def _starts(self, seen: Snapshot) -> bool:
        self.tried += 1
        trial = tried(seen, self._live)
        starts = trial.starts(self.job.id)
        trial.over()
        return starts

    def _candidate(self, kind: Kind, text: str, option: str, job: Job) -> _Candidate:
        return _Candidate(change=Change(kind=kind, text=text, option=option), seen=changed(self.seen, job=job))

    # ---------------------------------------------------------------- changes of the job

    def _release(self) -> Iterator[_Candidate]:
        if self.job.held:
            yield _Candidate(
                change=Change(kind=Kind.RELEASE, text="release the job", command=f"phalanx release {self.job.id}"),
                seen=changed(self.seen, job=replace(self.job, held=False)),
            )

    def _begin(self) -> Iterator[_Candidate]:
        if self.reason is Reason.BEGIN_TIME:
            yield self._candidate(Kind.BEGIN, "begin at once", "--begin now", self._with_spec(begin_s=None))

    def _time_limit(self) -> Iterator[_Candidate]:
        """A time limit that ends the job before a reservation begins or, with backfill, before the first job in line starts."""
        now_s, job = self.seen.now_s, self.job
        limits: list[float] = []
        if self.entry is not None and self.entry.klass.shut:
            starts = sorted({one.start_s for one in self.seen.reservations.values() if one.start_s > now_s})
            limits += [start_s - now_s - LIMIT_SLACK_S for start_s in starts]
        if self.scheduler.policy.name == "backfill" and job.spec.time_limit_s is not None:
            limits += [job.spec.time_limit_s / part for part in (2, 4, 8)]
        for limit_s in sorted(limits, reverse=True):
            minutes = int(limit_s // 60)
            if minutes >= 1 and (job.spec.time_limit_s is None or 60.0 * minutes < job.spec.time_limit_s):
                text = f"set a time limit of {format_duration(60.0 * minutes)}"
                yield self._candidate(
                    Kind.TIME, text, f"--time {minutes}m", self._with_spec(time_limit_s=60.0 * minutes)
                )

    def _level(self) -> Iterator[_Candidate]:
        spread = self.job.spec.spread
        if spread.required and spread.within:
            wider = self._with_spec(spread=replace(spread, required=False))
            if self._may_fit(wider):
                yield self._candidate(
                    Kind.LEVEL,
                    f"prefer one {spread.within} instead of requiring it",
                    f"--prefer {spread.within}",
                    wider,
                )

    def _shapes(self) -> Iterator[_Candidate]:
        """The same GPUs on another number of nodes."""
        request, role = self.job.spec.role.gpus, self.job.spec.role
        one_world = launcher_of(role.argv, role.script) in ONE_WORLD_PER_CALL
        if request.total < 2 or request.nodes_max is not None or role.launch is Launch.FIXED or one_world:
            return
        for nodes in _NODES_TRIED:
            per_node, rest = divmod(request.total, nodes)
            if rest or not per_node or nodes == request.nodes:
                continue
            shape = replace(request, nodes=nodes, per_node=per_node, uneven=False)
            job = self._with_gpus(shape)
            if self._may_fit(job):
                yield self._candidate(
                    Kind.SHAPE,
                    f"request {nodes} x {per_node} GPUs instead of {self._current_shape()}",
                    f"--gpus {shape}",
                    job,
                )

    def _model(self) -> Iterator[_Candidate]:
        request = self.job.spec.role.gpus
        if request.model is not None:
            anything = replace(request, model=None, memory_gib=None, or_models=())
            job = self._with_gpus(anything)
            if self._may_fit(job):
                yield self._candidate(
                    Kind.MODEL, f"accept any GPU model instead of {request.kind}", f"--gpus {anything}", job
                )

    def _queues(self) -> Iterator[_Candidate]:
        quotas = self.scheduler.board.quotas
        for queue in sorted(self.seen.queues.values(), key=lambda queue: queue.id):
            if (
                queue.id == self.job.queue
                or not queue.open
                or self.reason in (Reason.HELD, Reason.DEPENDENCY, Reason.BEGIN_TIME)
            ):
                continue
            gpus = self.job.spec.role.gpus.total
            if quotas is None or quotas.admits(quotas.number(queue.id), self.job.user, gpus) is None:
                yield self._candidate(
                    Kind.QUEUE, f"use queue {queue.id}", f"--queue {queue.id}", replace(self.job, queue=queue.id)
                )

    def _priority(self) -> Iterator[_Candidate]:
        """The least priority that starts it, by binary search over the ranks of other jobs."""
        entry = self.entry
        if entry is None or self.reason not in (Reason.PRIORITY, Reason.RESOURCES, Reason.TOPOLOGY):
            return
        board = self.scheduler.board
        own = self.job.spec.priority
        others = {other.klass.rank for group in (board.waiting, board.running) for other in group.values()}
        steps = sorted(own + rank + 1 - entry.klass.rank for rank in others if rank >= entry.klass.rank)
        steps = [step for step in steps if step <= PRIORITY_MOST]
        low, high = 0, len(steps) - 1
        if not steps or not self._starts(self._with_priority(steps[high])):
            return
        while low < high and self._has_time():
            middle = (low + high) // 2
            if self._starts(self._with_priority(steps[middle])):
                high = middle
            else:
                low = middle + 1
        step = steps[high]
        yield self._candidate(
            Kind.PRIORITY, f"set priority {step} instead of {own}", f"--priority {step}", self._with_spec(priority=step)
        )

    def _with_priority(self, priority: int) -> Snapshot:
        return changed(self.seen, job=self._with_spec(priority=priority))

    def _fewer(self) -> Iterator[_Candidate]:
        """The most GPUs that fit now."""
        request = self.job.spec.role.gpus
        if request.nodes is not None and request.per_node:
            shapes = [(nodes, request.per_node) for nodes in range(request.nodes - 1, 0, -1)]
            shapes += [(request.nodes, each) for each in range(request.per_node - 1, 0, -1)] + [
                (1, each) for each in range(request.per_node - 1, 0, -1)
            ]
            asked = [replace(request, nodes=n, per_node=each, total=n * each, nodes_max=None) for n, each in shapes]
            asked.sort(key=lambda one: -one.total)
        else:
            unit = max(1, self.scheduler.board.unit)
            totals = [total for total in range(request.total - 1, 0, -1) if total <= unit or total % unit == 0]
            asked = [replace(request, total=total) for total in totals]
        for fewer in asked[:_FEWER_TRIED]:
            job = self._with_gpus(fewer)
            if self._may_fit(job):
                yield self._candidate(
                    Kind.FEWER,
                    f"request {fewer.total} GPU{'' if fewer.total == 1 else 's'} instead of {request.total}",
                    f"--gpus {fewer}",
                    job,
                )

    # ---------------------------------------------------------------- other changes

    def _wait(self) -> Iterator[_Candidate]:
        if not 0 < len(self.blockers) <= GONE_MAX:
            return
        named = ", ".join(self.blockers[:3]) + (
            "" if len(self.blockers) <= 3 else f" and {len(self.blockers) - 3} more"
        )
        text = f"wait for job{'' if len(self.blockers) == 1 else 's'} {named} to finish"
        change = Change(kind=Kind.WAIT, text=text, jobs=tuple(self.blockers))
        yield _Candidate(change=change, seen=changed(self.seen, gone=self.blockers))

    def _undrain(self) -> Iterator[_Candidate]:
        away = [node for node in self.seen.nodes.values() if node.state is NodeState.UP and node.cordon is not None]
        back: list[Node] = [replace(node, cordon=None) for node in sorted(away, key=lambda node: node.id)][:GONE_MAX]
        for node in back:
            change = Change(
                kind=Kind.UNDRAIN, text=f"return node {node.id} to service", command=f"phalanx nodes undrain {node.id}"
            )
            yield _Candidate(change=change, seen=changed(self.seen, nodes=[node]))
        if len(back) > 1:
            names = ",".join(node.id for node in back)
            change = Change(
                kind=Kind.UNDRAIN, text=f"return {len(back)} nodes to service", command=f"phalanx nodes undrain {names}"
            )
            yield _Candidate(change=change, seen=changed(self.seen, nodes=back))

    def _open(self) -> Iterator[_Candidate]:
        queue = self.seen.queues.get(self.job.queue)
        if queue is not None and not queue.open:
            change = Change(
                kind=Kind.OPEN, text=f"open queue {queue.id}", command=f"phalanx queues set {queue.id} --open"
            )
            yield _Candidate(change=change, seen=changed(self.seen, queues=[replace(queue, open=True)]))

    def _raise_limit(self) -> Iterator[_Candidate]:
        quotas = self.scheduler.board.quotas
        if quotas is None or self.entry is None:
            return
        klass = self.entry.klass
        refusal = quotas.admits(klass.queue, klass.user, klass.gpus)
        queue = None if refusal is None else self.seen.queues.get(refusal.queue)
        if refusal is None or queue is None:
            return
        over = int((1 if refusal.jobs else refusal.asked) + refusal.held - refusal.limit)
        wider, field = _with_higher_limit(queue, refusal.reason, over, jobs=refusal.jobs)
        if wider is None:
            return
        what = "quota" if refusal.reason is Reason.QUOTA else "limit per user"
        kind = Kind.QUOTA if refusal.reason is Reason.QUOTA else Kind.USER_LIMIT
        text = f"raise the {what} of queue {queue.id} by {over} ({field}: {getattr(wider, field)} in the file for phalanx queues apply)"
        yield _Candidate(change=Change(kind=kind, text=text), seen=changed(self.seen, queues=[wider]))

    # ---------------------------------------------------------------- filters

    def _may_fit(self, job: Job) -> bool:
        """Whether free devices alone allow it; otherwise no trial is needed."""
        board = self.scheduler.board
        shut = 0 if self.entry is None else self.entry.klass.shut
        try:
            needs = self.scheduler.needs_of(job)
        except PhalanxError:
            return False
        return any(board.find_need(need, shut) is not None for need in needs)

    def _with_spec(self, **fields: object) -> Job:
        return replace(self.job, spec=replace(self.job.spec, **fields))  # type: ignore[arg-type]  # names are JobSpec's own

    def _with_gpus(self, gpus: GpuRequest) -> Job:
        return self._with_spec(role=replace(self.job.spec.role, gpus=gpus))

    def _current_shape(self) -> str:
        entry = self.entry
        if entry is None:
            return str(self.job.spec.role.gpus)
        need = entry.klass.needs[0]
        return f"{need.nodes} x {need.devices}{f' + {need.tail}' if need.tail else ''}"


def _with_higher_limit(queue: Queue, reason: Reason, over: int, *, jobs: bool) -> tuple[Queue | None, str]:
    """The queue with its limit raised by this much, and the name of the changed field."""
    if reason is Reason.USER_LIMIT:
        if jobs:
            return replace(queue, jobs_per_user=(queue.jobs_per_user or 0) + over), "jobs_per_user"
        return replace(queue, gpus_per_user=(queue.gpus_per_user or 0) + over), "gpus_per_user"
    if reason is not Reason.QUOTA:
        return None, ""
    if queue.borrow_gpus is not None and queue.quota_gpus is None:
        return replace(queue, borrow_gpus=queue.borrow_gpus + over), "borrow_gpus"
    return replace(queue, quota_gpus=(queue.quota_gpus or 0) + over), "quota_gpus"
