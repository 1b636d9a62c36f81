"""Invariant 26: a service keeps its ready replicas while it changes. Called by `invariants`.

It counts from the committed attempts, not from the service's own figures, since these may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.controller.service_reconciler import RECONCILER
from phalanx.core.ids import JobId, ServiceId
from phalanx.core.state.records import SERVICES, Record
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt, MemberState
from phalanx.core.work.job import Job
from phalanx.simulator.drill.violations import require


class ServiceChecker:
    """Tracks the ready replicas of every service from commit to commit."""

    def __init__(self) -> None:
        self._serving: dict[ServiceId, set[JobId]] = {}

    def check(self, records: Sequence[Record], world: World) -> None:
        """Check the services whose replicas a commit changes."""
        changed: dict[ServiceId, set[JobId]] = {}  # services, and those of their replicas that failed by themselves
        for record in records:
            if not isinstance(record, (Job, Attempt)):
                continue
            job = world.jobs.get(record.id if isinstance(record, Job) else record.job_id)
            if job is not None and job.replica is not None:
                failed = changed.setdefault(job.replica.service, set())
                if isinstance(record, Attempt) and _failed(record):
                    failed.add(job.id)
        for service_id, failed in changed.items():
            self._check_service(service_id, failed, world)

    def _check_service(self, service_id: ServiceId, failed: set[JobId], world: World) -> None:
        before, service = self._serving.get(service_id, set()) - failed, world.table(SERVICES)[service_id]
        after = {
            job_id
            for job_id in world.relations.replicas.get(service_id, ())
            if (attempt := world.attempts.get(job_id)) is not None
            and attempt.serving
            and not world.jobs[job_id].cancelled_by
        }
        self._serving[service_id] = after
        dropped = sorted(job_id for job_id in before - after if world.jobs[job_id].cancelled_by == RECONCILER)
        if not dropped or service.stopped_by or service.desired == 0:
            return
        least = min(len(before), max(1, service.desired - 1)) - (len(before - after) - len(dropped))
        require(
            len(after) >= least,
            26,
            f"service {service_id} wants {service.desired} replicas and stopped {dropped} of {sorted(before)}; "
            f"{sorted(after)} are ready",
        )


def _failed(attempt: Attempt) -> bool:
    """Whether something else than a request ended its readiness."""
    lost = any(member.state is MemberState.LOST for member in attempt.members)
    return not attempt.ready or lost or any(end.failed for end in attempt.exits)
