"""Requests about services: submit, update, scale, stop. Each changes the record; `ServiceReconciler` then starts and stops replicas."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.requests.submits import check_submission, resolved_spec
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import QueueId, ServiceId, UserId
from phalanx.core.lifecycle.service import desired_replicas
from phalanx.core.state.events import (
    ScaleService,
    SleepReplicas,
    StopService,
    SubmitJob,
    SubmitService,
    UpdateService,
)
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import REVISIONS, SERVICES
from phalanx.core.work.services.canary import Canary
from phalanx.core.work.services.service import NO_REVISION, Revision, Service, ServiceState, revision_numbers
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.users import Action

SERVICES_MAX: Final = 10_000  # that are not stopped; each is examined when one of its replicas changes
handlers: Final = RequestHandlers()


def _describe(request: SubmitService, answer: object) -> str:
    number = f" revision {answer.revision}" if isinstance(answer, Service) else ""
    return f"service {request.spec.name}{number} project {request.project} queue {request.queue}"


@handlers.add(SubmitService, Action.SUBMIT, audit=_describe)
def submit(context: StepContext, request: SubmitService) -> Service:
    """Create a service with its first revision. A stopped service of the name starts again with another revision.

    Raises:
        Conflict: a service of this name runs already with another spec or owner.
        PhalanxError: refused as a job would be; nothing was changed.
    """
    services, service_id = context.world.table(SERVICES), ServiceId(request.spec.name)
    known = services.get(service_id)
    if known is not None and not known.stopped_by:
        if _is_current(context, known, request.spec) and (known.user, known.project, known.queue) == (
            request.user,
            request.project,
            request.queue,
        ):
            return known
        raise Conflict(f"service {service_id} exists already", hint=Hint(HintCode.UPDATE_SERVICE, service=service_id))
    if sum(not one.stopped_by for one in services.values()) >= SERVICES_MAX:
        raise Conflict(f"there are already {SERVICES_MAX} services, the maximum", hint=Hint(HintCode.LIST_SERVICES))
    spec = _checked(context, request.spec, request)
    if known is not None:
        _remove_revisions(context, service_id, keep=())  # another user's may hold secrets
    number = (NO_REVISION if known is None else known.last_revision) + 1
    _put_revision(context, service_id, number, spec, request.user)
    service = Service(
        id=service_id,
        user=request.user,
        project=request.project,
        queue=request.queue,
        created_s=context.now.wall_s,
        revision=number,
        last_revision=number,
    )
    context.change.put(service)
    add_service_history(context, service, f"submitted by {request.user} for {request.project}", by=request.user)
    return service


@handlers.add(
    UpdateService,
    Action.CHANGE_OWN,
    audit=lambda request, answer: (
        f"service {request.service_id} revision {answer.revision if isinstance(answer, Service) else request.revision}"
    ),
)
def update(context: StepContext, request: UpdateService) -> Service:
    """Begin a rollout. The spec that the service has already changes nothing.

    Raises:
        NotFound: no such service or revision.
        Conflict: the service is stopped.
        BadRequest: the spec has another name or queue.
        PhalanxError: refused as a job would be; nothing was changed.
    """
    service = _live(context, request.service_id)
    number = service.last_revision
    if request.spec is not None:
        if _is_current(
            context, service, request.spec
        ):  # after a failed rollout too: what serves is what the file asks for
            return _without_failure(context, service)
        if request.spec.name != service.id:
            raise BadRequest(
                f"the file names service {request.spec.name}, not {service.id}", hint=f"write name: {service.id}"
            )
        queue = QueueId(request.spec.queue) if request.spec.queue else service.queue
        asked = SubmitService(spec=request.spec, user=service.user, project=service.project, queue=queue)
        if queue != service.queue:
            raise BadRequest(
                f"service {service.id} is in queue {service.queue}; a revision cannot move it to {queue}",
                hint="stop the service and submit it again",
            )
        spec = _checked(context, request.spec, asked)
        number += 1
        _put_revision(context, service.id, number, spec, request.by)
    elif request.revision is not None:
        number = request.revision
        if number not in _numbers(context, service):
            kept = ", ".join(map(str, _numbers(context, service)))
            raise NotFound(f"service {service.id} has no revision {number}", hint=f"it has: {kept}")
        if number == service.revision:
            return _without_failure(context, service)
    after = replace(
        service,
        revision=number,
        last_revision=max(number, service.last_revision),
        failure="",
        rollout_s=context.now.wall_s,
        canary=_canary(context, service, number, fresh=request.spec is not None),
    )
    _remove_revisions(context, service.id, keep=revision_numbers(after))
    context.change.put(after)
    add_service_history(context, after, f"rollout of revision {number} by {request.by}", by=request.by)
    return after


@handlers.add(
    ScaleService,
    Action.CHANGE_OWN,
    audit=lambda request, _: (
        f"service {request.service_id} replicas {'auto' if request.replicas is None else request.replicas}"
    ),
)
def scale(context: StepContext, request: ScaleService) -> Service:
    """Set the number of replicas; of a service whose number follows its load, the least number, or again the lower bound of its range.

    Raises:
        NotFound: no such service.
        Conflict: the service is stopped.
        BadRequest: the number is outside the range of the service, or is to follow a load that has no targets.
    """
    service = _live(context, request.service_id)
    terms = context.world.table(REVISIONS)[service.id, service.revision].terms
    if request.replicas is None and terms.scale is None:
        raise BadRequest(
            f"service {service.id} has no scale: its number of replicas does not follow load",
            hint="add scale: {queue: 2s} to its file, and update the service with it",
        )
    if request.replicas and terms.clamp(request.replicas) != request.replicas:
        raise BadRequest(
            f"service {service.id} has replicas: {terms.range_text}; {request.replicas} is outside",
            hint=Hint(HintCode.WIDEN_SERVICE, service=service.id),
        )
    if service.scale == request.replicas:
        return service
    revision = context.world.table(REVISIONS)[service.id, service.revision]
    after = replace(service, scale=request.replicas)
    if request.replicas == 0:
        after = replace(after, load_replicas=None, load_why="", load_s=None)
    fewer = max(0, desired_replicas(service, revision) - desired_replicas(after, revision))
    after = replace(after, asleep=max(0, service.asleep - fewer))  # sleeping replicas end first
    context.change.put(after)
    number = "as load asks" if request.replicas is None else f"to {request.replicas} replicas"
    if request.replicas and terms.scale is not None:
        number = f"to at least {request.replicas} replicas"
    add_service_history(context, after, f"scaled {number} by {request.by}", by=request.by)
    return after


@handlers.add(
    SleepReplicas,
    Action.CHANGE_OWN,
    audit=lambda request, answer: (
        f"service {request.service_id} asleep {answer.asleep if isinstance(answer, Service) else request.asleep}"
    ),
)
def sleep(context: StepContext, request: SleepReplicas) -> Service:
    """Set the number of sleeping replicas.

    Raises:
        NotFound: no such service.
        Conflict: the service is stopped.
        BadRequest: its replicas cannot sleep.
    """
    service = _live(context, request.service_id)
    revision = context.world.table(REVISIONS)[service.id, service.revision]
    desired = desired_replicas(service, revision)
    asleep = request.asleep if request.asleep is not None else desired - (request.awake or 0)
    asleep = max(0, min(asleep, desired))
    if asleep and not revision.terms.sleep:
        raise BadRequest(
            f"service {service.id} has no sleep hook: its file has no sleep and wake",
            hint="add sleep: /PATH and wake: /PATH to its file, and update the service with it",
        )
    if asleep == service.asleep:
        return service
    after = replace(service, asleep=asleep)
    context.change.put(after)
    text = f"{asleep} of {desired} replicas shall sleep, by {request.by}"
    add_service_history(context, after, text, by=request.by)
    return after


@handlers.add(StopService, Action.CHANGE_OWN, audit=lambda request, _: f"service {request.service_id}")
def stop(context: StepContext, request: StopService) -> Service:
    """Stop a service for good.

    Raises:
        NotFound: no such service.
    """
    return _stop(context, _known(context, request.service_id), request.by)


def stop_all(context: StepContext, by: UserId) -> None:
    """Stop every service."""
    for service in list(context.world.table(SERVICES).values()):
        _stop(context, service, by)


def add_service_history(context: StepContext, service: Service, text: str, *, by: str = "") -> None:
    """Add a history line of a service. Every user may read it: no command, path or output."""
    context.change.add_history(
        HistoryLine(
            seq=0,
            at_s=context.now.wall_s,
            kind="service",
            text=f"service {service.id}: {text}",
            by=by,
            facts={"service": service.id, "state": service.state.value, "revision": service.revision},
        )
    )


def _stop(context: StepContext, service: Service, by: UserId) -> Service:
    if service.stopped_by:
        return service
    after = replace(
        service,
        stopped_by=by,
        stopped_s=context.now.wall_s,
        state=ServiceState.STOPPED,
        desired=0,
        rollout_s=None,
        canary=None,
    )
    context.change.put(after)
    add_service_history(context, after, f"stopped by {by}", by=by)
    return after


def _without_failure(context: StepContext, service: Service) -> Service:
    """The service without the failure of a rollout that is not asked for any more. No replica is replaced."""
    if not service.failure:
        return service
    after = replace(service, failure="")
    context.change.put(after)
    return after


def _known(context: StepContext, service_id: ServiceId) -> Service:
    service = context.world.table(SERVICES).get(service_id)
    if service is None:
        raise NotFound(f"no service {service_id!r}", hint=Hint(HintCode.LIST_SERVICES))
    return service


def _live(context: StepContext, service_id: ServiceId) -> Service:
    service = _known(context, service_id)
    if service.stopped_by:
        raise Conflict(f"service {service.id} was stopped by {service.stopped_by}", hint=Hint(HintCode.SUBMIT_SERVICE))
    return service


def _canary(context: StepContext, service: Service, number: int, *, fresh: bool) -> Canary | None:
    """The canary of a rollout. Only new revisions have one: the way back to one that served is not tried in steps.

    One that is given up stays until its replicas have ended, without any session.
    """
    before, stable = service.canary, service.served_revision
    terms = context.world.table(REVISIONS)[service.id, number].terms.rollout
    if fresh and terms is not None and stable not in (NO_REVISION, number):
        return Canary(revision=number, stable=stable, planned=terms.first)
    return None if before is None else replace(before, share=0, planned=0, completing=False)


def _checked(context: StepContext, spec: JobSpec, request: SubmitService) -> JobSpec:
    """The spec as it shall be carried out.

    Raises:
        PhalanxError: it is not of a service, or is refused as a job would be.
    """
    if spec.service is None:
        raise BadRequest("the spec is not of a service", hint="write type: service")
    return check_submission(
        context, SubmitJob(spec=spec, user=request.user, project=request.project, queue=request.queue)
    ).spec


def _is_current(context: StepContext, service: Service, spec: JobSpec) -> bool:
    """Whether the service has this spec; stored is what was resolved when it was submitted."""
    current = context.world.table(REVISIONS)[service.id, service.revision].spec
    return current in (spec, resolved_spec(context, spec))


def _numbers(context: StepContext, service: Service) -> list[int]:
    """Its stored revisions, newest first."""
    table = context.world.table(REVISIONS)
    return [number for number in revision_numbers(service) if (service.id, number) in table]


def _put_revision(context: StepContext, service_id: ServiceId, number: int, spec: JobSpec, by: UserId) -> None:
    context.change.put(Revision(service=service_id, number=number, spec=spec, by=by, created_s=context.now.wall_s))


def _remove_revisions(context: StepContext, service_id: ServiceId, *, keep: Container[int]) -> None:
    """Remove the other revisions of a service. Costs one pass over all revisions."""
    table = context.world.table(REVISIONS)
    for number in sorted(number for name, number in table if name == service_id and number not in keep):
        context.change.remove(REVISIONS, (service_id, number))
