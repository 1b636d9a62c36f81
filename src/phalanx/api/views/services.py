"""Views of services: committed records, joined with their live replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from phalanx.api.auth.authenticator import may_see_all_of
from phalanx.api.services import HeadServices
from phalanx.api.views.live import live_job_views
from phalanx.core.access.caller import Caller
from phalanx.core.ids import NodeId, ServiceId
from phalanx.core.lifecycle.endpoints import endpoint_of
from phalanx.core.lifecycle.service import replicas_min
from phalanx.core.state.records import REVISIONS
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.services.revision_changes import revision_changes
from phalanx.core.work.services.service import Revision, Service, revision_numbers, rollback_revision
from phalanx.wire.api.services import (
    CanaryShare,
    CanaryView,
    EndpointView,
    LoadView,
    RevisionView,
    ServiceDetail,
    ServiceView,
)

LiveReplicas = Sequence[tuple[Job, Attempt | None]]


def service_views(services: HeadServices, caller: Caller, found: Sequence[Service]) -> list[ServiceView]:
    """Return the views of services. Costs one pass over the live attempts."""
    replicas: dict[ServiceId, list[tuple[Job, Attempt | None]]] = {one.id: [] for one in found}
    for job, attempt in services.controller.live_attempts():
        if job.replica is not None and job.replica.service in replicas:
            replicas[job.replica.service].append((job, attempt))
    addresses = {node.id: node.address for node in services.store.nodes()}
    return [_service_view(services, caller, one, replicas[one.id], addresses) for one in found]


def service_detail(services: HeadServices, caller: Caller, service: Service) -> ServiceDetail:
    """Return a service with its revisions and live replicas."""
    live = [job for job, _ in services.controller.live_attempts()]
    replicas = [
        job
        for job in (*live, *services.controller.pending_jobs())
        if job.replica is not None and job.replica.service == service.id
    ]
    unique = {job.id: job for job in sorted(replicas, key=lambda job: job.seq)}
    known = (services.store.record(REVISIONS, (service.id, number)) for number in revision_numbers(service))
    revisions = [one for one in known if one is not None]
    whole = may_see_all_of(caller, service)
    return ServiceDetail(
        service=service_views(services, caller, [service])[0],
        revisions=[
            RevisionView(
                number=one.number,
                by=one.by,
                created_s=one.created_s,
                replicas=one.terms.range_text,
                gpus=str(one.spec.role.gpus),
                command=one.spec.command_line if whole else "",
                labels=dict(one.spec.labels) if whole else {},
                changes=revision_changes(older.spec, one.spec) if whole and older is not None else [],
            )
            for one, older in zip_longest(revisions, revisions[1:])
        ],
        replicas=live_job_views(services, caller, list(unique.values())),
        load=load_view(services, service.id),
        canary=_canary_view(services, service),
    )


def _canary_view(services: HeadServices, service: Service) -> CanaryView | None:
    revision = services.store.record(REVISIONS, (service.id, service.revision))
    if service.canary is None or service.canary.revision != service.revision or revision is None:
        return None
    now = services.controller.canary_of(service.id)
    newer = now is not None and now.canary.revision == service.canary.revision
    canary = now.canary if now is not None and newer else service.canary
    terms = revision.terms.rollout
    return CanaryView(
        revision=canary.revision,
        stable=canary.stable,
        share=service.canary.share,
        planned=service.canary.planned,
        step_s=service.canary.step_s,
        completing=service.canary.completing,
        blue_green=terms is not None and terms.blue_green,
        answered=canary.answered,
        errors=canary.errors,
        stable_answered=canary.stable_answered,
        stable_errors=canary.stable_errors,
        against={name: round(one, 3) for name, one in now.strengths.items()} if now is not None and newer else {},
    )


def load_view(services: HeadServices, service_id: ServiceId) -> LoadView | None:
    """Return the load of a service now; None if no gateway reports it."""
    found = services.controller.load_of(service_id)
    if found is None:
        return None
    load = found.load
    return LoadView(
        in_flight=load.in_flight,
        waiting=load.waiting,
        oldest_wait_s=round(load.oldest_wait_s, 2),
        ttft_s=round(found.ttft_s, 3),
        kv=round(load.kv, 3),
        gateways=found.gateways,
        needed=found.needed,
    )


def _service_view(
    services: HeadServices, caller: Caller, service: Service, replicas: LiveReplicas, addresses: Mapping[NodeId, str]
) -> ServiceView:
    revision = services.store.record(REVISIONS, (service.id, service.revision))
    assert isinstance(revision, Revision)  # the current one is never removed
    whole = may_see_all_of(caller, service)
    least = 0 if service.scale == 0 else replicas_min(service, revision)
    by_load = (
        revision.terms.scale is not None and (service.load_replicas or 0) >= least
    )  # else the least number decides
    canary = service.canary
    endpoints = [view for job, attempt in replicas if (view := _endpoint_view(job, attempt, addresses)) is not None]
    return ServiceView(
        name=service.id,
        state=service.state,
        user=service.user,
        project=service.project,
        queue=service.queue,
        created_s=service.created_s,
        revision=service.revision,
        served_revision=service.served_revision,
        rollback_revision=rollback_revision(service),
        replicas=revision.terms.range_text,
        desired=service.desired,
        ready=sum(view.ready for view in endpoints),
        asleep_wanted=min(service.asleep, service.desired) if revision.terms.sleep else 0,
        asleep=sum(attempt is not None and attempt.gave_devices_back for _, attempt in replicas),
        can_sleep=bool(revision.terms.sleep),
        scale={} if revision.terms.scale is None else revision.terms.scale.keys(),
        least=least,
        load_why=service.load_why if by_load else "",
        load_s=service.load_s if by_load else None,
        prefill_for="" if revision.terms.prefill is None else revision.terms.prefill.service,
        protocol="" if revision.terms.prefill is None else revision.terms.prefill.protocol.value,
        port=revision.terms.port,
        ready_check=revision.terms.ready,
        detail=service.detail,
        failure=service.failure if whole else "",
        command=revision.spec.command_line if whole else "",
        gpus=str(revision.spec.role.gpus),
        stopped_by=service.stopped_by,
        stopped_s=service.stopped_s,
        endpoints=endpoints,
        canary=None if canary is None else CanaryShare(revision=canary.revision, share=canary.share),
    )


def _endpoint_view(job: Job, attempt: Attempt | None, addresses: Mapping[NodeId, str]) -> EndpointView | None:
    if attempt is None or job.replica is None:
        return None
    found = endpoint_of(attempt, addresses.get(attempt.allocation.grants[0].node_id, ""))
    if found is None:
        return None
    return EndpointView(
        job_id=job.id,
        revision=job.replica.revision,
        node_id=found.node_id,
        address=found.address,
        port=found.port,
        ready=found.ready,
    )
