"""Invariant 26: a service keeps its ready replicas while it changes. Called by `invariants`.

It counts from the committed attempts and history, not from the service's own figures, since these may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.controller.services.service_reconciler import RECONCILER
from phalanx.core.ids import JobId, ServiceId
from phalanx.core.lifecycle.endpoints import ENDPOINT
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import REVISIONS, SERVICES
from phalanx.core.state.world import World
from phalanx.simulator.drill.violations import require


def check_services(history: Sequence[HistoryLine], world: World) -> None:
    """Check the services that stop ready replicas in a commit: at most one fewer than wanted may be ready then, and never none.

    A replica that others stopped later in the same commit was ready when the service decided.
    """
    by_service, by_others = _dropped(history, world)
    for service_id, dropped in by_service.items():
        service = world.table(SERVICES)[service_id]
        terms = world.table(REVISIONS)[service_id, service.revision].terms
        awake = service.desired - (min(service.asleep, service.desired) if terms.sleep else 0)
        if service.stopped_by or awake == 0:
            continue
        ready = [
            job_id
            for job_id in world.relations.replicas.get(service_id, ())
            if job_id in by_others or (job_id in world.attempts and world.attempts[job_id].serving)
        ]
        require(
            len(ready) >= min(len(ready) + len(dropped), max(1, awake - 1)),
            26,
            f"service {service_id} wants {awake} replicas awake and stopped {dropped}; ready are {ready}",
        )


def _dropped(history: Sequence[HistoryLine], world: World) -> tuple[dict[ServiceId, list[JobId]], set[JobId]]:
    """The replicas that stopped being ready because their service stopped them, and those that others stopped after that.

    The line before says who did it.
    """
    before: dict[JobId, HistoryLine] = {}
    found: dict[ServiceId, list[JobId]] = {}
    later: set[JobId] = set()
    for line in history:
        if line.job_id is None:
            continue
        cause, replica = before.get(line.job_id), world.jobs[line.job_id].replica
        ended = line.kind == ENDPOINT and not line.facts["ready"]
        if ended and replica is not None and cause is not None and cause.kind == "stopping":
            if cause.by == RECONCILER:
                found.setdefault(replica.service, []).append(line.job_id)
            elif replica.service in found:
                later.add(line.job_id)
        before[line.job_id] = line
    return found, later
