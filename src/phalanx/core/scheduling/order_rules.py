"""What the scheduler asks of the rules on nodes that cost money; `outlook.bursting` answers. It reads forecasts, which read the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from phalanx.core.fleet.node_pool import NodePool
from phalanx.core.ids import JobId, NodeId, QueueId
from phalanx.core.scheduling.board_builder import ClusterSnapshot
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

_SchedulerT_contra = TypeVar("_SchedulerT_contra", contravariant=True)


class OrderJudge(Protocol):
    """Judges orders in one state."""

    def admits(self, job: Job, pools: Sequence[NodePool]) -> bool:
        """Whether the job may order one node of each of these pools, which may repeat."""

    def keeps_off(self, job: Job) -> frozenset[NodeId]:
        """Nodes that cost money and are there or on their way, on which the job must not run."""

    def text_of(self, job_id: JobId) -> str:
        """What speaks for and against nodes of pools for the waiting job, and what was chosen; empty if no rule was asked."""


class OrderRules(Protocol[_SchedulerT_contra]):
    """The rules on nodes that cost money. They read a `scheduler.Scheduler`."""

    def judge(
        self, scheduler: _SchedulerT_contra, cluster: ClusterSnapshot, now_s: float, wall_s: float
    ) -> OrderJudge | None:
        """The judge of this state; None without a rule. Times as in `Scheduler.plan`."""

    def keeps_off(self, job: Job, pool: NodePool, queues: Mapping[QueueId, Queue]) -> bool:
        """Whether the job must not run on nodes of the pool, also if they are free."""

    def send_home(
        self, scheduler: _SchedulerT_contra, cluster: ClusterSnapshot, now_s: float, wall_s: float
    ) -> dict[JobId, str]:
        """Move jobs on the board from such nodes to free ones of the own fleet where that pays; why, by job."""
