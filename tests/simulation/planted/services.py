"""Bugs of services: which replicas a rollout stops, and what a stop means."""

from dataclasses import replace

from phalanx.controller import service_reconciler
from phalanx.core.lifecycle import service as services
from phalanx.core.work.attempt import AttemptState
from phalanx.core.work.service import ServiceState
from tests.simulation.planted.bug import planted


@planted(26, seed=0, services=True)
def service_drops_its_last_ready_replica_in_a_rollout(patch):
    """A rollout counts new replicas whose ranks run as ready, and stops the old ones before a port answers."""
    replaced = services._replaced

    def hasty(service, desired, new, old):
        runs = sum(one.attempt is not None and one.attempt.state is AttemptState.RUNNING for one in new)
        ready = sum(one.serving for one in new)
        return replaced(service, desired - runs + ready, new, old)

    patch.setattr(services, "_replaced", hasty)


@planted(12, seed=0, services=True)
def stopped_service_starts_replicas_again(patch):
    """A stopped service is reconciled like any other, and gets its replicas back."""
    reconcile = services.reconcile

    def forgetful(service, *known):
        return reconcile(replace(service, stopped_by="", state=ServiceState.READY), *known)

    patch.setattr(service_reconciler, "reconcile", forgetful)
