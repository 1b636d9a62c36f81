"""Queues and projects, and the usage of queues: GPU-seconds per budget period, and decayed for the fair share.

Usage decays by half every half-life, FAIR_HALF_LIFE_S unless the topmost queue says another. A constant rate r (GPUs) that began t seconds ago contributes

    r * H / ln 2 * (1 - 2^(-t/H))        with half-life H; exact, so usage need not be sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId, QueueId, UserId
from phalanx.core.resources import GPUS, Resources
from phalanx.core.work.burst_rule import BurstRule
from phalanx.core.work.services.request_limits import NO_REQUEST_LIMITS, RequestLimits
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.usage.monthly_budget import BudgetWarning, MonthlyBudget
from phalanx.core.work.usage.waste_terms import ALARM_AFTER_S, IdleAction, IdlePolicy, WasteKind

BUDGET_PERIOD_S: Final = 30 * 86400.0
FAIR_HALF_LIFE_S: Final = 7 * 86400.0  # the usual PriorityDecayHalfLife of Slurm, by its documentation and most sites


Amounts = tuple[tuple[str, int], ...]  # by name of the resource, sorted; 0 is a limit like any other


@dataclass(frozen=True, slots=True)
class QuotaTerms:
    """The terms of one queue for one resource; None for none. `quota`: no right of its own; the others: no limit."""

    quota: int | None = None
    borrow: int | None = None
    lend: int | None = None
    per_user: int | None = None


NO_TERMS: Final = QuotaTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue: a node of the queue tree. Jobs may wait in any queue; quotas apply to a queue with all below it. GPUs of any model count alike.

    Attributes:
        priority: added to the priority of its jobs.
        parent: the queue above; None at the top.
        quota_gpus: nominal quota, which it can always reclaim; None: it has no quota of its own and uses its parent's or idle GPUs.
        borrow_gpus: most that it (with all below) may use above its quota; None: any; 0: never.
        lend_gpus: most of its idle quota that others may use; None: all; 0: none.
        weight: share relative to its siblings in the fair share; above 0.
        gpus_per_user, jobs_per_user: limits of one user in this queue and below; None: no limit.
        budget_gpu_h: GPU-hours that may be spent in each period; None: no limit.
        budget_period_s: its length, counted from the Unix epoch.
        other_quotas, other_borrow, other_lend, other_per_user: the same terms for CPUs ("cpus"), memory ("memory", in bytes) and
            extras, by name; a name that is missing has no such limit.
        idle: what happens to its jobs that do not use their GPUs; None: as in the queue above.
        alarms: seconds of waste after which it is an alarm, by kind; None for never. A kind that is missing: as in the queue above.
        burst: when its jobs order nodes that cost money; None: as in the queue above.
        min_stay_s: least time between two moves of one of its jobs that the scheduler decides; None: as in the queue above.
        fair_users: of its jobs, those of users who have used less go first; None: as in the queue above.
        half_life_s: in which use halves for the fair share, of it and of all below it. Only a queue without a parent has one.
    """

    id: QueueId
    priority: int = 0
    open: bool = True
    parent: QueueId | None = None
    quota_gpus: int | None = None
    borrow_gpus: int | None = None
    lend_gpus: int | None = None
    weight: float = 1.0
    gpus_per_user: int | None = None
    jobs_per_user: int | None = None
    budget_gpu_h: float | None = None
    budget_period_s: float = BUDGET_PERIOD_S
    other_quotas: Amounts = ()
    other_borrow: Amounts = ()
    other_lend: Amounts = ()
    other_per_user: Amounts = ()
    idle: IdlePolicy | None = None
    alarms: tuple[tuple[WasteKind, float | None], ...] = ()
    burst: BurstRule | None = None
    min_stay_s: float | None = None
    fair_users: bool | None = None
    half_life_s: float | None = None

    def terms_of(self, resource: str) -> QuotaTerms:
        """Its terms for one resource, in the units of `Resources.amount_of`."""
        if resource == GPUS:
            return QuotaTerms(*map(_milli, (self.quota_gpus, self.borrow_gpus, self.lend_gpus, self.gpus_per_user)))
        parts = (self.other_quotas, self.other_borrow, self.other_lend, self.other_per_user)
        return QuotaTerms(*(dict(part).get(resource) for part in parts))

    @property
    def other_resources(self) -> set[str]:
        """Resources besides GPUs for which it has terms."""
        parts = (self.other_quotas, self.other_borrow, self.other_lend, self.other_per_user)
        return {name for part in parts for name, _ in part}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUsage:
    """What a queue (with all below it) had used at `at_s`. Written when an attempt in it ends.

    Attributes:
        gpu_s: in the budget period that began at `period_s`.
        other_s: amount-seconds of CPUs, memory and extras in that period, by name: CPU-seconds, byte-seconds.
        decayed_gpu_s: over all time, halved every half-life: the input of the fair share. A second on a GPU of a slower model
            counts as the part of it that the work would have taken on the job's fastest model, where that is known.
        users: the same by user, of its own jobs, while `Queue.fair_users` holds; those of less than a second are dropped.
    """

    queue: QueueId
    at_s: float
    period_s: float = 0.0
    gpu_s: float = 0.0
    decayed_gpu_s: float = 0.0
    other_s: tuple[tuple[str, float], ...] = ()
    users: tuple[tuple[UserId, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """An accounting group. Only members (and operators) submit for it.

    Attributes:
        budget_warned: the last warning about its budget.
        outputs_bytes: what nodes may store at the head of the outputs of its jobs; 0 for no limit.
        outputs_warned: percent of it at which the history has a line, until the outputs take less again; 0 for none.
        burst: when its jobs order nodes that cost money, where their queue and those above it say nothing; None for no rule.
        request_limits: of its requests to services; `request_weight`: its part of a service whose replicas are busy, relative to other projects.
    """

    id: ProjectId
    members: frozenset[UserId] = frozenset()
    admins: frozenset[UserId] = frozenset()
    created_s: float = 0.0
    budget: MonthlyBudget | None = None
    budget_warned: BudgetWarning | None = None
    outputs_bytes: int = 0
    outputs_warned: int = 0
    request_limits: RequestLimits = NO_REQUEST_LIMITS
    request_weight: float = 1.0
    burst: BurstRule | None = None


def idle_policy(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> IdlePolicy | None:
    """The idle policy for jobs of a queue: its own or the nearest above it; None for none."""
    for queue in with_ancestors(queues, queue_id):
        if queue.idle is not None:
            return None if queue.idle.action is IdleAction.OFF else queue.idle
    return None


def alarm_after_s(queues: Mapping[QueueId, Queue], queue_id: QueueId, kind: WasteKind) -> float | None:
    """The time of waste after which it is an alarm, for jobs of a queue; None for never."""
    for queue in with_ancestors(queues, queue_id):
        for named, after_s in queue.alarms:
            if named is kind:
                return after_s
    return ALARM_AFTER_S[kind]


def burst_rule(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> BurstRule | None:
    """The burst rule for jobs of a queue: its own or the nearest above it; None for none."""
    return next((queue.burst for queue in with_ancestors(queues, queue_id) if queue.burst is not None), None)


def min_stay_s(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> float | None:
    """The least time between two moves of a job of a queue: its own or the nearest above it; None for none."""
    found = (queue.min_stay_s for queue in with_ancestors(queues, queue_id) if queue.min_stay_s is not None)
    return next(found, None)


def are_users_fair(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> bool:
    """Whether of the jobs of a queue those of users who have used less go first: its own word or the nearest above it."""
    found = (queue.fair_users for queue in with_ancestors(queues, queue_id) if queue.fair_users is not None)
    return next(found, False)


def half_life_s(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> float:
    """The time in which the use of a queue halves for the fair share: that of the topmost queue above it."""
    top = None
    for queue in with_ancestors(queues, queue_id):
        top = queue
    return FAIR_HALF_LIFE_S if top is None or top.half_life_s is None else top.half_life_s


def with_ancestors(queues: Mapping[QueueId, Queue], queue_id: QueueId) -> Iterator[Queue]:
    """A queue and those above it, the lowest first."""
    seen: set[QueueId] = set()
    above: QueueId | None = queue_id
    while above is not None and above in queues and above not in seen:
        seen.add(above)
        yield queues[above]
        above = queues[above].parent


NO_USER: Final = UserId("")
_USE_MIN_GPU_S: Final = 1.0
HOUR_S: Final = 3600.0  # of a GPU-hour
CLOCK_SKEW_MAX_S: Final = 300.0  # heads differ by less; beyond it a clock was wrong and has been set since


def decay_factor(for_s: float, half_life_s: float = FAIR_HALF_LIFE_S) -> float:
    """The factor by which usage decays in this time."""
    return math.exp2(-max(0.0, for_s) / half_life_s)


def decayed_gpu_s_of_rate(for_s: float, half_life_s: float = FAIR_HALF_LIFE_S) -> float:
    """Decayed GPU-seconds of one GPU that has been in use for this time up to now."""
    e_fold_s = half_life_s / math.log(2.0)
    return -e_fold_s * math.expm1(-max(0.0, for_s) / e_fold_s)


def period_start_s(queue: Queue, now_s: float) -> float:
    """Start of the budget period that contains `now_s`."""
    return math.floor(now_s / queue.budget_period_s) * queue.budget_period_s


def add_usage(
    queues: Mapping[QueueId, Queue],
    usage_records: Mapping[QueueId, QueueUsage],
    queue_id: QueueId,
    held: Resources,
    from_s: float,
    to_s: float,
    speed: float = 1.0,
    asleep_s: float = 0.0,
    user: UserId = NO_USER,
) -> list[QueueUsage]:
    """The records after these resources were held from `from_s` to `to_s`: of the queue and of all its ancestors, the lowest first.

    `speed`: of the work on them, as a share of that on the fastest model: the fair share counts it, budgets do not.
    `asleep_s`: of this time, how long GPUs were not held; it counts as the first part. `user`: who held them.
    """
    half_s = half_life_s(queues, queue_id)
    fair = are_users_fair(queues, queue_id)
    spent = _Spent(held, from_s, to_s, min(to_s, from_s + asleep_s), speed)
    return [
        spent.added_to(
            usage_records.get(queue.id) or QueueUsage(queue=queue.id, at_s=to_s),
            queue,
            half_s,
            user if fair and queue.id == queue_id else NO_USER,
        )
        for queue in with_ancestors(queues, queue_id)
    ]


@dataclass(frozen=True, slots=True)
class _Spent:
    """Resources that were held from `from_s` to `to_s`, the GPUs among them from `gpus_from_s`, at a speed."""

    held: Resources
    from_s: float
    to_s: float
    gpus_from_s: float
    speed: float

    def added_to(self, before: QueueUsage, queue: Queue, half_s: float, user: UserId) -> QueueUsage:
        """The record of a queue with it."""
        gpus, to_s = self.held.milli / MILLI_PER_DEVICE, self.to_s
        ahead_s = before.at_s - to_s  # attempts end out of order if the clocks of several heads differ
        at_s = to_s if ahead_s > CLOCK_SKEW_MAX_S else max(before.at_s, to_s)
        period_s = period_start_s(queue, at_s)
        counted_s = max(0.0, to_s - max(self.from_s, period_s))
        other_s = dict(before.other_s) if before.period_s == period_s else {}
        for name, amount in self.held.besides_gpus():
            other_s[name] = other_s.get(name, 0.0) + amount * counted_s
        kept = decay_factor(at_s - before.at_s, half_s)
        decayed_gpu_s = (
            self.speed
            * gpus
            * decayed_gpu_s_of_rate(to_s - self.gpus_from_s, half_s)
            * decay_factor(at_s - to_s, half_s)
        )
        users = {name: used * kept for name, used in before.users}
        if user:
            users[user] = users.get(user, 0.0) + decayed_gpu_s
        return QueueUsage(
            queue=queue.id,
            at_s=at_s,
            period_s=period_s,
            gpu_s=(before.gpu_s if before.period_s == period_s else 0.0)
            + gpus * max(0.0, to_s - max(self.gpus_from_s, period_s)),
            decayed_gpu_s=before.decayed_gpu_s * kept + decayed_gpu_s,
            other_s=tuple(sorted(other_s.items())),
            users=tuple(sorted((name, used) for name, used in users.items() if used >= _USE_MIN_GPU_S)),
        )


def _milli(gpus: int | None) -> int | None:
    return None if gpus is None else gpus * MILLI_PER_DEVICE
