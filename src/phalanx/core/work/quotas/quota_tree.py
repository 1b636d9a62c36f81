"""Quotas of a queue tree: guaranteed resources, borrowing, lending and limits per user, updated whenever a job starts or ends.

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

**Resources.** Each resource that some queue limits is counted by itself (`quota_dimension.py`): GPUs always; CPUs, memory and extras where a queue
names them. A job starts if every resource admits it. It may stop jobs of queues that use more than their right of a resource that
refuses it; it must be within its own right of each such resource, and of GPUs.

Counting is exact, in integers (thousandths of GPUs), and O(depth): usage of a node past its reserved part counts in the node above it.

    used(q) = own jobs + sum over children c of max(0, used(c) - reserved(c))
    pool(q) = right(q) - sum of rights below + sum over children c of min(lend(c), pool(c))
    reserved(q) = pool(q) - min(lend(q), pool(q))            used(q) <= pool(q) + borrow(q), at every instant

The scheduler uses it on planned state, the verification of plans on actual state. It has no notion of time: see `scheduling.quota`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phalanx.core.ids import QueueId
from phalanx.core.resources import GPUS, Resources, quantity
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_dimension import FLEET, UNLIMITED, QuotaDimension, QuotaRefusal
from phalanx.core.work.states import WaitReasonCode

__all__ = ["FLEET", "UNLIMITED", "QuotaDimension", "QuotaRefusal", "QuotaTree"]


class QuotaTree:
    """The queue tree with its usage. Nodes are numbers; a queue with children has a second node for the jobs in the queue itself.

    Attributes:
        ids: the queue of each node; "" for the fleet.
        paths: of each node, itself and all its ancestors, the fleet last.
        gpus: quotas of GPUs.
        others: quotas of the other resources that some queue limits, by name; mostly none.
        right, pool, reserved, limit, held, used: those of `gpus`.
    """

    __slots__ = (
        "_job_limits",
        "_job_node",
        "_jobs",
        "_node",
        "children",
        "gpus",
        "held",
        "ids",
        "limit",
        "others",
        "paths",
        "pool",
        "reserved",
        "right",
        "used",
        "weight",
    )

    def __init__(self, queues: Iterable[Queue], fleet: Resources) -> None:
        """Nothing in use. `fleet`: what its nodes have, in any state, and the seats of its licences."""
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
        names = sorted({name for queue in known for name in queue.other_resources})
        self.gpus = self._dimension(GPUS, known, fleet)
        self.others = tuple(self._dimension(name, known, fleet) for name in names)
        self.right, self.pool, self.reserved = self.gpus.right, self.gpus.pool, self.gpus.reserved
        self.limit, self.held, self.used = self.gpus.limit, self.gpus.held, self.gpus.used
        self._jobs: dict[tuple[int, str], int] = {}  # running jobs, only where there is a limit
        most = {self._node[queue.id]: queue.jobs_per_user for queue in known if queue.jobs_per_user is not None}
        self._job_limits: list[tuple[tuple[int, int], ...]] = [
            tuple((node, most[node]) for node in path if node in most) for path in self.paths
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

    def dimension(self, resource: str) -> QuotaDimension:
        """The quotas of one resource, which some queue limits."""
        return next(one for one in (self.gpus, *self.others) if one.resource == resource)

    def available_milli(self, queue: int) -> int:
        """Thousandths of GPUs that the quotas allow to be used now, regardless of free devices."""
        return self.gpus.available(queue)

    def check_admission(self, queue: int, user: str, asked: Resources) -> QuotaRefusal | None:
        """Why a job that takes these resources may not start now; None if it may. O(depth) for each limited resource."""
        found = None
        if self.gpus.user_limits[queue]:
            found = self.gpus.user_refusal(queue, user, asked.milli)
        if found is None and self._job_limits[queue]:
            found = self._jobs_refusal(queue, user, asked)
        if found is None and self.others:
            users = (one.user_refusal(queue, user, asked.amount_of(one.resource)) for one in self.others)
            found = next(filter(None, users), None)
        if found is None:
            found = self.gpus.quota_refusal(queue, asked.milli)
        if found is None and self.others:
            found = next((refusal for _, refusal in self._refusing(queue, asked)), None)
        return found

    def add_running(self, queue: int, user: str, held: Resources, jobs: int = 1) -> None:
        """Count a job that starts or, with `jobs=0`, grows. Not checked against limits: a reduced quota does not stop running jobs."""
        self.gpus.add(queue, user, held.milli)
        for one in self.others:
            one.add(queue, user, held.amount_of(one.resource))
        if self._job_limits[queue]:
            self._count_jobs(queue, user, jobs)

    def remove_running(self, queue: int, user: str, held: Resources, jobs: int = 1) -> None:
        """Release them: undoes `add_running` exactly, in any order."""
        self.gpus.remove(queue, user, held.milli)
        for one in self.others:
            one.remove(queue, user, held.amount_of(one.resource))
        if self._job_limits[queue]:
            self._count_jobs(queue, user, -jobs)

    def borrowed_past_right(self, queue: int) -> int:
        """Thousandths of GPUs borrowed past its right; 0 for none, and where no queue has a quota."""
        return self.gpus.borrowed(queue)

    def is_entitled(self, queue: int, asked: Resources) -> bool:
        """Whether a job that takes these resources would be within the right of its queue or of an ancestor: then it may reclaim.

        Of GPUs always; of another resource only if that refuses it now.
        """
        if not self.gpus.is_entitled(queue, asked.milli):
            return False
        return not self.others or all(
            one.is_entitled(queue, asked.amount_of(one.resource)) for one, _ in self._refusing(queue, asked)
        )

    def is_reclaimable(self, victim: int, claimant: int, asked: Resources) -> bool:
        """Whether a job of queue `victim` may be stopped so that a job in queue `claimant` that takes these resources gets its right.

        Every queue from the victim's up to the lowest common ancestor uses more than its right of a resource that refuses the claimant, and on
        the claimant's side some queue stays within its own. If none refuses it, it lacks devices, and GPUs decide.
        """
        if self.others:
            short = [one for one, _ in self._refusing(claimant, asked)]
            if not short or self.gpus.quota_refusal(claimant, asked.milli) is not None:
                short.append(self.gpus)
            return any(one.is_reclaimable(victim, claimant, asked.amount_of(one.resource)) for one in short)
        return self.gpus.is_reclaimable(victim, claimant, asked.milli)

    def would_owe(self, borrower: int, owner: int, asked: Resources) -> bool:
        """Whether a job with these resources would only borrow what the jobs of `owner` have a right to: stopped for it, they would reclaim it."""
        amounts = ((one, asked.amount_of(one.resource)) for one in (self.gpus, *self.others))
        return any(one.would_owe(borrower, owner, amount) for one, amount in amounts if amount)

    def _refusing(self, queue: int, asked: Resources) -> Iterator[tuple[QuotaDimension, QuotaRefusal]]:
        """The resources other than GPUs whose quotas refuse the job now."""
        for one in self.others:
            refusal = one.quota_refusal(queue, asked.amount_of(one.resource))
            if refusal is not None:
                yield one, refusal

    def _jobs_refusal(self, queue: int, user: str, asked: Resources) -> QuotaRefusal | None:
        for node, most in self._job_limits[queue]:
            jobs = self._jobs.get((node, user), 0)
            if jobs >= most:
                gpus = quantity(GPUS, asked.milli)
                return QuotaRefusal(WaitReasonCode.USER_LIMIT, self.ids[node], gpus, jobs, most, user, counts_jobs=True)
        return None

    def _count_jobs(self, queue: int, user: str, jobs: int) -> None:
        for node, _ in self._job_limits[queue]:
            running = self._jobs.get((node, user), 0) + jobs
            if running:
                self._jobs[node, user] = running
            else:
                self._jobs.pop((node, user), None)

    def _dimension(self, resource: str, queues: Iterable[Queue], fleet: Resources) -> QuotaDimension:
        terms = {self._node[queue.id]: queue.terms_of(resource) for queue in queues}
        return QuotaDimension(resource, self.ids, self.paths, self.children, terms, fleet.amount_of(resource))

    def _add_own_nodes(self, parents: list[int]) -> None:
        """Give each queue with children a node for its own jobs: one more child, of the default weight."""
        for node in sorted(set(parents[1:]) - {FLEET}):
            self._job_node[self.ids[node]] = len(self.ids)
            self.ids.append(self.ids[node])
            self.weight.append(1.0)
            parents.append(node)


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
