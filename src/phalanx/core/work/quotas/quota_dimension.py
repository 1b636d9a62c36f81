"""The quota tree of one resource: rights, borrowing, lending and limits per user, for one integer amount.

`core.work.quotas.quota_tree` states the semantics and has one dimension for GPUs, and one for each other resource that some queue limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import QueueId
from phalanx.core.resources import GPUS, quantity, quantity_text
from phalanx.core.work.queue import NO_TERMS, QuotaTerms
from phalanx.core.work.states import WaitReasonCode

FLEET: Final = 0  # the root above all queues: what the fleet has
UNLIMITED: Final = 1 << 62  # larger than any fleet, also in bytes


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why a queue does not admit a job now. The sentence is built only on demand.

    Attributes:
        queue: whose limit it is: the job's own or an ancestor; "" if nothing is left to borrow in the whole fleet.
        requested, in_use, limit: GPUs, or the amount of `resource` (jobs with `counts_jobs`, GPU-hours for a budget).
        counts_jobs: the limit is on running jobs.
        until_s: when the next budget period begins; 0 if it is not about a budget.
        resource: what is limited: "gpus", "cpus", "memory" or the name of an extra.
    """

    reason: WaitReasonCode
    queue: QueueId
    requested: float
    in_use: float
    limit: float
    user: str = ""
    counts_jobs: bool = False
    until_s: float = 0.0
    resource: str = GPUS

    @property
    def requested_text(self) -> str:
        """What the job asks, with its unit: "8 GPUs"."""
        return quantity_text(self.resource, self.requested)

    @property
    def limit_text(self) -> str:
        """The limit with its unit."""
        return f"{self.limit:g} running jobs" if self.counts_jobs else quantity_text(self.resource, self.limit)

    @property
    def may_pass(self) -> bool:
        """Whether the job could start once others release what they use; if not, it exceeds the limit alone."""
        return self.reason is WaitReasonCode.BUDGET or (1 if self.counts_jobs else self.requested) <= self.limit

    def describe(self) -> str:
        """The refusal as a sentence for users."""
        if self.reason is WaitReasonCode.BUDGET:
            return f"queue {self.queue} has spent {_hours_text(self.in_use)} of its {self.limit:g} GPU-hours of this period"
        in_use = quantity_text(GPUS if self.counts_jobs else self.resource, self.in_use, unit=False)
        if self.reason is WaitReasonCode.USER_LIMIT:
            return f"user {self.user} uses {in_use} of at most {self.limit_text} per user in queue {self.queue}"
        if not self.queue:
            return f"all quotas are in use and nothing is left to borrow for {self.requested_text}"
        if self.limit < self.requested:
            most = quantity_text(self.resource, self.limit, unit=False)
            return f"the job needs {self.requested_text}; queue {self.queue} can use at most {most}, so it can never start there"
        asked = quantity_text(self.resource, self.requested, unit=False)
        return f"queue {self.queue} uses {in_use} of at most {self.limit_text}; the job needs {asked}"


def _hours_text(hours: float) -> str:
    """GPU-hours with three digits, and at least one decimal."""
    return f"{hours:.1f}" if hours >= 10.0 else f"{hours:.3g}"


class QuotaDimension:
    """One resource of a queue tree with its usage. Nodes are those of the tree.

    Attributes:
        resource: its name, as in `Resources.amount_of`.
        right: guaranteed amount of each node.
        pool: of it, what the node and those below may use; see `quota_tree`.
        reserved: of it, what others never get.
        held: amount in use, with all below.
        used: amount that counts against `pool`.
        limit: maximum of `used`.
        user_limits: of each node, the nodes on its path with a limit per user, and that limit.
    """

    __slots__ = (
        "_has_quotas",
        "_ids",
        "_paths",
        "_users",
        "held",
        "limit",
        "pool",
        "reserved",
        "resource",
        "right",
        "used",
        "user_limits",
    )

    def __init__(
        self,
        resource: str,
        ids: Sequence[QueueId],
        paths: Sequence[tuple[int, ...]],
        children: Sequence[Sequence[int]],
        terms: Mapping[int, QuotaTerms],
        capacity: int,
    ) -> None:
        """Nothing in use.

        Args:
            resource: its name.
            ids: the queue of each node.
            paths: of each node, itself and all its ancestors, the fleet last.
            children: of each node; the last one of a queue is for its own jobs.
            terms: of the queues that have some, by node.
            capacity: what the fleet has.
        """
        count = len(ids)
        self.resource = resource
        self._ids, self._paths = ids, paths
        self.right, self.pool, self.reserved, self.limit = [0] * count, [0] * count, [0] * count, [UNLIMITED] * count
        self.held, self.used = [0] * count, [0] * count
        self._has_quotas = any(term.quota is not None for term in terms.values())
        self._compute_rights(children, terms, capacity)
        self._users: dict[tuple[int, str], int] = {}  # amount in use, only where there is a limit
        self.user_limits: list[tuple[tuple[int, int], ...]] = [
            tuple((node, most) for node in path if (most := terms.get(node, NO_TERMS).per_user) is not None)
            for path in paths
        ]

    def available(self, queue: int) -> int:
        """The amount that the quotas allow to be used now, regardless of what is free."""
        room = max(0, self.limit[FLEET] - self.used[FLEET])
        for node in reversed(self._paths[queue][:-1]):
            used, reserved = self.used[node], self.reserved[node]
            room = max(0, reserved - used) + max(0, min(room, self.limit[node] - max(used, reserved)))
        return room

    def user_refusal(self, queue: int, user: str, amount: int) -> QuotaRefusal | None:
        """The limit per user that so much more would exceed."""
        for node, most in self.user_limits[queue]:
            held = self._users.get((node, user), 0)
            if held + amount > most:
                return self._refusal(WaitReasonCode.USER_LIMIT, node, amount, held, most, user)
        return None

    def quota_refusal(self, queue: int, amount: int) -> QuotaRefusal | None:
        """The quota that so much more would exceed. O(depth)."""
        more = amount
        for node in self._paths[queue]:
            if not more:
                return None
            used = self.used[node]
            if used + more > self.limit[node]:
                # The idle reserved part of a child is not available, so it counts as held: held + unused reserved = used + all reserved.
                kept = self.right[node] - self.pool[node]
                return self._refusal(WaitReasonCode.QUOTA, node, amount, used + kept, self.limit[node] + kept)
            if reserved := self.reserved[node]:
                more = max(0, used + more - reserved) - max(0, used - reserved)
        return None

    def add(self, queue: int, user: str, amount: int) -> None:
        """Count so much more as in use, not checked against limits."""
        if self.user_limits[queue]:
            self._count(queue, user, amount)
        more = amount
        for node in self._paths[queue]:
            self.held[node] += amount
            if more:
                used = self.used[node]
                self.used[node] = used + more
                if reserved := self.reserved[node]:
                    more = max(0, used + more - reserved) - max(0, used - reserved)

    def remove(self, queue: int, user: str, amount: int) -> None:
        """Undo `add` exactly, in any order."""
        if self.user_limits[queue]:
            self._count(queue, user, -amount)
        less = amount
        for node in self._paths[queue]:
            self.held[node] -= amount
            if less:
                used = self.used[node]
                self.used[node] = used - less
                if reserved := self.reserved[node]:
                    less = max(0, used - reserved) - max(0, used - less - reserved)

    def borrowed(self, queue: int) -> int:
        """The amount borrowed past its right; 0 for none, and where no queue has a quota."""
        return max(0, self.used[queue] - self.pool[queue]) if self._has_quotas else 0

    def is_entitled(self, queue: int, amount: int) -> bool:
        """Whether so much more would be within the right of the queue or of an ancestor.

        A full limit further up does not revoke the right: usage there past other rights can be reclaimed.
        """
        more = amount
        for node in self._paths[queue]:
            if node == FLEET or self.used[node] + more > self.limit[node]:
                return False
            if self.used[node] + more <= self.pool[node]:
                return True
            more = self._passed_on(node, more)
        return False

    def is_reclaimable(self, victim: int, claimant: int, amount: int) -> bool:
        """Whether every queue from the victim's up to the common ancestor is past its right, and one on the claimant's side stays within its own."""
        above = self._paths[claimant]
        common = FLEET
        for node in self._paths[victim]:
            if node in above:
                common = node
                break
            if self.used[node] <= self.pool[node]:
                return False
        levels = self._within(claimant, amount, common)
        return bool(levels) and levels[-1]

    def would_owe(self, borrower: int, owner: int, amount: int) -> bool:
        """Whether so much more in a queue would be borrowed, and what the owner's side holds is its right: the owner could reclaim it at once."""
        above = self._paths[owner]
        common, more = FLEET, amount
        for node in self._paths[borrower]:
            if node in above:
                common = node
                break
            if self.used[node] + more <= self.pool[node]:
                return False
            more = self._passed_on(node, more)
        levels = self._within(owner, 0, common)
        return bool(levels) and levels[-1]

    def _within(self, queue: int, amount: int, common: int) -> list[bool]:
        """For each node from `queue` to below `common`: whether it would stay within its right; empty if a limit forbids the job anyway."""
        levels: list[bool] = []
        more = amount
        for node in self._paths[queue]:
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

    def _refusal(
        self, reason: WaitReasonCode, node: int, asked: int, in_use: int, limit: int, user: str = ""
    ) -> QuotaRefusal:
        name = self.resource
        return QuotaRefusal(
            reason,
            self._ids[node],
            quantity(name, asked),
            quantity(name, in_use),
            quantity(name, limit),
            user,
            resource=name,
        )

    def _count(self, queue: int, user: str, amount: int) -> None:
        for node, _ in self.user_limits[queue]:
            held = self._users.get((node, user), 0) + amount
            if held:
                self._users[node, user] = held
            else:
                self._users.pop((node, user), None)

    def _compute_rights(
        self, children: Sequence[Sequence[int]], terms: Mapping[int, QuotaTerms], capacity: int
    ) -> None:
        """Compute rights, pools and limits, from the leaves up."""
        for node in sorted(range(len(self._ids)), key=lambda node: (-len(self._paths[node]), node)):
            term = terms.get(node)
            own = children[node][-1] if node != FLEET and children[node] else -1
            below = sum(self.right[child] for child in children[node])
            wanted = capacity if node == FLEET else 0 if term is None else term.quota or 0
            rest = max(0, wanted - below)
            if own >= 0:
                self.right[own] = self.pool[own] = rest  # lends all, borrows any: the limits of its queue apply
            lent = sum(self.pool[child] - self.reserved[child] for child in children[node])
            self.right[node] = below + rest
            self.pool[node] = lent if own >= 0 else lent + rest
            if term is not None:
                self.reserved[node] = 0 if term.lend is None else max(0, self.pool[node] - term.lend)
                self.limit[node] = UNLIMITED if term.borrow is None else self.pool[node] + term.borrow
        self.limit[FLEET] = self.pool[FLEET]
