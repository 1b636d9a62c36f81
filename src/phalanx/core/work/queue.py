"""Where jobs wait, and who pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId, QueueId, UserId

BUDGET_PERIOD_S: Final = 30 * 86400.0
FAIR_HALF_LIFE_S: Final = 7 * 86400.0  # what Slurm's documentation and most of its sites take for PriorityDecayHalfLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue: a node of the queue tree. Jobs wait in any of them; quotas bind a queue with all below it. GPUs of any model count alike.

    Attributes:
        priority: added to its jobs' own.
        parent: the queue above; None for one at the top.
        quota_gpus: nominal right, always granted back; None: none of its own, it lives on what is above it or idle.
        borrow_gpus: most that it (with all below) may hold above its quota; None: any; 0: never.
        lend_gpus: most of its idle quota that others may use; None: all; 0: none.
        weight: share among siblings in the fair share; above 0.
        gpus_per_user, jobs_per_user: most that one user may hold, and run, in this queue and below; None: no limit.
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
    """What a queue (with all below it) has used, as of `at_s`. Written when an attempt in it ends.

    Attributes:
        gpu_s: in the budget period that began at `period_s`.
        decayed_gpu_s: over all time, halved every half-life (FAIR_HALF_LIFE_S): the past that fair share looks at.
    """

    queue: QueueId
    at_s: float
    period_s: float = 0.0
    gpu_s: float = 0.0
    decayed_gpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Who pays. Only members (and operators) submit for it."""

    id: ProjectId
    members: frozenset[UserId] = frozenset()
    admins: frozenset[UserId] = frozenset()
    created_s: float = 0.0
