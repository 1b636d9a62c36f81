"""The queue tree as the scheduler uses it: holdings (`core.work.quotas.quota_tree`), fair share over past and present use, and budgets.

**Fair share.** The factor of a queue is 2^(-R): 1 for one that has used nothing, 1/2 for one of two equal queues that has used the shares
of both, and so on down. Along the path from the fleet (R = 0, S = 1) to a queue c below p, with siblings in use,

    R(c) = R(p) + U(c) * (1 - s) / (s * S(p))        S(c) = S(p) * s

    s   weight of c over the weights of the siblings in use (that have usage or waiting jobs, c itself included)
    U   decayed GPU-seconds of c with all below it, as a fraction of the whole fleet's; running jobs are counted up to now. A second on a
        slower model counts as the share of work done in it, where the job's speed was observed

Source: Slurm's classic fair share, F = 2^(-U_E/S) with effective usage U_E(c) = U(c) + (U_E(p) - U(c)) * s
(slurm.schedmd.com/classic_fair_share.html, read July 2026); expanded, U_E(c)/S(c) is the sum above. Two changes: the fleet's own
U_E is 0, so that a queue without competitors has factor 1 whatever it uses; and siblings that never used or wanted anything do not dilute
shares. Depth has no cost: a queue without siblings has its parent's factor.

**Budgets.** A start is rejected while the GPU-hours spent in the period, running jobs counted up to now, have reached the budget of
the queue or of an ancestor. Running jobs are never stopped for a budget: the jobs that run when it is reached may exceed it, and the
excess is not charged to the next period. Run times are unknown, so nothing is set aside for a start.

Time is a number passed to `advance` and `change_rate`; nothing happens between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import JobId, QueueId, UserId
from phalanx.core.resources import Resources
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import (
    HOUR_S,
    NO_USER,
    Queue,
    QueueUsage,
    are_users_fair,
    decay_factor,
    decayed_gpu_s_of_rate,
    half_life_s,
    period_start_s,
)
from phalanx.core.work.quotas.quota_tree import FLEET, QuotaRefusal, QuotaTree
from phalanx.core.work.share import MILLI_PER_DEVICE, gpus_of
from phalanx.core.work.states import WaitReasonCode

_RATIO_MAX: Final = 1000.0  # 2^-1000 is still above 0; past it queues are equally last


@dataclass(slots=True)
class _Usage:
    """GPU-seconds of one node at `at_s`, and the thousandths of GPUs in use since then; `speed_milli` times their speed, for the fair share."""

    at_s: float = 0.0
    milli: int = 0
    speed_milli: float = 0.0
    decayed_gpu_s: float = 0.0
    period_s: float = 0.0
    gpu_s: float = 0.0

    def decay(self, for_s: float, half_s: float) -> None:
        """Let this time pass at the rate that holds."""
        if for_s > 0.0:
            working = self.speed_milli / MILLI_PER_DEVICE
            self.decayed_gpu_s *= decay_factor(for_s, half_s)
            self.decayed_gpu_s += working * decayed_gpu_s_of_rate(for_s, half_s)

    def change_rate(self, milli: int, speed: float, decayed_gpu_s: float) -> None:
        """Change the rate from now on, and add what was used before at this rate."""
        self.milli += milli
        self.speed_milli = (
            self.speed_milli + milli * speed if self.milli else 0.0
        )  # an idle one has no rounding error left
        self.decayed_gpu_s += decayed_gpu_s


class FairShareTree(QuotaTree):
    """Holdings with time. `add_running` and `remove_running` count decisions; `change_rate` counts running jobs, so that a plan that is undone leaves no usage.

    Cost: O(depth) per call, but for the first `factor` after `advance` or `change_rate`, which computes all queues.
    """

    __slots__ = (
        "_budgets",
        "_exhausted",
        "_factors",
        "_half_lives",
        "_queues",
        "_usage",
        "_user_factors",
        "_users",
        "_waiting",
        "_waiting_users",
        "now_s",
    )

    def __init__(
        self, queues: Iterable[Queue], fleet: Resources, usage: Iterable[QueueUsage] = (), now_s: float = 0.0
    ) -> None:
        known = list(queues)
        super().__init__(known, fleet)
        self._queues: dict[int, Queue] = {self.subtree_node(queue.id): queue for queue in known}
        by_id = {queue.id: queue for queue in known}
        self._half_lives = [half_life_s(by_id, queue_id) for queue_id in self.ids]
        # By queue of jobs in which users are fair: the use of each user.
        self._users: dict[int, dict[UserId, _Usage]] = {
            self.job_node(queue.id): {} for queue in known if are_users_fair(by_id, queue.id)
        }
        self._user_factors: dict[int, dict[UserId, float]] = {}
        self._waiting_users: dict[int, set[UserId]] = {}
        self._budgets = tuple(sorted(node for node, queue in self._queues.items() if queue.budget_gpu_h is not None))
        self._exhausted: set[int] = set()
        self._factors: list[float] = []
        self._waiting: frozenset[int] = frozenset()
        self.reset_usage(usage, now_s)

    def reset_usage(self, spent: Iterable[QueueUsage], now_s: float) -> None:
        """Reset usage to the stored records at `now_s`, which may be earlier than before; running jobs are still to be charged."""
        self.now_s = now_s
        self._usage = [_Usage(at_s=now_s) for _ in self.ids]
        self._users = {node: {} for node in self._users}
        self._load({record.queue: record for record in spent})
        self.advance(now_s)

    def advance(self, now_s: float) -> bool:
        """Advance the time: budgets are checked again, factors computed on the next query. Time never goes backwards.

        Returns:
            Whether the set of exhausted budgets changed.
        """
        self.now_s = max(self.now_s, now_s)
        self._forget_factors()
        before, self._exhausted = (
            self._exhausted,
            {node for node in self._budgets if self._budget_left_gpu_s(node) <= 0.0},
        )
        return before != self._exhausted

    def change_rate(
        self,
        queue: int,
        milli: int,
        now_s: float,
        since_s: float | None = None,
        speed: float = 1.0,
        user: UserId = NO_USER,
    ) -> None:
        """From now on the queue uses `milli` thousandths of GPUs more (fewer, if negative), for this user.

        `since_s`: start of usage that is not charged yet, for attempts that run when the tree is built.
        """
        self.now_s = max(self.now_s, now_s)
        ran_s = 0.0 if since_s is None else max(0.0, self.now_s - since_s)
        gpus, half_s = milli / MILLI_PER_DEVICE, self._half_lives[queue]
        before = speed * gpus * decayed_gpu_s_of_rate(ran_s, half_s) if ran_s else 0.0
        for node in self.paths[queue]:
            use = self._usage_now(node)
            use.change_rate(milli, speed, before)
            if ran_s:
                use.gpu_s += gpus * min(ran_s, self.now_s - use.period_s)
        if user and queue in self._users:
            self._user_now(queue, user).change_rate(milli, speed, before)
        self._forget_factors()

    def check_admission(self, queue: int, user: str, asked: Resources) -> QuotaRefusal | None:
        """Why a job may not start now; None if it may. O(depth). Jobs without GPUs need no budget."""
        if self._exhausted and asked.milli:
            for node in self.paths[queue]:
                if node in self._exhausted:
                    return self._over_budget(node, asked.milli)
        return super().check_admission(queue, user, asked)

    def set_waiting(self, pairs: Iterable[tuple[int, str]]) -> None:
        """Set the queues and users with waiting jobs: they, and the queues above them, count as in use, even without usage. O(depth) each."""
        by_queue: dict[int, set[UserId]] = {}
        for queue, user in pairs:
            by_queue.setdefault(queue, set()).add(UserId(user))
        wanting = frozenset(node for queue in by_queue for node in self.paths[queue])
        users = {queue: by_queue[queue] for queue in self._users if queue in by_queue}
        if wanting != self._waiting or users != self._waiting_users:
            self._waiting, self._waiting_users = wanting, users
            self._forget_factors()

    def fair_share_factor(self, queue: int, user: str = NO_USER) -> float:
        """The fair-share factor of the queue's own jobs, of this user where its users are fair, in (0, 1]; a higher one goes first."""
        if not self._factors:
            self._factors = self._compute_factors()
        factor = self._factors[queue]
        if not user or queue not in self._users:
            return factor
        if queue not in self._user_factors:
            self._user_factors[queue] = self._compute_user_factors(queue)
        return factor * self._user_factors[queue].get(UserId(user), 1.0)

    @property
    def has_fair_users(self) -> bool:
        """Whether users are fair in any queue."""
        return bool(self._users)

    def users_before(self, queue: int, user: str) -> list[UserId]:
        """The other users with waiting jobs in this queue of jobs who have used less, where its users are fair."""
        own = self.fair_share_factor(queue, user)
        others = sorted(self._waiting_users.get(queue, set()) - {user})
        return [other for other in others if self.fair_share_factor(queue, other) > own]

    def user_shares(self, queue_id: QueueId) -> dict[UserId, tuple[float, float]]:
        """Decayed GPU-seconds and factor, without the queue's, of each user of the queue's own jobs; empty where users are not fair."""
        node = self.job_node(queue_id)
        factors = self._compute_user_factors(node) if node in self._users else {}
        return {user: (self._user_now(node, user).decayed_gpu_s, factor) for user, factor in factors.items()}

    def budget_left_gpu_h(self, queue_id: QueueId) -> float | None:
        """GPU-hours left in this period, negative if running jobs exceed it; None without a budget."""
        node = self.subtree_node(queue_id)
        return None if self._queues[node].budget_gpu_h is None else self._budget_left_gpu_s(node) / HOUR_S

    def usage(self, queue_id: QueueId) -> QueueUsage:
        """The usage of the queue with all below it up to now."""
        use = self._usage_now(self.subtree_node(queue_id))
        return QueueUsage(
            queue=queue_id, at_s=use.at_s, period_s=use.period_s, gpu_s=use.gpu_s, decayed_gpu_s=use.decayed_gpu_s
        )

    def next_change_s(self, now_s: float) -> float:
        """When time alone next allows a start: the next period of an exhausted budget. Infinite if none is exhausted."""
        return min((self._period_end_s(node, now_s) for node in self._exhausted), default=math.inf)

    def _over_budget(self, node: int, milli: int) -> QuotaRefusal:
        budget = self._queues[node].budget_gpu_h or 0.0
        held = budget - self._budget_left_gpu_s(node) / HOUR_S
        return QuotaRefusal(
            WaitReasonCode.BUDGET,
            self.ids[node],
            gpus_of(milli),
            held,
            budget,
            until_s=self._period_end_s(node, self.now_s),
        )

    def _period_end_s(self, node: int, now_s: float) -> float:
        queue = self._queues[node]
        return period_start_s(queue, now_s) + queue.budget_period_s

    def _budget_left_gpu_s(self, node: int) -> float:
        return (self._queues[node].budget_gpu_h or 0.0) * HOUR_S - self._usage_now(node).gpu_s

    def _usage_now(self, node: int) -> _Usage:
        """The node's usage, updated to now."""
        use = self._usage[node]
        for_s, gpus = self.now_s - use.at_s, use.milli / MILLI_PER_DEVICE
        use.decay(for_s, self._half_lives[node])
        queue = self._queues.get(node)
        period_s = use.period_s if queue is None else period_start_s(queue, self.now_s)
        if period_s != use.period_s:
            use.period_s, use.gpu_s = period_s, gpus * max(0.0, min(for_s, self.now_s - period_s))
        else:
            use.gpu_s += gpus * max(0.0, for_s)
        use.at_s = self.now_s
        return use

    def _load(self, spent: dict[QueueId, QueueUsage]) -> None:
        """Load stored usage. Own jobs of a queue: its usage less that of its children; the fleet: the sum of all."""
        for node, queue in self._queues.items():
            record = spent.get(queue.id)
            if record is None:
                continue
            use = self._usage[node]
            kept = decay_factor(self.now_s - record.at_s, self._half_lives[node])
            use.decayed_gpu_s = record.decayed_gpu_s * kept
            own = self.job_node(queue.id)
            if own in self._users:
                self._users[own] = {
                    user: _Usage(at_s=self.now_s, decayed_gpu_s=used * kept) for user, used in record.users
                }
            use.period_s = period_start_s(queue, self.now_s)
            use.gpu_s = record.gpu_s if record.period_s == use.period_s else 0.0
        for node in [*self._queues, FLEET]:
            below = self.children[node]
            if node == FLEET:
                self._usage[node].decayed_gpu_s = sum(self._usage[child].decayed_gpu_s for child in below)
            elif below:
                others = sum(self._usage[child].decayed_gpu_s for child in below[:-1])
                self._usage[below[-1]].decayed_gpu_s = max(0.0, self._usage[node].decayed_gpu_s - others)

    def _compute_factors(self) -> list[float]:
        used = [self._usage_now(node).decayed_gpu_s for node in range(len(self.ids))]
        total = sum(used[child] for child in self.children[FLEET])  # each with a half-life of its own
        ratio, share = [0.0] * len(used), [1.0] * len(used)
        pending = [FLEET]
        while pending:
            node = pending.pop()
            below = self.children[node]
            weights = sum(self.weight[child] for child in below if used[child] > 0.0 or child in self._waiting)
            for child in below:
                ratio[child], share[child] = ratio[node], share[node]
                if used[child] > 0.0 and total > 0.0:
                    own = self.weight[child] / weights
                    ratio[child] += used[child] / total * (1.0 - own) / (own * share[node])
                    share[child] *= own
                if self.children[child]:
                    pending.append(child)
        return [2.0 ** -min(value, _RATIO_MAX) for value in ratio]

    def _user_now(self, node: int, user: UserId) -> _Usage:
        use = self._users[node].setdefault(user, _Usage(at_s=self.now_s))
        use.decay(self.now_s - use.at_s, self._half_lives[node])
        use.at_s = self.now_s
        return use

    def _compute_user_factors(self, node: int) -> dict[UserId, float]:
        """Users share a queue as queues of equal weight share the one above them."""
        used = {user: self._user_now(node, user).decayed_gpu_s for user in tuple(self._users[node])}
        waiting = self._waiting_users.get(node, set())
        used |= dict.fromkeys(waiting - used.keys(), 0.0)
        present = sum(spent > 0.0 or user in waiting for user, spent in used.items())
        total = sum(used.values())
        return {
            user: 2.0 ** -min(spent / total * (present - 1), _RATIO_MAX) if spent > 0.0 else 1.0
            for user, spent in used.items()
        }

    def _forget_factors(self) -> None:
        self._factors = []
        self._user_factors.clear()


class QuotaCharges:
    """Queue, thousandths of GPUs, speed and user of each charged job. `quotas` is None on a board without quotas, where nothing is charged."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[JobId, tuple[int, int, float, UserId]] = {}

    def clear(self) -> None:
        """The quota tree is new: nothing is charged in it."""
        self._held.clear()

    def start(self, quotas: FairShareTree | None, job: Job, queue: int, attempt: Attempt, wall_s: float) -> None:
        """The job runs; its run time before now is charged too. Idempotent."""
        if quotas is not None and job.id not in self._held:
            self._held[job.id] = (queue, attempt.allocation.milli, attempt.speed, job.user)
            charge_from_start(quotas, queue, attempt, wall_s, job.user)

    def stop(self, quotas: FairShareTree | None, job_id: JobId, wall_s: float) -> None:
        """The job no longer runs. Does nothing if it was not charged."""
        if quotas is not None and job_id in self._held:
            queue, milli, speed, user = self._held.pop(job_id)
            quotas.change_rate(queue, -milli, wall_s, speed=speed, user=user)

    def rebuild(
        self,
        quotas: FairShareTree | None,
        spent: Iterable[QueueUsage],
        attempts: Mapping[JobId, Attempt],
        wall_s: float,
    ) -> None:
        """The clock was set, and the quota tree cannot go back in time: reset it to the records, and charge running jobs from their start."""
        if quotas is None:
            return
        quotas.reset_usage(spent, wall_s)
        for job_id, (queue, milli, speed, user) in self._held.items():
            attempt = attempts.get(job_id)
            if attempt is None:
                quotas.change_rate(queue, milli, wall_s, None, speed, user)
            else:
                charge_from_start(quotas, queue, attempt, wall_s, user)


def charge_from_start(quotas: FairShareTree, queue: int, attempt: Attempt, wall_s: float, user: UserId) -> None:
    """Charge a running job, for the time before now too, in which it may have slept."""
    since_s = wall_s - attempt.device_s(wall_s)
    if attempt.gave_devices_back:
        full = attempt.full_allocation.milli
        quotas.change_rate(queue, full, wall_s, since_s, attempt.speed, user)
        quotas.change_rate(queue, -full, wall_s, speed=attempt.speed, user=user)
    else:
        quotas.change_rate(queue, attempt.allocation.milli, wall_s, since_s, attempt.speed, user)
