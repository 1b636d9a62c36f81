"""Whether a job can ever start: judged against the fleet, its queue's quotas and limits, the limits per user, and its reservation.

The job is judged alone on an empty cluster. Other jobs, holds, closed queues, begin times, dependencies and spent budgets delay a job; they do
not make it impossible. The outlook is

- POSSIBLE: the nodes that accept work now can hold it, and every limit admits it;
- NOT_NOW: every limit admits it, but only nodes can hold it that accept no work now, or that are not known yet;
- NEVER: nothing but a change by an operator (other queues, other nodes) or of the job itself would let it start.

The rules, each with the name of its limit:

| limit | NEVER if |
|---|---|
| reservation | the job's reservation has ended, or does not admit its user and queue |
| users.gpus, users.jobs, users.RESOURCE | it alone exceeds the limit per user of its queue or of a queue above |
| licences | it needs more seats of a licence than exist |
| budget | it asks for GPUs, and the queue or a queue above has a budget of 0 GPU-hours |
| borrow | it alone exceeds the quota and borrow limit of its queue or of a queue above |
| nodes | the nodes that it may use cannot hold it: their number, GPUs, CPUs, memory, models, topology |
| mounts | it mounts object stores, and of the nodes that could hold it too few can |
| lend | it alone exceeds its queue's share and what all other queues lend |

Quotas and limits apply to the smallest size of an elastic job. A job with several acceptable models, or
several alternatives, is possible if one of them is.

**Nodes.** A node that is DOWN, cordoned or drained, or that has unhealthy devices, may return: it counts unless it has been DOWN for more than
`NODE_RETURNS_WITHIN_S`. A removed node ("nodes forget") does not count. As long as an engine has not listed all its nodes, and on a fleet
without any node, no job is impossible for want of nodes. Nodes that do not exist yet but that a provider could start belong in
`NodeScope.RETURNING`: they make a job NOT_NOW. They are like the pool's template, or, if nodes of the pool turned out to be of several kinds,
all of any one of these.

Called at submit, when queues or nodes change, and by the scheduler for each waiting job. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.core.fleet.summary import NodeKinds
from phalanx.core.ids import ReservationId
from phalanx.core.scheduling.feasibility.answer import FROM_BEST, Feasibility, never
from phalanx.core.scheduling.feasibility.cluster_limits import ClusterLimits
from phalanx.core.scheduling.feasibility.fleet_outlook import FleetOutlook
from phalanx.core.scheduling.feasibility.node_scopes import ScopedNodes
from phalanx.core.scheduling.feasibility.node_shapes import RequestShapes
from phalanx.core.scheduling.feasibility.queue_limits import QueueLimits
from phalanx.core.scheduling.feasibility.request import FeasibilityRequest, feasibility_request
from phalanx.core.scheduling.shape import alternatives_text
from phalanx.core.work.job import Job

OUTLOOKS_KEPT: Final = 4096  # distinct requests for one state of fleet and queues; some hundred bytes each


class FeasibilityChecker:
    """Judges requests against one state of nodes, queues and reservations. Its answers are cached: create another one for another state.

    Safe for several threads: it copies the mappings, and a race only repeats work.

    Attributes:
        now_s: the time of the state, Unix seconds.
        valid_until_s: until when (Unix seconds) the answers hold if nothing changes: then a node has been DOWN for too long. Infinite for never.
    """

    __slots__ = ("_fleet", "_licences", "_limits", "_outlooks", "_reservations", "now_s", "valid_until_s")

    def __init__(self, cluster: ClusterLimits, now_s: float, node_kinds: NodeKinds | None = None) -> None:
        nodes = ScopedNodes(cluster, now_s, node_kinds or NodeKinds())
        shapes = RequestShapes(nodes, cluster.reservations)
        self._reservations = cluster.reservations
        self._licences = dict(cluster.licences)
        self._fleet = FleetOutlook(nodes, shapes, cluster.awaited_nodes)
        self._limits = QueueLimits(cluster.queues, self._licences, nodes, shapes, cluster.awaited_nodes)
        self._outlooks: dict[FeasibilityRequest, Feasibility] = {}
        self.now_s, self.valid_until_s = now_s, nodes.valid_until_s

    def check(self, request: FeasibilityRequest) -> Feasibility:
        """The outlook of the request. Cost: one dictionary access for a request seen before, else linear in the nodes."""
        found = self._outlooks.get(request)
        if found is None:
            found = self._judge(request)
            if len(self._outlooks) >= OUTLOOKS_KEPT:
                self._outlooks.clear()
            self._outlooks[request] = found
        return found

    def check_job(self, job: Job) -> Feasibility:
        """The outlook of a job."""
        return self.check(feasibility_request(job.spec, job.queue, job.user))

    def _judge(self, request: FeasibilityRequest) -> Feasibility:
        if request.role.gpus.alternatives:
            return self._judge_alternatives(request)
        refusal = (
            self._reservation_refusal(request) or self._licence_refusal(request) or self._limits.refusal_alone(request)
        )
        if refusal is not None:
            return refusal
        found = self._fleet.judge(request)
        return found if found.never else self._limits.with_lending(request, found)

    def _judge_alternatives(self, request: FeasibilityRequest) -> Feasibility:
        """The best outlook of an alternative; if all are impossible, the reason of each."""
        role = request.role
        found = [self.check(replace(request, role=replace(role, gpus=one))) for one in role.gpus.choices]
        best = min(found, key=lambda one: FROM_BEST.index(one.outlook))
        if not best.never:
            return best
        return replace(
            best,
            detail=alternatives_text(
                [(str(one), each.detail) for one, each in zip(role.gpus.choices, found, strict=True)]
            ),
        )

    def _reservation_refusal(self, request: FeasibilityRequest) -> Feasibility | None:
        if not request.reservation:
            return None
        reservation = self._reservations.get(ReservationId(request.reservation))
        if reservation is None:
            return never("reservation", f"reservation {request.reservation} has ended")
        if reservation.admits(request.user, request.queue):
            return None
        return never(
            "reservation",
            f"reservation {reservation.id} is for {reservation.holders_text}, not for {request.user} in queue {request.queue}",
        )

    def _licence_refusal(self, request: FeasibilityRequest) -> Feasibility | None:
        for name, seats in request.role.licences:
            licence = self._licences.get(name)
            if licence is None:
                return never("licences", f"the job needs {seats} of licence {name}, which does not exist")
            if seats > licence.total:
                return never(
                    "licences",
                    f"the job needs {seats} of licence {name}; {licence.total} exist{'s' if licence.total == 1 else ''}",
                )
        return None


def newly_impossible(
    jobs: Iterable[Job], before: FeasibilityChecker, after: FeasibilityChecker
) -> list[tuple[Job, Feasibility]]:
    """The jobs that a change of queues or nodes makes impossible, in the given order, with the reasons."""
    return [(job, found) for job in jobs if (found := after.check_job(job)).never and not before.check_job(job).never]
