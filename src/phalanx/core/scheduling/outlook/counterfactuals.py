"""Which changes would start a waiting job now: the smallest ones, each verified by scheduling the changed state.

A change is only reported if the job starts in a plan made with it, or soon after: a priority may have to wait for the end of a guaranteed run,
and its text says how long. Candidates are filtered on the board of the present state first, since a trial costs a whole board. The
smallest change costs the owner least: a release before a shorter limit, another shape before fewer GPUs, the job's own changes before those
of an operator; waiting for other jobs is always included if it helps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, TypeVar

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.fitness import FULL_DISK
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.summary import model_fits
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.resources import GPUS, Resources, quantity_text
from phalanx.core.scheduling.board_records import JobEntry, StopReason
from phalanx.core.scheduling.estimates.device_speeds import SpeedSource, speed_ratio_text
from phalanx.core.scheduling.outlook.blockers import find_blockers
from phalanx.core.scheduling.outlook.forecast import Forecast
from phalanx.core.scheduling.outlook.what_if import Trial, modified_snapshot, what_if
from phalanx.core.scheduling.policy import NO_LATER_STOPS
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.units import format_duration
from phalanx.core.work.gpus import GPU_KINDS_MAX, GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.launchers import single_node_launcher
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import QuotaRefusal
from phalanx.core.work.spec import LaunchMode
from phalanx.core.work.states import WaitReasonCode

_Answer = TypeVar("_Answer")

CHANGES_MAX: Final = 5  # changes reported
WAITED_JOBS_MAX: Final = 16  # jobs to wait for that are reported as a change; if there are more, see `blockers`
SOON_S: Final = 60.0  # a change that starts the job within this time is suggested too
PRIORITY_MAX: Final = 10_000  # the limit for a job's priority (core.work.job_file.request)
TIME_LIMIT_MARGIN_S: Final = 120.0  # a suggested time limit ends this long before the reserved time begins
_WAITS_OUTSIDE_QUEUE: Final = (
    WaitReasonCode.HELD,
    WaitReasonCode.DEPENDENCY,
    WaitReasonCode.STAGING,
    WaitReasonCode.BEGIN_TIME,
)
_NODES_TRIED: Final = (1, 2, 4, 8, 16, 32)
_FEWER_TRIED: Final = 64


class ChangeKind(enum.StrEnum):
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
    LICENCE = "licence"


OPERATOR_CHANGES: Final = frozenset(
    {ChangeKind.UNDRAIN, ChangeKind.OPEN, ChangeKind.QUOTA, ChangeKind.USER_LIMIT, ChangeKind.LICENCE}
)  # need an operator
UPDATE_CHANGES: Final = frozenset(
    {ChangeKind.BEGIN, ChangeKind.TIME, ChangeKind.QUEUE, ChangeKind.PRIORITY}
)  # possible for a waiting job


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange:
    """One change that starts the job.

    Attributes:
        text: for users.
        key, value: of the job, as in a job file; empty if the change is not one of the job.
        hint: how to make a change that is not one of the job; None if there is no request for it.
        jobs: the jobs concerned.
    """

    kind: ChangeKind
    text: str
    key: str = ""
    value: str = ""
    hint: Hint | None = None
    jobs: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """`tried`: it is known to start the job."""

    change: SuggestedChange
    seen: Snapshot
    tried: bool = False


class CounterfactualSearch:
    """The search for one job.

    Attributes:
        blockers: running jobs whose end would let it start, as few as were found; set by the search.
        trials: number of trials.
    """

    def __init__(self, forecast: Forecast, job: Job, template: Scheduler, has_time: Callable[[], bool]) -> None:
        self._forecast = forecast
        self.trial: Trial = forecast.trial
        self.snapshot = forecast.trial.snapshot
        self.scheduler = forecast.trial.scheduler
        self.job = job
        self.entry: JobEntry | None = self.scheduler.entries.get(job.id)
        waiting = self.scheduler.wait_reason(job)
        self.reason = WaitReasonCode.NEW if waiting is None else waiting.reason
        self.blockers = find_blockers(forecast, self.entry)
        self.trials = 0
        self._live = template
        self._has_time = has_time

    def find(self) -> list[SuggestedChange]:
        """At most CHANGES_MAX changes, smallest first; fewer if time runs out. Empty if the job starts without a change."""
        found: list[SuggestedChange] = []
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
            self._more_seats,
        ):
            for candidate in candidates():
                if len(found) >= CHANGES_MAX or not self._has_time():
                    return found
                if candidate.tried or self._starts(candidate.seen):
                    found.append(candidate.change)
                    break  # at most one change of each kind
        return found

    def _starts(self, snapshot: Snapshot) -> bool:
        return self._try(snapshot, lambda trial: trial.starts(self.job.id))

    def _try(self, snapshot: Snapshot, read: Callable[[Trial], _Answer]) -> _Answer:
        """Schedule the changed state, count it, and return what `read` finds there."""
        self.trials += 1
        trial = what_if(snapshot, self._live, self.scheduler.order_rules)
        try:
            return read(trial)
        finally:
            trial.release()

    def _candidate(self, kind: ChangeKind, text: str, key: str, value: object, job: Job) -> _Candidate:
        return _Candidate(
            change=SuggestedChange(kind=kind, text=text, key=key, value=str(value)),
            seen=modified_snapshot(self.snapshot, job=job),
        )

    # ---------------------------------------------------------------- changes of the job

    def _release(self) -> Iterator[_Candidate]:
        if self.job.held:
            yield _Candidate(
                change=SuggestedChange(
                    kind=ChangeKind.RELEASE, text="release the job", hint=Hint(HintCode.RELEASE_JOB, job=self.job.id)
                ),
                seen=modified_snapshot(self.snapshot, job=replace(self.job, held=False)),
            )

    def _begin(self) -> Iterator[_Candidate]:
        if self.reason is WaitReasonCode.BEGIN_TIME:
            yield self._candidate(ChangeKind.BEGIN, "begin at once", "begin", "now", self._with_spec(begin_s=None))

    def _time_limit(self) -> Iterator[_Candidate]:
        """A time limit that ends the job before a reservation begins or, if the policy uses run times, before the first job in line starts."""
        now_s, job = self.snapshot.now_s, self.job
        limits: list[float] = []
        if self.entry is not None and self.entry.job_class.excluded:
            starts = sorted({one.start_s for one in self.snapshot.reservations.values() if one.start_s > now_s})
            limits += [start_s - now_s - TIME_LIMIT_MARGIN_S for start_s in starts]
        if self.scheduler.policy.uses_run_times and job.spec.time_limit_s is not None:
            limits += [job.spec.time_limit_s / part for part in (2, 4, 8)]
        for limit_s in sorted(limits, reverse=True):
            minutes = int(limit_s // 60)
            if minutes >= 1 and (job.spec.time_limit_s is None or 60.0 * minutes < job.spec.time_limit_s):
                text = f"set a time limit of {format_duration(60.0 * minutes)}"
                yield self._candidate(
                    ChangeKind.TIME, text, "time", f"{minutes}m", self._with_spec(time_limit_s=60.0 * minutes)
                )

    def _level(self) -> Iterator[_Candidate]:
        spread = self.job.spec.topology
        if spread.required and spread.within:
            wider = self._with_spec(topology=replace(spread, required=False))
            if self._may_fit(wider):
                yield self._candidate(
                    ChangeKind.LEVEL,
                    f"prefer one {spread.within} instead of requiring it",
                    "prefer",
                    spread.within,
                    wider,
                )

    def _shapes(self) -> Iterator[_Candidate]:
        """The same GPUs on another number of nodes."""
        request, role = self.job.spec.role.gpus, self.job.spec.role
        if (
            request.alternatives
            or role.others
            or request.total < 2
            or request.nodes_max is not None
            or role.launch is LaunchMode.FIXED
            or single_node_launcher(role)
        ):
            return
        for nodes in _NODES_TRIED:
            per_node, rest = divmod(request.total, nodes)
            if rest or not per_node or nodes == request.nodes:
                continue
            shape = replace(request, nodes=nodes, per_node=per_node, uneven=False)
            job = self._with_gpus(shape)
            if self._may_fit(job):
                yield self._candidate(
                    ChangeKind.SHAPE,
                    f"request {nodes} x {per_node} GPUs instead of {self._current_shape()}",
                    "gpus",
                    shape,
                    job,
                )

    def _model(self) -> Iterator[_Candidate]:
        request = self.job.spec.role.gpus
        if self.job.spec.role.others:
            return  # a script states what each role needs, and options of the submit cannot
        yield from self._other_models(request)
        if any(model is not None for one in request.choices for model, _ in one.kinds):
            anything = replace(request, model=None, memory_gib=None, alternative_models=(), alternatives=())
            job = self._with_gpus(anything)
            if self._may_fit(job):
                yield self._candidate(
                    ChangeKind.MODEL, f"accept any GPU model instead of {_models_text(request)}", "gpus", anything, job
                )

    def _other_models(self, request: GpuRequest) -> Iterator[_Candidate]:
        """One more model of which the job's speed is known, the fastest first."""
        models, estimate = self.scheduler.fleet_index.device_models, self.scheduler.speeds.estimate(self.job)
        accepted = [kind for kind, model in enumerate(models) if model and _accepts(request, model)]
        own = max((estimate.speeds[kind] for kind in accepted), default=0.0) if estimate.speeds else 0.0
        if not own or len(request.kinds) >= GPU_KINDS_MAX:
            return
        latest_s = self._forecast.start_of(self.job).latest_s
        others = [
            kind for kind, model in enumerate(models) if model and kind not in accepted and estimate.sources[kind]
        ]
        for kind in sorted(others, key=lambda kind: -estimate.speeds[kind]):
            stated = [name for name, _ in self.job.spec.speeds if model_fits(models[kind], 0, name, 0)]
            word = stated[-1] if stated else "-".join(models[kind].lower().split())
            wider = replace(request, alternative_models=(*request.alternative_models, word))
            job = self._with_gpus(wider)
            if self._may_fit(job):
                sooner = (
                    "but it would start now" if latest_s is None else f"but up to {format_duration(latest_s)} earlier"
                )
                source = "" if estimate.sources[kind] is SpeedSource.STATED else f" ({estimate.source_text(kind)})"
                text = f"also accept {word}: {speed_ratio_text(estimate.speeds[kind] / own)}{source}, {sooner}"
                yield self._candidate(ChangeKind.MODEL, text, "gpus", wider, job)

    def _queues(self) -> Iterator[_Candidate]:
        quotas = self.scheduler.board.quotas
        for queue in sorted(self.snapshot.queues.values(), key=lambda queue: queue.id):
            if queue.id == self.job.queue or not queue.open or self.reason in _WAITS_OUTSIDE_QUEUE:
                continue
            if (
                quotas is None
                or quotas.check_admission(quotas.job_node(queue.id), self.job.user, self._asked()) is None
            ):
                yield self._candidate(
                    ChangeKind.QUEUE, f"use queue {queue.id}", "queue", queue.id, replace(self.job, queue=queue.id)
                )

    def _priority(self) -> Iterator[_Candidate]:
        """The least priority that starts it now, or else within SOON_S, by binary search over the ranks of other jobs."""
        entry = self.entry
        if entry is None or self.reason not in (
            WaitReasonCode.PRIORITY,
            WaitReasonCode.RESOURCES,
            WaitReasonCode.RESERVATION,
            WaitReasonCode.TOPOLOGY,
        ):
            return
        board = self.scheduler.board
        own = self.job.spec.priority
        others = {other.job_class.rank for group in (board.waiting, board.running) for other in group.values()}
        steps = sorted(own + rank + 1 - entry.job_class.rank for rank in others if rank >= entry.job_class.rank)
        steps = [step for step in steps if step <= PRIORITY_MAX]
        if not steps:
            return
        delays = {steps[-1]: self._delay_with_priority(steps[-1])}
        best_s = delays[steps[-1]]
        if best_s is None:
            return
        low, high = 0, len(steps) - 1
        while low < high and self._has_time():
            middle = (low + high) // 2
            delay_s = delays[steps[middle]] = self._delay_with_priority(steps[middle])
            if delay_s is not None and (best_s > 0.0 or delay_s == 0.0):
                high = middle
            else:
                low = middle + 1
        step = steps[high]
        delay_s = delays[step] or 0.0
        later = f", which starts it in {format_duration(delay_s)}" if delay_s else ""
        text = f"set priority {step} instead of {own}{later}"
        candidate = self._candidate(ChangeKind.PRIORITY, text, "priority", step, self._with_spec(priority=step))
        yield replace(candidate, tried=True)

    def _delay_with_priority(self, priority: int) -> float | None:
        """After how long it starts with this priority: 0 for now, at most SOON_S until guaranteed runs end; None if it does not."""
        snapshot = modified_snapshot(self.snapshot, job=self._with_spec(priority=priority))
        return self._try(snapshot, self._delay_s)

    def _delay_s(self, trial: Trial) -> float | None:
        if trial.starts(self.job.id):
            return 0.0
        entry, now_s = trial.scheduler.entries.get(self.job.id), trial.scheduler.now_s
        later = NO_LATER_STOPS if entry is None else trial.scheduler.policy.later_stops(entry, now_s)
        if not later.jobs or later.reason is not StopReason.PRIORITY:
            return None
        delay_s = max(other.placed_s for other in later.jobs) + later.after_s - now_s
        return float(max(1, ceil(delay_s))) if delay_s <= SOON_S else None

    def _fewer(self) -> Iterator[_Candidate]:
        """The most GPUs that fit now."""
        asked_for = self.job.spec.role.gpus
        if self.job.spec.role.others:
            return
        request = min(asked_for.choices, key=lambda one: one.milli)  # of alternatives, the smallest
        if request.nodes is not None and request.per_node:
            shapes = [(nodes, request.per_node) for nodes in range(request.nodes - 1, 0, -1)]
            shapes += [(request.nodes, each) for each in range(request.per_node - 1, 0, -1)] + [
                (1, each) for each in range(request.per_node - 1, 0, -1)
            ]
            asked = [replace(request, nodes=n, per_node=each, total=n * each, nodes_max=None) for n, each in shapes]
            asked.sort(key=lambda one: -one.total)
        else:
            unit = max(1, self.scheduler.board.node_devices_max)
            totals = [total for total in range(request.total - 1, 0, -1) if total <= unit or total % unit == 0]
            asked = [replace(request, total=total) for total in totals]
        for fewer in asked[:_FEWER_TRIED]:
            job = self._with_gpus(fewer)
            if self._may_fit(job):
                yield self._candidate(
                    ChangeKind.FEWER,
                    f"request {fewer.total} GPU{'' if fewer.total == 1 else 's'} instead of {asked_for.amount_text}",
                    "gpus",
                    fewer,
                    job,
                )

    # ---------------------------------------------------------------- other changes

    def _wait(self) -> Iterator[_Candidate]:
        if not 0 < len(self.blockers) <= WAITED_JOBS_MAX:
            return
        named = ", ".join(self.blockers[:3]) + (
            "" if len(self.blockers) <= 3 else f" and {len(self.blockers) - 3} more"
        )
        text = f"wait for job{'' if len(self.blockers) == 1 else 's'} {named} to finish"
        change = SuggestedChange(kind=ChangeKind.WAIT, text=text, jobs=tuple(self.blockers))
        yield _Candidate(change=change, seen=modified_snapshot(self.snapshot, gone=self.blockers))

    def _undrain(self) -> Iterator[_Candidate]:
        # A node with a full disk would only refuse the job again.
        away = [
            node
            for node in self.snapshot.nodes.values()
            if node.state is NodeState.UP and node.cordon is not None and node.cordon.by != FULL_DISK
        ]
        back: list[Node] = [replace(node, cordon=None) for node in sorted(away, key=lambda node: node.id)][
            :WAITED_JOBS_MAX
        ]
        for node in back:
            change = _return_to_service(self.snapshot.nodes[node.id])
            yield _Candidate(change=change, seen=modified_snapshot(self.snapshot, nodes=[node]))
        if len(back) > 1:
            names = ",".join(node.id for node in back)
            ours = not any(self.snapshot.nodes[node.id].cordoned_by_engine for node in back)
            change = SuggestedChange(
                kind=ChangeKind.UNDRAIN,
                text=f"return {len(back)} nodes to service",
                hint=Hint(HintCode.UNDRAIN_NODES, nodes=names) if ours else None,
            )
            yield _Candidate(change=change, seen=modified_snapshot(self.snapshot, nodes=back))

    def _open(self) -> Iterator[_Candidate]:
        queue = self.snapshot.queues.get(self.job.queue)
        if queue is not None and not queue.open:
            change = SuggestedChange(
                kind=ChangeKind.OPEN, text=f"open queue {queue.id}", hint=Hint(HintCode.OPEN_QUEUE, queue=queue.id)
            )
            yield _Candidate(change=change, seen=modified_snapshot(self.snapshot, queues=[replace(queue, open=True)]))

    def _raise_limit(self) -> Iterator[_Candidate]:
        quotas = self.scheduler.board.quotas
        if quotas is None or self.job.queue not in self.snapshot.queues:
            return
        if self.entry is None and self.reason is not WaitReasonCode.NEVER:
            return
        refusal = quotas.check_admission(quotas.job_node(self.job.queue), self.job.user, self._asked())
        queue = None if refusal is None else self.snapshot.queues.get(refusal.queue)
        if refusal is None or queue is None:
            return
        over = ceil((1 if refusal.counts_jobs else refusal.requested) + refusal.in_use - refusal.limit)
        if refusal.resource != GPUS:
            yield from self._raise_other_limit(queue, refusal, over)
            return
        wider, field = _with_higher_limit(queue, refusal.reason, over, jobs=refusal.counts_jobs)
        if wider is None:
            return
        what = "quota" if refusal.reason is WaitReasonCode.QUOTA else "limit per user"
        kind = ChangeKind.QUOTA if refusal.reason is WaitReasonCode.QUOTA else ChangeKind.USER_LIMIT
        text = f"raise the {what} of queue {queue.id} by {over} ({field}: {getattr(wider, field)})"
        yield _Candidate(
            change=SuggestedChange(kind=kind, text=text, hint=Hint(HintCode.EDIT_QUEUES)),
            seen=modified_snapshot(self.snapshot, queues=[wider]),
        )

    def _raise_other_limit(self, queue: Queue, refusal: QuotaRefusal, over: int) -> Iterator[_Candidate]:
        """A higher limit of CPUs, memory or an extra."""
        name, by_user = refusal.resource, refusal.reason is WaitReasonCode.USER_LIMIT
        terms = queue.terms_of(name)
        borrows = not by_user and terms.borrow is not None and terms.quota is None
        field = "other_per_user" if by_user else "other_borrow" if borrows else "other_quotas"
        what = "limit per user" if by_user else "borrow limit" if borrows else "quota"
        amounts = dict(getattr(queue, field))
        amounts[name] = amounts.get(name, 0) + over
        raised = tuple(sorted(amounts.items()))
        wider = (
            replace(queue, other_per_user=raised)
            if by_user
            else replace(queue, other_borrow=raised)
            if borrows
            else replace(queue, other_quotas=raised)
        )
        text = f"raise the {what} of queue {queue.id} by {quantity_text(name, over)} to {quantity_text(name, amounts[name])}"
        kind = ChangeKind.USER_LIMIT if by_user else ChangeKind.QUOTA
        yield _Candidate(
            change=SuggestedChange(kind=kind, text=text, hint=Hint(HintCode.EDIT_QUEUES)),
            seen=modified_snapshot(self.snapshot, queues=[wider]),
        )

    def _more_seats(self) -> Iterator[_Candidate]:
        """More seats of the licence that the job waits for."""
        board, licences = self.scheduler.board, self.job.spec.role.licences
        name = board.lacking_licence(licences)
        licence = self.snapshot.licences.get(name)
        if licence is None:
            return
        seats = licence.total + dict(licences)[name] - board.free_licences.get(name, 0)
        change = SuggestedChange(
            kind=ChangeKind.LICENCE,
            text=f"raise licence {name} from {licence.total} to {seats} seats",
            hint=Hint(HintCode.SET_LICENCE, licence=name, seats=seats),
        )
        wider = replace(licence, total=seats)
        yield _Candidate(change=change, seen=replace(self.snapshot, licences={**self.snapshot.licences, name: wider}))

    # ---------------------------------------------------------------- filters

    def _may_fit(self, job: Job) -> bool:
        """Whether free devices alone allow it; otherwise no trial is needed."""
        board = self.scheduler.board
        excluded = 0 if self.entry is None else self.entry.job_class.excluded
        try:
            needs = self.scheduler.needs_of(job)
        except PhalanxError:
            return False
        return any(board.find_need(need, excluded) is not None for need in needs)

    def _with_spec(self, **fields: object) -> Job:
        return replace(self.job, spec=replace(self.job.spec, **fields))  # type: ignore[arg-type]  # names are JobSpec's own

    def _with_gpus(self, gpus: GpuRequest) -> Job:
        return self._with_spec(role=replace(self.job.spec.role, gpus=gpus))

    def _asked(self) -> Resources:
        return self.job.spec.role.asked if self.entry is None else self.entry.job_class.asked

    def _current_shape(self) -> str:
        entry = self.entry
        if entry is None:
            return self.job.spec.role.gpus_text
        need = entry.job_class.needs[0]
        if need.mig_profile:
            return f"{need.nodes} x {need.mig_slices} {need.mig_profile}"
        return f"{need.nodes} x {need.devices}{f' + {need.last_node_devices}' if need.last_node_devices else ''}"


def _accepts(request: GpuRequest, model: str) -> bool:
    """Whether the request, or one of its alternatives, accepts the model, whatever its memory."""
    return any(model_fits(model, 0, wanted, 0) for one in request.choices for wanted, _ in one.kinds)


def _models_text(request: GpuRequest) -> str:
    return ",".join(one.kinds_text for one in request.choices if one.kinds_text)


def _with_higher_limit(queue: Queue, reason: WaitReasonCode, over: int, *, jobs: bool) -> tuple[Queue | None, str]:
    """The queue with its limit raised by this much, and the name of the changed field."""
    if reason is WaitReasonCode.USER_LIMIT:
        if jobs:
            return replace(queue, jobs_per_user=(queue.jobs_per_user or 0) + over), "jobs_per_user"
        return replace(queue, gpus_per_user=(queue.gpus_per_user or 0) + over), "gpus_per_user"
    if reason is not WaitReasonCode.QUOTA:
        return None, ""
    if queue.borrow_gpus is not None and queue.quota_gpus is None:
        return replace(queue, borrow_gpus=queue.borrow_gpus + over), "borrow_gpus"
    return replace(queue, quota_gpus=(queue.quota_gpus or 0) + over), "quota_gpus"


def _return_to_service(node: Node) -> SuggestedChange:
    """The change that undoes the node's cordon, in its engine if that has it out of service."""
    if node.cordon is None or not node.cordoned_by_engine:
        hint: Hint | None = Hint(HintCode.UNDRAIN_NODES, nodes=node.id)
        return SuggestedChange(kind=ChangeKind.UNDRAIN, text=f"return node {node.id} to service", hint=hint)
    text = f"return node {node.id} to service in {node.engine} ({node.cordon.why})"
    hint = Hint(HintCode.UNDRAIN_IN_ENGINE, command=node.cordon.remedy) if node.cordon.remedy else None
    return SuggestedChange(kind=ChangeKind.UNDRAIN, text=text, hint=hint)
