"""The properties of a job that decide whether it can ever start."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId, QueueId, UserId
from phalanx.core.scheduling.shape import placement_part
from phalanx.core.work.spec import JobSpec, Role, TopologyConstraint


@dataclass(frozen=True, slots=True)
class FeasibilityRequest:
    """The properties of a job that decide; jobs with equal ones have the same outlook. `role` holds only what the job asks of its nodes."""

    role: Role
    topology: TopologyConstraint
    nodelist: tuple[NodeId, ...]
    exclude: tuple[NodeId, ...]
    reservation: str
    queue: QueueId
    user: UserId
    mounts: bool = False


def feasibility_request(spec: JobSpec, queue: QueueId, user: UserId) -> FeasibilityRequest:
    """The request of a job, submitted or not."""
    return FeasibilityRequest(
        placement_part(spec.role, with_tasks=False),
        spec.topology,
        spec.nodelist,
        spec.exclude,
        spec.reservation,
        queue,
        user,
        spec.mounts_stores,
    )
