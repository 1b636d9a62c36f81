"""What would start a waiting job now: the smallest changes, each of them tried by scheduling the changed state.

A change is only told if the job starts in a plan made with it. Candidates are sieved on the board of the present state first, since a
trial costs a whole board. Small is what costs its owner least: a release before a shorter limit, another shape before fewer GPUs, the
job's own changes before those that only an operator makes, and waiting for others is always among them where it helps.
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

CHANGES_MAX: Final = 5  # told; more is no help
GONE_MAX: Final = 16  # jobs to wait for that are still told as a change; of more, `blockers` tells
PRIORITY_MOST: Final = 10_000  # what a job may ask for (core.work.request)
LIMIT_SLACK_S: Final = 120.0  # a job is told to be over so long before the reserved time begins
_NODES_TRIED: Final = (1, 2, 4, 8, 16, 32)
_FEWER_TRIED: Final = 64


class Kind(enum.StrEnum):
    """What is changed, in the order of smallness."""

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


OPERATORS: Final = frozenset({Kind.UNDRAIN, Kind.OPEN, Kind.QUOTA, Kind.USER_LIMIT})  # what a job's owner cannot do
UPDATES: Final = frozenset(
    {Kind.BEGIN, Kind.TIME, Kind.QUEUE, Kind.PRIORITY}
)  # what `phalanx update` does to a job that waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that starts the job.

    Attributes:
        text: for people.
        option: to submit or update with; empty where the change is none of the job's.
        command: the whole command where the change is none of the job's; empty where there is none.
        jobs: whom it is about.
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
        blockers: running jobs whose end would let it start, as few as were found; filled by the search.
        tried: trials made.
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
        self._like = like
        self._go_on = go_on

    def find(self) -> list[Change]:
        """At most CHANGES_MAX, smallest first; fewer where time runs out. None for a job that starts as things are."""
        found: list[Change] = []
        if self.trial.starts(self.job.id):
            return found
        for candidates in (
            self._release, self._begin, self._shorter, self._level, self._shapes, self._model, self._queues, self._priority, self._fewer,
            self._wait, self._undrain, self._open, self._quota,
        ):  # fmt: skip
            for candidate in candidates():
                if len(found) >= CHANGES_MAX or not self._go_on():
                    return found
                if self._starts(candidate.seen):
                    found.append(candidate.change)
                    break  # one of a kind
        return found

    def _starts(self, seen: Snapshot) -> bool:
        self.tried += 1
        trial = tried(seen, self._like)
        starts = trial.starts(self.job.id)
        trial.over()
        return starts

    def _of(self, kind: Kind, text: str, option: str, job: Job) -> _Candidate:
        return _Candidate(change=Change(kind=kind, text=text, option=option), seen=changed(self.seen, job=job))

    # ---------------------------------------------------------------- the job's own

    def _release(self) -> Iterator[_Candidate]:
        if self.job.held:
            yield _Candidate(
                change=Change(kind=Kind.RELEASE, text="release it", command=f"phalanx release {self.job.id}"),
                seen=changed(self.seen, job=replace(self.job, held=False)),
            )  # fmt: skip

    def _begin(self) -> Iterator[_Candidate]:
        if self.reason is Reason.BEGIN_TIME:
            yield self._of(Kind.BEGIN, "let it begin at once", "--begin now", self._with_spec(begin_s=None))

    def _shorter(self) -> Iterator[_Candidate]:
        """A limit that lets it end before nodes are set aside, or, where the policy backfills, before the first in line starts."""
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
                told = f"a time limit of {format_duration(60.0 * minutes)}"
                yield self._of(Kind.TIME, told, f"--time {minutes}m", self._with_spec(time_limit_s=60.0 * minutes))

    def _level(self) -> Iterator[_Candidate]:
        spread = self.job.spec.spread
        if spread.required and spread.within:
            wider = self._with_spec(spread=replace(spread, required=False))
            if self._may_fit(wider):
                yield self._of(
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
            job = self._asking(shape)
            if self._may_fit(job):
                yield self._of(
                    Kind.SHAPE, f"{nodes} x {per_node} GPUs instead of {self._shape_now()}", f"--gpus {shape}", job
                )

    def _model(self) -> Iterator[_Candidate]:
        request = self.job.spec.role.gpus
        if request.model is not None:
            anything = replace(request, model=None, memory_gib=None, or_models=())
            job = self._asking(anything)
            if self._may_fit(job):
                yield self._of(Kind.MODEL, f"any GPU model instead of {request.kind}", f"--gpus {anything}", job)

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
                yield self._of(
                    Kind.QUEUE, f"queue {queue.id} has room", f"--queue {queue.id}", replace(self.job, queue=queue.id)
                )

    def _priority(self) -> Iterator[_Candidate]:
        """The least that starts it: ranks of others are the steps, halved until the least is found."""
        entry = self.entry
        if entry is None or self.reason not in (Reason.PRIORITY, Reason.RESOURCES, Reason.TOPOLOGY):
            return
        board = self.scheduler.board
        own = self.job.spec.priority
        others = {other.klass.rank for group in (board.waiting, board.running) for other in group.values()}
        steps = sorted(own + rank + 1 - entry.klass.rank for rank in others if rank >= entry.klass.rank)
        steps = [step for step in steps if step <= PRIORITY_MOST]
        low, high = 0, len(steps) - 1
        if not steps or not self._starts(self._ranked(steps[high])):
            return
        while low < high and self._go_on():
            middle = (low + high) // 2
            if self._starts(self._ranked(steps[middle])):
                high = middle
            else:
                low = middle + 1
        step = steps[high]
        yield self._of(
            Kind.PRIORITY, f"priority {step} instead of {own}", f"--priority {step}", self._with_spec(priority=step)
        )

    def _ranked(self, priority: int) -> Snapshot:
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
            job = self._asking(fewer)
            if self._may_fit(job):
                yield self._of(
                    Kind.FEWER,
                    f"{fewer.total} GPU{'' if fewer.total == 1 else 's'} instead of {request.total}",
                    f"--gpus {fewer}",
                    job,
                )

    # ---------------------------------------------------------------- others'

    def _wait(self) -> Iterator[_Candidate]:
        if not 0 < len(self.blockers) <= GONE_MAX:
            return
        named = ", ".join(self.blockers[:3]) + (
            "" if len(self.blockers) <= 3 else f" and {len(self.blockers) - 3} more"
        )
        text = f"job{'' if len(self.blockers) == 1 else 's'} {named} will have ended"
        change = Change(
            kind=Kind.WAIT, text=text, command=f"phalanx wait-for {self.blockers[0]}", jobs=tuple(self.blockers)
        )
        yield _Candidate(change=replace(change, command=""), seen=changed(self.seen, gone=self.blockers))

    def _undrain(self) -> Iterator[_Candidate]:
        away = [node for node in self.seen.nodes.values() if node.state is NodeState.UP and node.cordon is not None]
        back: list[Node] = [replace(node, cordon=None) for node in sorted(away, key=lambda node: node.id)][:GONE_MAX]
        for node in back:
            change = Change(
                kind=Kind.UNDRAIN, text=f"node {node.id} takes work again", command=f"phalanx nodes undrain {node.id}"
            )
            yield _Candidate(change=change, seen=changed(self.seen, nodes=[node]))
        if len(back) > 1:
            names = ",".join(node.id for node in back)
            change = Change(
                kind=Kind.UNDRAIN, text=f"{len(back)} nodes take work again", command=f"phalanx nodes undrain {names}"
            )
            yield _Candidate(change=change, seen=changed(self.seen, nodes=back))

    def _open(self) -> Iterator[_Candidate]:
        queue = self.seen.queues.get(self.job.queue)
        if queue is not None and not queue.open:
            change = Change(
                kind=Kind.OPEN, text=f"queue {queue.id} is opened", command=f"phalanx queues set {queue.id} --open"
            )
            yield _Candidate(change=change, seen=changed(self.seen, queues=[replace(queue, open=True)]))

    def _quota(self) -> Iterator[_Candidate]:
        quotas = self.scheduler.board.quotas
        if quotas is None or self.entry is None:
            return
        klass = self.entry.klass
        refusal = quotas.admits(klass.queue, klass.user, klass.gpus)
        queue = None if refusal is None else self.seen.queues.get(refusal.queue)
        if refusal is None or queue is None:
            return
        over = int((1 if refusal.jobs else refusal.asked) + refusal.held - refusal.limit)
        wider, field = _raised(queue, refusal.reason, over, jobs=refusal.jobs)
        if wider is None:
            return
        what = "quota" if refusal.reason is Reason.QUOTA else "limit per user"
        kind = Kind.QUOTA if refusal.reason is Reason.QUOTA else Kind.USER_LIMIT
        text = f"{over} more in the {what} of queue {queue.id} ({field}: {getattr(wider, field)}, in the file of phalanx queues apply)"
        yield _Candidate(change=Change(kind=kind, text=text), seen=changed(self.seen, queues=[wider]))

    # ---------------------------------------------------------------- sieves

    def _may_fit(self, job: Job) -> bool:
        """Whether there is room for it by devices alone: what cannot fit need not be tried."""
        board = self.scheduler.board
        shut = 0 if self.entry is None else self.entry.klass.shut
        try:
            needs = self.scheduler.needs_of(job)
        except PhalanxError:
            return False
        return any(board.find_need(need, shut) is not None for need in needs)

    def _with_spec(self, **fields: object) -> Job:
        return replace(self.job, spec=replace(self.job.spec, **fields))  # type: ignore[arg-type]  # names are JobSpec's own

    def _asking(self, gpus: GpuRequest) -> Job:
        return self._with_spec(role=replace(self.job.spec.role, gpus=gpus))

    def _shape_now(self) -> str:
        entry = self.entry
        if entry is None:
            return str(self.job.spec.role.gpus)
        need = entry.klass.needs[0]
        return f"{need.nodes} x {need.devices}{f' + {need.tail}' if need.tail else ''}"


def _raised(queue: Queue, reason: Reason, over: int, *, jobs: bool) -> tuple[Queue | None, str]:
    """The queue with its limit higher by so much, and which of its fields that is."""
    if reason is Reason.USER_LIMIT:
        if jobs:
            return replace(queue, jobs_per_user=(queue.jobs_per_user or 0) + over), "jobs_per_user"
        return replace(queue, gpus_per_user=(queue.gpus_per_user or 0) + over), "gpus_per_user"
    if reason is not Reason.QUOTA:
        return None, ""
    if queue.borrow_gpus is not None and queue.quota_gpus is None:
        return replace(queue, borrow_gpus=queue.borrow_gpus + over), "borrow_gpus"
    return replace(queue, quota_gpus=(queue.quota_gpus or 0) + over), "quota_gpus"
