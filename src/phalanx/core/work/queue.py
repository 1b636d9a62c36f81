"""Queues and projects: where jobs wait, and which accounting group pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId, QueueId, UserId

BUDGET_PERIOD_S: Final = 30 * 86400.0
FAIR_HALF_LIFE_S: Final = 7 * 86400.0  # the usual PriorityDecayHalfLife of Slurm, by its documentation and most sites


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a queue (with all below it) had used at `at_s`. Written when an attempt in it ends.

    Attributes:
        gpu_s: in the budget period that began at `period_s`.
        decayed_gpu_s: over all time, halved every half-life (FAIR_HALF_LIFE_S): the input of the fair share.
    """

    queue: QueueId
    at_s: float
    period_s: float = 0.0
    gpu_s: float = 0.0
    decayed_gpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """An accounting group. Only members (and operators) submit for it."""

    id: ProjectId
    members: frozenset[UserId] = frozenset()
    admins: frozenset[UserId] = frozenset()
    created_s: float = 0.0
