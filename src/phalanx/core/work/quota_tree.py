"""Quotas of a queue tree: guaranteed GPUs, borrowing, lending and limits per user, updated whenever a job starts or ends.

The semantics are those of Kueue's cohort trees (kueue.sigs.k8s.io, "Cohort" and "Cluster Queue", read 2026): a quota is a guarantee, not a
hard limit.

- **Right.** A queue's right is its quota, for itself and all below it; without a quota, the sum of the rights below. The part of a quota
  that exceeds the rights below it is the right of the jobs in the queue itself, which count as one more child.
- **Lending.** The idle part of a right is in the pool of the queue above, available to its other children and, through it, further up, as
  far as each `lend_gpus` allows; the rest stays with the queue. The top pool also has the fleet's GPUs that exceed all quotas.
- **Borrowing.** A queue uses its own right first, then the pools above, at most `borrow_gpus` past its right.
- **Reclaiming.** A job for which some queue on its path stays within its right may stop jobs of queues that use more than their right,
  up to the lowest common ancestor. There are always enough of them (verified by tests/property/test_quota.py).
- **Overcommitment.** Quotas may sum to more than the fleet and are not scaled: first come, first served; only borrowers are stopped.

Counting is exact, in thousandths of GPUs, and O(depth): usage of a node past its reserved part counts in the node above it.

    used(q) = own jobs + sum over children c of max(0, used(c) - reserved(c))
    pool(q) = right(q) - sum of rights below + sum over children c of min(lend(c), pool(c))
    reserved(q) = pool(q) - min(lend(q), pool(q))            used(q) <= pool(q) + borrow(q), at every instant

The scheduler uses it on planned state, the verification of plans on actual state. It has no notion of time: see `scheduling.quota`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId
from phalanx.core.resources import Resources
from phalanx.core.work.job import WaitReasonCode
from phalanx.core.work.queue import Queue
from phalanx.core.work.share import MILLI_PER_DEVICE, gpus_of

FLEET: Final = 0  # the root above all queues: the GPUs of the fleet
UNLIMITED: Final = 1 << 60  # larger than any fleet


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why a queue does not admit a job now. The sentence is built only on demand.

    Attributes:
        queue: whose limit it is: the job's own or an ancestor; "" if nothing is left to borrow in the whole fleet.
        in_use, limit: GPUs (jobs with `counts_jobs`, GPU-hours for a budget) in use, and the maximum.
        jobs: the limit is on running jobs, not GPUs.
        until_s: when the next budget period begins; 0 if it is not about a budget.
    """

    reason: WaitReasonCode
    queue: QueueId
    requested_gpus: float
    in_use: float
    limit: float
    user: str = ""
    counts_jobs: bool = False
    until_s: float = 0.0

    def describe(self) -> str:
        """The refusal as a sentence for users."""
        if self.reason is WaitReasonCode.BUDGET:
            return f"queue {self.queue} has spent {self.in_use:.1f} of its {self.limit:g} GPU-hours of this period"
        if self.reason is WaitReasonCode.USER_LIMIT:
            unit = "running jobs" if self.counts_jobs else "GPUs"
            return (
                f"user {self.user} uses {self.in_use:g} of at most {self.limit:g} {unit} per user in queue {self.queue}"
            )
        if not self.queue:
            return f"all quotas are in use and nothing is left to borrow for {self.requested_gpus:g} GPUs"
        if self.limit < self.requested_gpus:
            return f"the job needs {self.requested_gpus:g} GPUs; queue {self.queue} can use at most {self.limit:g}, so it can never start there"
        return f"queue {self.queue} uses {self.in_use:g} of at most {self.limit:g} GPUs; the job needs {self.requested_gpus:g}"


class QuotaTree:
    """The queue tree with its usage. Nodes are numbers; a queue with children has a second node for the jobs in the queue itself.

    Attributes:
        ids: the queue of each node; "" for the fleet.
        paths: of each node, itself and all its ancestors, the fleet last.
        right: guaranteed thousandths of GPUs of each node.
        held: thousandths in use, with all below.
        used: thousandths that count against `pool`; see the module.
        limit: maximum of `used`.
    """

    __slots__ = (
        "_job_node",
        "_limits",
        "_node",
        "_users",
        "children",
        "held",
        "ids",
        "limit",
        "paths",
        "pool",
        "reserved",
        "right",
        "used",
        "weight",
    )

    def __init__(self, queues: Iterable[Queue], fleet_gpus: int) -> None:
        known = sorted(queues, key=lambda queue: queue.id)
        self._node: dict[QueueId, int] = {queue.id: number for number, queue in enumerate(known, 1)}
        self._job_node = dict(self._node)
        self.ids: list[QueueId] = [QueueId(""), *(queue.id for queue in known)]
        self.weight = [1.0, *(queue.weight for queue in known)]
        parents = _parents(known, self._node)
        self._add_own_nodes(parents)
        self.children: list[list[int]] = [[] for _ in self.ids]
        for node in range(1, len(self.ids)):
            self.children[parents[node]].append(node)
        self.paths = [_path(node, parents) for node in range(len(self.ids))]
        count = len(self.ids)
        self.right, self.pool, self.reserved, self.limit = [0] * count, [0] * count, [0] * count, [UNLIMITED] * count
        self.held, self.used = [0] * count, [0] * count
        self._compute_rights({self._node[queue.id]: queue for queue in known}, fleet_gpus)
        self._users: dict[tuple[int, str], tuple[int, int]] = {}  # (thousandths, jobs) in use, only if there is a limit
        limited = {self._node[q.id]: q for q in known if q.gpus_per_user is not None or q.jobs_per_user is not None}
        self._limits: list[tuple[tuple[int, int, int], ...]] = [
            tuple((node, *_user_limits(limited[node])) for node in path if node in limited) for path in self.paths
        ]

    def job_node(self, queue_id: QueueId) -> int:
        """The node in which the queue's own jobs count: the argument of all other functions.

        Raises:
            KeyError: no such queue.
        """
        return self._job_node[queue_id]

    def subtree_node(self, queue_id: QueueId) -> int:
        """The node of the queue with all below it, for reading figures."""
        return self._node[queue_id]

    def available_milli(self, queue: int) -> int:
        """Thousandths of GPUs that the quotas allow to be used now, regardless of free devices."""
        room = max(0, self.limit[FLEET] - self.used[FLEET])
        for node in reversed(self.paths[queue][:-1]):
            used, reserved = self.used[node], self.reserved[node]
            room = max(0, reserved - used) + max(0, min(room, self.limit[node] - max(used, reserved)))
        return room

    def check_admission(self, queue: int, user: str, asked: Resources) -> QuotaRefusal | None:
        """Why a job that takes these resources may not start now; None if it may. O(depth)."""
        milli = asked.milli
        gpus = gpus_of(milli)
        for node, milli_max, jobs_max in self._limits[queue]:
            held, jobs = self._users.get((node, user), (0, 0))
            if held + milli > milli_max:
                return QuotaRefusal(
                    WaitReasonCode.USER_LIMIT, self.ids[node], gpus, gpus_of(held), gpus_of(milli_max), user
                )
            if jobs >= jobs_max:
                return QuotaRefusal(
                    WaitReasonCode.USER_LIMIT, self.ids[node], gpus, jobs, jobs_max, user, counts_jobs=True
                )
        more = milli
        for node in self.paths[queue]:
            if not more:
                return None
            used = self.used[node]
            if used + more > self.limit[node]:
                # The idle reserved part of a child is not available, so it counts as held: held + unused reserved = used + all reserved.
                return QuotaRefusal(
                    WaitReasonCode.QUOTA,
                    self.ids[node],
                    gpus,
                    gpus_of(used + self._reserved_below(node)),
                    gpus_of(self.limit[node] + self._reserved_below(node)),
                )
            if reserved := self.reserved[node]:
                more = max(0, used + more - reserved) - max(0, used - reserved)
        return None

    def add_running(self, queue: int, user: str, held: Resources, jobs: int = 1) -> None:
        """Count a job that starts or, with `jobs=0`, grows. Not checked against limits: a reduced quota does not stop running jobs."""
        milli = held.milli
        if self._limits[queue]:
            self._count(queue, user, milli, jobs)
        more = milli
        for node in self.paths[queue]:
            self.held[node] += milli
            if more:
                used = self.used[node]
                self.used[node] = used + more
                if reserved := self.reserved[node]:
                    more = max(0, used + more - reserved) - max(0, used - reserved)

    def remove_running(self, queue: int, user: str, held: Resources, jobs: int = 1) -> None:
        """Release them: undoes `add_running` exactly, in any order."""
        milli = held.milli
        if self._limits[queue]:
            self._count(queue, user, -milli, -jobs)
        less = milli
        for node in self.paths[queue]:
            self.held[node] -= milli
            if less:
                used = self.used[node]
                self.used[node] = used - less
                if reserved := self.reserved[node]:
                    less = max(0, used - reserved) - max(0, used - less - reserved)

    def borrowed_past_right(self, queue: int) -> int:
        """Thousandths borrowed past its right; 0 for none."""
        return max(0, self.used[queue] - self.pool[queue])

    def is_entitled(self, queue: int, asked: Resources) -> bool:
        """Whether a job that takes these resources would be within the right of its queue or of an ancestor: then it may reclaim.

        A full limit further up does not revoke the right: usage there past other rights can be reclaimed.
        """
        more = asked.milli
        for node in self.paths[queue]:
            if node == FLEET or self.used[node] + more > self.limit[node]:
                return False
            if self.used[node] + more <= self.pool[node]:
                return True
            more = self._passed_on(node, more)
        return False

    def is_reclaimable(self, victim: int, claimant: int, asked: Resources) -> bool:
        """Whether a job of queue `victim` may be stopped so that a job in queue `claimant` that takes these resources gets its right.

        Every queue from the victim's up to the lowest common ancestor uses more than its right, and on the claimant's side some queue stays within
        its own.
        """
        above = self.paths[claimant]
        common = FLEET
        for node in self.paths[victim]:
            if node in above:
                common = node
                break
            if self.used[node] <= self.pool[node]:
                return False
        levels = self._within(claimant, asked.milli, common)
        return bool(levels) and levels[-1]

    def _within(self, queue: int, milli: int, common: int) -> list[bool]:
        """For each node from `queue` to below `common`: whether it would stay within its right; empty if a limit forbids the job anyway."""
        levels: list[bool] = []
        more = milli
        for node in self.paths[queue]:
            if node == common:
                break
            if self.used[node] + more > self.limit[node]:
                return []
            levels.append(self.used[node] + more <= self.pool[node])
            more = self._passed_on(node, more)
        return levels

    def _passed_on(self, node: int, more: int) -> int:
        """How much of `more` in a node count in its parent: those past its reserved part."""
        used, reserved = self.used[node], self.reserved[node]
        return max(0, used + more - reserved) - max(0, used - reserved)

    def _reserved_below(self, node: int) -> int:
        return self.right[node] - self.pool[node]

    def _count(self, queue: int, user: str, milli: int, jobs: int) -> None:
        for node, _, _ in self._limits[queue]:
            held, running = self._users.get((node, user), (0, 0))
            if held + milli or running + jobs:
                self._users[node, user] = (held + milli, running + jobs)
            else:
                del self._users[node, user]

    def _add_own_nodes(self, parents: list[int]) -> None:
        """Give each queue with children a node for its own jobs: one more child, of the default weight."""
        for node in sorted(set(parents[1:]) - {FLEET}):
            self._job_node[self.ids[node]] = len(self.ids)
            self.ids.append(self.ids[node])
            self.weight.append(1.0)
            parents.append(node)

    def _compute_rights(self, queues: dict[int, Queue], fleet_gpus: int) -> None:
        """Compute rights, pools and limits, from the leaves up."""
        for node in sorted(range(len(self.ids)), key=lambda node: (-len(self.paths[node]), node)):
            queue = queues.get(node)
            own = self.children[node][-1] if queue is not None and self.children[node] else -1
            below = sum(self.right[child] for child in self.children[node])
            quota = fleet_gpus if node == FLEET else (queue.quota_gpus or 0) if queue is not None else 0
            wanted = quota * MILLI_PER_DEVICE
            rest = max(0, wanted - below)
            if own >= 0:
                self.right[own] = self.pool[own] = rest  # lends all, borrows any: the limits of its queue apply
            lent = sum(self.pool[child] - self.reserved[child] for child in self.children[node])
            self.right[node] = below + rest
            self.pool[node] = lent if own >= 0 else lent + rest
            if queue is not None:
                lend, borrow = queue.lend_gpus, queue.borrow_gpus
                self.reserved[node] = 0 if lend is None else max(0, self.pool[node] - lend * MILLI_PER_DEVICE)
                self.limit[node] = UNLIMITED if borrow is None else self.pool[node] + borrow * MILLI_PER_DEVICE
        self.limit[FLEET] = self.pool[FLEET]


def _parents(queues: list[Queue], node_of: dict[QueueId, int]) -> list[int]:
    """The parent of each node. A queue with an unknown parent, or in a cycle, is put at the top; `check_queue_tree` rejects such queues."""
    parents = [FLEET, *(node_of.get(queue.parent, FLEET) if queue.parent is not None else FLEET for queue in queues)]
    for node in range(1, len(parents)):
        seen, above = {node}, parents[node]
        while above != FLEET and above not in seen:
            seen.add(above)
            above = parents[above]
        if above != FLEET:
            parents[node] = FLEET
    return parents


def _path(node: int, parents: list[int]) -> tuple[int, ...]:
    path = [node]
    while path[-1] != FLEET:
        path.append(parents[path[-1]])
    return tuple(path)


def _user_limits(queue: Queue) -> tuple[int, int]:
    return (
        UNLIMITED if queue.gpus_per_user is None else queue.gpus_per_user * MILLI_PER_DEVICE,
        UNLIMITED if queue.jobs_per_user is None else queue.jobs_per_user,
    )
