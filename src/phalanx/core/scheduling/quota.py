"""The queue tree as a pass sees it: holdings (`core.work.quotas`), fair share over past and present use, and budgets. Called by the scheduler.

**Fair share.** The factor of a queue is 2^(-R): 1 for one that has used nothing, 1/2 for one that has used all its siblings' and its
own share of two equals, and so on down. Along the way from the fleet (R = 0, S = 1) to a queue c below p, among siblings in use,

    R(c) = R(p) + U(c) * (1 - s) / (s * S(p))        S(c) = S(p) * s

    s   weight of c over the weights of the siblings in use (that have used, hold or want anything, c itself included)
    U   decayed GPU-seconds of c with all below it, as a part of the whole fleet's; what runs now is counted up to now

Source: Slurm's classic fair share, F = 2^(-U_E/S) with effective usage U_E(c) = U(c) + (U_E(p) - U(c)) * s
(slurm.schedmd.com/classic_fair_share.html, read July 2026); expanded, U_E(c)/S(c) is the sum above. Two changes: the fleet's own
U_E is taken as 0, so that a queue without rivals keeps 1 whatever it uses; and siblings that never used or wanted anything do not dilute
shares. Depth costs nothing: a queue without siblings has its parent's factor.

**Budgets.** A start is refused while the GPU-hours spent in the period, running jobs counted up to now, have reached the budget of
the queue or of one above. What runs is never stopped for a budget: it may go over by what runs when it is reached, and that is not
taken from the next period. Nobody knows how long a job will run, so nothing is set aside for it.

Time is a number given to `advance` and `charge`; between them nothing is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId
from phalanx.core.work.job import Reason
from phalanx.core.work.queue import Queue, Spent
from phalanx.core.work.quotas import FLEET, Holdings, Refusal
from phalanx.core.work.spending import HOUR_S, decay, left_of_rate, period_start_s

_RATIO_MAX: Final = 1000.0  # 2^-1000 is still a number above 0; past it queues are equally last


@dataclass(slots=True)
class _Use:
    """GPU-seconds of one node as of `at_s`, and the GPUs that run since then."""

    at_s: float = 0.0
    rate: int = 0
    decayed_gpu_s: float = 0.0
    period_s: float = 0.0
    gpu_s: float = 0.0


class QuotaTree(Holdings):
    """Holdings with time. `take` and `give` are decisions; `charge` says what runs, so that plans need not be undone in the books.

    Cost: O(depth) per call, but for the first `factor` after `advance` or `charge`, which works out all queues.
    """

    __slots__ = ("_budgets", "_factors", "_queues", "_shut", "_use", "_wanting", "now_s")

    def __init__(
        self, queues: Iterable[Queue], fleet_gpus: int, spent: Iterable[Spent] = (), now_s: float = 0.0
    ) -> None:
        known = list(queues)
        super().__init__(known, fleet_gpus)
        self._queues: dict[int, Queue] = {self.whole(queue.id): queue for queue in known}
        self._budgets = tuple(sorted(node for node, queue in self._queues.items() if queue.budget_gpu_h is not None))
        self._shut: set[int] = set()
        self._factors: list[float] = []
        self._wanting: frozenset[int] = frozenset()
        self.begin(spent, now_s)

    def begin(self, spent: Iterable[Spent], now_s: float) -> None:
        """Begin the books from what is stored, as of now, which may be earlier than they stood; what runs is still to be charged."""
        self.now_s = now_s
        self._use = [_Use(at_s=now_s) for _ in self.ids]
        self._remember({record.queue: record for record in spent})
        self.advance(now_s)

    def advance(self, now_s: float) -> bool:
        """It is later: budgets are looked at again, factors worked out anew when next asked for. Time does not run backwards.

        Returns:
            Whether a budget is spent that was not, or the other way round.
        """
        self.now_s = max(self.now_s, now_s)
        self._factors = []
        before, self._shut = self._shut, {node for node in self._budgets if self._left_gpu_s(node) <= 0.0}
        return before != self._shut

    def charge(self, queue: int, gpus: int, now_s: float, since_s: float | None = None) -> None:
        """From now on the queue runs `gpus` more (fewer, below 0); `since_s` for what began earlier and is not charged yet.

        The latter is for attempts that live when the tree is built.
        """
        self.now_s = max(self.now_s, now_s)
        ran_s = 0.0 if since_s is None else max(0.0, self.now_s - since_s)
        for node in self.paths[queue]:
            use = self._settled(node)
            use.rate += gpus
            if ran_s:
                use.decayed_gpu_s += gpus * left_of_rate(ran_s)
                use.gpu_s += gpus * min(ran_s, self.now_s - use.period_s)
        self._factors = []

    def admits(self, queue: int, user: str, gpus: int) -> Refusal | None:
        """Whether a job may start now; None when it may. O(depth). Jobs without GPUs cost no GPU-hours."""
        if self._shut and gpus:
            for node in self.paths[queue]:
                if node in self._shut:
                    return self._over_budget(node, gpus)
        return super().admits(queue, user, gpus)

    def want(self, queues: Iterable[int]) -> None:
        """In these queues jobs wait: with all above them they are in use, though they may never have run anything. O(depth) each."""
        wanting = frozenset(node for queue in queues for node in self.paths[queue])
        if wanting != self._wanting:
            self._wanting, self._factors = wanting, []

    def factor(self, queue: int) -> float:
        """The fair-share factor of the queue's own jobs as the books stand, in (0, 1]; the higher, the sooner."""
        if not self._factors:
            self._factors = self._work_out_factors()
        return self._factors[queue]

    def budget_left_gpu_h(self, queue_id: QueueId) -> float | None:
        """GPU-hours left in this period, below 0 when running jobs went over; None without a budget."""
        node = self.whole(queue_id)
        return None if self._queues[node].budget_gpu_h is None else self._left_gpu_s(node) / HOUR_S

    def spent(self, queue_id: QueueId) -> Spent:
        """What the queue with all below it has used up to now."""
        use = self._settled(self.whole(queue_id))
        return Spent(
            queue=queue_id, at_s=use.at_s, period_s=use.period_s, gpu_s=use.gpu_s, decayed_gpu_s=use.decayed_gpu_s
        )  # fmt: skip

    def next_change_s(self, now_s: float) -> float:
        """When time alone next lets a job start: a spent budget's new period. Infinite when none is spent."""
        return min((self._period_end_s(node, now_s) for node in self._shut), default=math.inf)

    def _over_budget(self, node: int, gpus: int) -> Refusal:
        budget = self._queues[node].budget_gpu_h or 0.0
        held = budget - self._left_gpu_s(node) / HOUR_S
        return Refusal(
            Reason.BUDGET, self.ids[node], gpus, held, budget, until_s=self._period_end_s(node, self.now_s)
        )  # fmt: skip

    def _period_end_s(self, node: int, now_s: float) -> float:
        queue = self._queues[node]
        return period_start_s(queue, now_s) + queue.budget_period_s

    def _left_gpu_s(self, node: int) -> float:
        return (self._queues[node].budget_gpu_h or 0.0) * HOUR_S - self._settled(node).gpu_s

    def _settled(self, node: int) -> _Use:
        """The node's use, brought to now."""
        use = self._use[node]
        for_s = self.now_s - use.at_s
        if for_s > 0.0:
            use.decayed_gpu_s = use.decayed_gpu_s * decay(for_s) + use.rate * left_of_rate(for_s)
        queue = self._queues.get(node)
        begun_s = use.period_s if queue is None else period_start_s(queue, self.now_s)
        if begun_s != use.period_s:
            use.period_s, use.gpu_s = begun_s, use.rate * max(0.0, min(for_s, self.now_s - begun_s))
        else:
            use.gpu_s += use.rate * max(0.0, for_s)
        use.at_s = self.now_s
        return use

    def _remember(self, spent: dict[QueueId, Spent]) -> None:
        """Take over what is stored. The own jobs of a queue have used what its children have not; the fleet, what all have."""
        for node, queue in self._queues.items():
            record = spent.get(queue.id)
            if record is None:
                continue
            use = self._use[node]
            use.decayed_gpu_s = record.decayed_gpu_s * decay(self.now_s - record.at_s)
            use.period_s = period_start_s(queue, self.now_s)
            use.gpu_s = record.gpu_s if record.period_s == use.period_s else 0.0
        for node in [*self._queues, FLEET]:
            below = self.children[node]
            if node == FLEET:
                self._use[node].decayed_gpu_s = sum(self._use[child].decayed_gpu_s for child in below)
            elif below:
                others = sum(self._use[child].decayed_gpu_s for child in below[:-1])
                self._use[below[-1]].decayed_gpu_s = max(0.0, self._use[node].decayed_gpu_s - others)

    def _work_out_factors(self) -> list[float]:
        used = [self._settled(node).decayed_gpu_s for node in range(len(self.ids))]
        total = used[FLEET]
        ratio, share = [0.0] * len(used), [1.0] * len(used)
        ways = [FLEET]
        while ways:
            node = ways.pop()
            below = self.children[node]
            weights = sum(self.weight[child] for child in below if used[child] > 0.0 or child in self._wanting)
            for child in below:
                ratio[child], share[child] = ratio[node], share[node]
                if used[child] > 0.0 and total > 0.0:
                    own = self.weight[child] / weights
                    ratio[child] += used[child] / total * (1.0 - own) / (own * share[node])
                    share[child] *= own
                if self.children[child]:
                    ways.append(child)
        return [2.0 ** -min(value, _RATIO_MAX) for value in ratio]
