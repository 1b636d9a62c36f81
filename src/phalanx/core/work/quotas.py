"""What the queues of a tree may hold, and what they hold: rights, borrowing, lending and limits per user, counted at every take and give.

The meaning is that of Kueue's cohort trees (kueue.sigs.k8s.io, "Cohort" and "Cluster Queue", read 2026): quota is a right, not a wall.

- **Right.** A queue's right is its quota, with all below it; without one, the sum of the rights below. What a quota leaves over the
  rights below it is the right of the jobs in the queue itself, which count as one more child.
- **Lending.** What a right leaves idle lies in the pool of the queue above, for everybody there and, through it, for everybody further
  up, as far as each `lend_gpus` lets it out; the rest is kept at home. At the top lies also what the fleet has over all quotas.
- **Borrowing.** A queue takes from its own right first, then from the pools above, at most `borrow_gpus` past its right.
- **Reclaiming.** A job for which some queue on its way up stays within its right may stop jobs of queues that hold more than theirs,
  all the way up to where the two ways meet. Enough of them can always be stopped (proved by tests/property/test_quota.py).
- **More quota than fleet** is allowed and not scaled: each right stands, and first come is first served; only borrowers are stopped.

Counting is exact in whole GPUs and O(depth): what a node holds past what it keeps counts in the node above it.

    used(q) = own jobs + sum over children c of max(0, used(c) - kept(c))
    pool(q) = right(q) - sum of rights below + sum over children c of min(lend(c), pool(c))
    kept(q) = pool(q) - min(lend(q), pool(q))            used(q) <= pool(q) + borrow(q), at every instant

Used by the scheduler on planned state and by the plan's verification on the state as it is. Knows no time: see `scheduling.quota`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId
from phalanx.core.work.job import Reason
from phalanx.core.work.queue import Queue

FLEET: Final = 0  # the node above all queues: what the fleet has
UNLIMITED: Final = 1 << 60  # past any fleet


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a queue does not let a job start now. The sentence is made only when somebody asks for it.

    Attributes:
        queue: whose limit it is: the job's own or one above; "" when there is nothing idle to borrow in the whole fleet.
        held, limit: GPUs (jobs for `jobs`, GPU-hours for a budget) held, and the most that may be.
        jobs: it is about running jobs, not GPUs.
        until_s: when a spent budget begins anew; 0 otherwise.
    """

    reason: Reason
    queue: QueueId
    asked: int
    held: float
    limit: float
    user: str = ""
    jobs: bool = False
    until_s: float = 0.0

    def sentence(self) -> str:
        """For people."""
        if self.reason is Reason.BUDGET:
            return f"queue {self.queue} has spent its {self.limit:g} GPU-hours of this period ({self.held:.1f})"
        if self.reason is Reason.USER_LIMIT:
            what = "running jobs" if self.jobs else "GPUs"
            return f"{self.user} holds {self.held:g} of at most {self.limit:g} {what} a user in queue {self.queue}"
        if not self.queue:
            return f"all quotas and what is left over are in use: nothing idle to borrow for {self.asked} GPUs"
        if self.limit < self.asked:
            return f"asks for {self.asked} GPUs; queue {self.queue} may never hold more than {self.limit:g}"
        return f"queue {self.queue} holds {self.held:g} of at most {self.limit:g} GPUs: no room for {self.asked} more"


class Holdings:
    """The queue tree with what it holds. Nodes are numbers; a queue with children has a second one for the jobs in the queue itself.

    Attributes:
        ids: the queue of each node; "" for the fleet.
        paths: of each node, itself and all above it, the fleet last.
        right: GPUs of each node's right.
        held: GPUs in all, with all below.
        used: GPUs that count against `pool`; see the module.
        limit: most that `used` may be.
    """

    __slots__ = (
        "_job_node", "_limits", "_node", "_users", "children", "held", "ids", "kept", "limit", "paths", "pool", "right", "used",
        "weight",
    )  # fmt: skip

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
        self.right, self.pool, self.kept, self.limit = [0] * count, [0] * count, [0] * count, [UNLIMITED] * count
        self.held, self.used = [0] * count, [0] * count
        self._work_out_rights({self._node[queue.id]: queue for queue in known}, fleet_gpus)
        self._users: dict[tuple[int, str], tuple[int, int]] = {}  # (GPUs, jobs) held, where a limit asks for it
        limited = {self._node[q.id]: q for q in known if q.gpus_per_user is not None or q.jobs_per_user is not None}
        self._limits: list[tuple[tuple[int, int, int], ...]] = [
            tuple((node, *_user_limits(limited[node])) for node in path if node in limited) for path in self.paths
        ]

    def number(self, queue_id: QueueId) -> int:
        """The node in which the queue's own jobs count: what all other functions take.

        Raises:
            KeyError: no such queue.
        """
        return self._job_node[queue_id]

    def whole(self, queue_id: QueueId) -> int:
        """The node of the queue with all below it, to read figures from."""
        return self._node[queue_id]

    def room(self, queue: int) -> int:
        """GPUs that may be taken now, for quota alone: whether a place is free is another matter."""
        room = max(0, self.limit[FLEET] - self.used[FLEET])
        for node in reversed(self.paths[queue][:-1]):
            used, kept = self.used[node], self.kept[node]
            room = max(0, kept - used) + max(0, min(room, self.limit[node] - max(used, kept)))
        return room

    def admits(self, queue: int, user: str, gpus: int) -> Refusal | None:
        """Whether a job may start now; None when it may. O(depth)."""
        for node, gpus_max, jobs_max in self._limits[queue]:
            held, jobs = self._users.get((node, user), (0, 0))
            if held + gpus > gpus_max:
                return Refusal(Reason.USER_LIMIT, self.ids[node], gpus, held, gpus_max, user)
            if jobs >= jobs_max:
                return Refusal(Reason.USER_LIMIT, self.ids[node], gpus, jobs, jobs_max, user, jobs=True)
        more = gpus
        for node in self.paths[queue]:
            if not more:
                return None
            used = self.used[node]
            if used + more > self.limit[node]:
                # What idle children keep cannot be used by others, so it counts as held: held + unused kept = used + all kept.
                return Refusal(
                    Reason.QUOTA, self.ids[node], gpus, used + self._kept_below(node), self.limit[node] + self._kept_below(node)
                )  # fmt: skip
            if kept := self.kept[node]:
                more = max(0, used + more - kept) - max(0, used - kept)
        return None

    def take(self, queue: int, user: str, gpus: int, jobs: int = 1) -> None:
        """A job starts, or (with `jobs=0`) one that runs grows. Admitted or not: a right that shrank does not undo what runs."""
        if self._limits[queue]:
            self._count(queue, user, gpus, jobs)
        more = gpus
        for node in self.paths[queue]:
            self.held[node] += gpus
            if more:
                used = self.used[node]
                self.used[node] = used + more
                if kept := self.kept[node]:
                    more = max(0, used + more - kept) - max(0, used - kept)

    def give(self, queue: int, user: str, gpus: int, jobs: int = 1) -> None:
        """What was taken comes back: exactly undoes `take`, in any order."""
        if self._limits[queue]:
            self._count(queue, user, -gpus, -jobs)
        less = gpus
        for node in self.paths[queue]:
            self.held[node] -= gpus
            if less:
                used = self.used[node]
                self.used[node] = used - less
                if kept := self.kept[node]:
                    less = max(0, used - kept) - max(0, used - less - kept)

    def over(self, queue: int) -> int:
        """GPUs that it holds past its right, by borrowing; 0 for none."""
        return max(0, self.used[queue] - self.pool[queue])

    def entitled(self, queue: int, gpus: int) -> bool:
        """Whether a job of so many GPUs would be within the right of its queue or of one above: then it may reclaim.

        A limit further up that is full does not take the right away: what fills it past its rights can be reclaimed.
        """
        more = gpus
        for node in self.paths[queue]:
            if node == FLEET or self.used[node] + more > self.limit[node]:
                return False
            if self.used[node] + more <= self.pool[node]:
                return True
            more = self._passed_on(node, more)
        return False

    def reclaimable(self, victim: int, claimant: int, gpus: int) -> bool:
        """Whether a job of queue `victim` may be stopped so that one of `gpus` GPUs in queue `claimant` gets what is its right.

        Every queue from the victim's up to where the ways meet holds more than its right, and on the claimant's side some queue
        stays within its own.
        """
        above = self.paths[claimant]
        meeting = FLEET
        for node in self.paths[victim]:
            if node in above:
                meeting = node
                break
            if self.used[node] <= self.pool[node]:
                return False
        levels = self._within(claimant, gpus, meeting)
        return bool(levels) and levels[-1]

    def _within(self, queue: int, gpus: int, meeting: int) -> list[bool]:
        """For each node from `queue` to below `meeting`: whether it would stay within its right; none if a limit forbids it anyway."""
        levels: list[bool] = []
        more = gpus
        for node in self.paths[queue]:
            if node == meeting:
                break
            if self.used[node] + more > self.limit[node]:
                return []
            levels.append(self.used[node] + more <= self.pool[node])
            more = self._passed_on(node, more)
        return levels

    def _passed_on(self, node: int, more: int) -> int:
        """How many of so many GPUs more in a node count in the one above: those past what it keeps to itself."""
        used, kept = self.used[node], self.kept[node]
        return max(0, used + more - kept) - max(0, used - kept)

    def _kept_below(self, node: int) -> int:
        return self.right[node] - self.pool[node]

    def _count(self, queue: int, user: str, gpus: int, jobs: int) -> None:
        for node, _, _ in self._limits[queue]:
            held, running = self._users.get((node, user), (0, 0))
            if held + gpus or running + jobs:
                self._users[node, user] = (held + gpus, running + jobs)
            else:
                del self._users[node, user]

    def _add_own_nodes(self, parents: list[int]) -> None:
        """Give each queue with children a node for its own jobs: one more child, of the usual weight."""
        for node in sorted(set(parents[1:]) - {FLEET}):
            self._job_node[self.ids[node]] = len(self.ids)
            self.ids.append(self.ids[node])
            self.weight.append(1.0)
            parents.append(node)

    def _work_out_rights(self, queues: dict[int, Queue], fleet_gpus: int) -> None:
        """Rights, pools and limits, from the leaves up."""
        for node in sorted(range(len(self.ids)), key=lambda node: (-len(self.paths[node]), node)):
            queue = queues.get(node)
            own = self.children[node][-1] if queue is not None and self.children[node] else -1
            below = sum(self.right[child] for child in self.children[node])
            wanted = fleet_gpus if node == FLEET else (queue.quota_gpus or 0) if queue is not None else 0
            rest = max(0, wanted - below)
            if own >= 0:
                self.right[own] = self.pool[own] = rest  # lends all, borrows any: its queue's limits bind it
            lent = sum(self.pool[child] - self.kept[child] for child in self.children[node])
            self.right[node] = below + rest
            self.pool[node] = lent if own >= 0 else lent + rest
            if queue is not None:
                lend, borrow = queue.lend_gpus, queue.borrow_gpus
                self.kept[node] = 0 if lend is None else max(0, self.pool[node] - lend)
                self.limit[node] = UNLIMITED if borrow is None else self.pool[node] + borrow
        self.limit[FLEET] = self.pool[FLEET]


def _parents(queues: list[Queue], node_of: dict[QueueId, int]) -> list[int]:
    """The parent of each node. A queue whose parent is unknown, or above itself, stands at the top: checked before it gets here."""
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
        UNLIMITED if queue.gpus_per_user is None else queue.gpus_per_user,
        UNLIMITED if queue.jobs_per_user is None else queue.jobs_per_user,
    )
