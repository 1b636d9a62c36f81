"""Services: list, show, submit, change, stop."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import may_see_all_of
from phalanx.api.http.bodies import json_response, read_body, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.routes.submit import submit_request, submitted_spec
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.load_history import load_history_view
from phalanx.api.views.services import service_detail, service_views
from phalanx.core.access.caller import Caller, may_access_job
from phalanx.core.access.membership import is_open
from phalanx.core.errors import BadRequest, NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ServiceId
from phalanx.core.state.events import Request as Command
from phalanx.core.state.events import ScaleService, SleepReplicas, StopService, SubmitService, UpdateService
from phalanx.core.state.records import SERVICES, SIGN_IN
from phalanx.core.work.services.service import Service
from phalanx.core.work.sign_in import PROVIDER
from phalanx.core.work.users import Action
from phalanx.ports.store import Store
from phalanx.wire.api.jobs import JobBody
from phalanx.wire.api.services import (
    LoadHistoryReply,
    ProjectTerms,
    ServiceChange,
    ServiceDetail,
    ServiceList,
    ServiceReply,
)

_CHANGES: Final = ("spec", "revision", "replicas", "asleep", "awake")
routes = RouteTable()


@routes.get("/v1/services", Action.VIEW, reply=ServiceList)
async def list_services(request: Request, stopped: bool = False, after: AfterKey = "") -> Response:
    """List services by name; those that were stopped only with `stopped`."""
    services, caller = runtime_of(request).services, caller_of(request)

    def read() -> ServiceList:
        found = [one for one in services.store.records(SERVICES) if stopped or not one.stopped_by]
        views = service_views(services, caller, found)
        page, further = key_page(views, after, lambda view: view.name, services.limits.answer_bytes)
        return ServiceList(services=page, projects=[] if after else _project_terms(services), next=further)

    return json_response(await run_in_thread(read))


@routes.get("/v1/services/{service_id}", Action.VIEW, reply=ServiceDetail)
async def show_service(request: Request, service_id: ServiceId) -> Response:
    """Show a service with its revisions, replicas and endpoints."""
    services, caller = runtime_of(request).services, caller_of(request)
    service = known_service(services.store, service_id)
    return json_response(await run_in_thread(service_detail, services, caller, service))


@routes.get("/v1/services/{service_id}/load", Action.VIEW, reply=LoadHistoryReply)
async def show_load(
    request: Request, service_id: ServiceId, span_s: Annotated[float, Query(ge=10, le=1e9)] = 3600.0
) -> Response:
    """Show how the load of a service was: the last hour in points of 10 s, or the last day in points of 5 minutes."""
    services = runtime_of(request).services
    known_service(services.store, service_id)
    return json_response(load_history_view(services, service_id, span_s))


@routes.post("/v1/services", Action.SUBMIT, body=JobBody, reply=ServiceReply, status=201)
async def submit_service(request: Request) -> Response:
    """Submit a service: a job file with `type: service`. Repeating it changes nothing; another spec of the same name is refused."""
    runtime = runtime_of(request)
    body = await read_body(request, runtime.services.limits.body_bytes)
    asked = await submit_request(runtime, caller_of(request), body)
    return await _done(
        request, SubmitService(spec=asked.spec, user=asked.user, project=asked.project, queue=asked.queue), 201
    )


@routes.patch("/v1/services/{service_id}", Action.CHANGE_OWN, body=ServiceChange, reply=ServiceReply)
async def change_service(request: Request, service_id: ServiceId) -> Response:
    """Roll out a new revision (`spec`) or an existing one (`revision`), or set how many replicas exist, sleep or are awake."""
    runtime = runtime_of(request)
    _authorize(runtime.services.store, caller_of(request), service_id)
    body = await read_record(request, ServiceChange, runtime.services.limits.body_bytes)
    caller = caller_of(request)
    _authorize(runtime.services.store, caller, service_id)  # again: permissions may have changed while the body arrived
    given = [name for name in _CHANGES if getattr(body, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"a change has exactly one of {', '.join(_CHANGES)}", hint="send one of them")
    if body.replicas is not None:
        number = None if body.replicas == "auto" else body.replicas
        return await _done(request, ScaleService(service_id=service_id, replicas=number, by=caller.user))
    if body.asleep is not None or body.awake is not None:
        asked = SleepReplicas(service_id=service_id, by=caller.user, asleep=body.asleep, awake=body.awake)
        return await _done(request, asked)
    spec = None if body.spec is None else submitted_spec(runtime, body.spec)
    return await _done(request, UpdateService(service_id=service_id, by=caller.user, spec=spec, revision=body.revision))


@routes.post("/v1/services/{service_id}/stop", Action.CHANGE_OWN, body=MediaType.NOTHING, reply=ServiceReply)
async def stop_service(request: Request, service_id: ServiceId) -> Response:
    """Stop a service and its replicas. Once this is answered, none of them starts again. Idempotent."""
    caller = caller_of(request)
    _authorize(runtime_of(request).services.store, caller, service_id)
    return await _done(request, StopService(service_id=service_id, by=caller.user))


async def _done(request: Request, command: Command[Service], status: int = 200) -> Response:
    """Carry out a request, and return the service."""
    runtime, caller = runtime_of(request), caller_of(request)
    service: Any = await runtime.request(command)
    runtime.hub.notify(())
    known = known_service(runtime.services.store, service.id)
    views = await run_in_thread(service_views, runtime.services, caller, [known])
    return json_response(ServiceReply(service=views[0]), status)


def _project_terms(services: HeadServices) -> list[ProjectTerms]:
    settings = services.store.record(SIGN_IN, PROVIDER)
    found = [
        ProjectTerms(
            project=one.id,
            open=is_open(one, settings),
            requests_per_minute=one.request_limits.requests_per_minute,
            tokens_per_minute=one.request_limits.tokens_per_minute,
            weight=one.request_weight,
        )
        for one in services.store.projects()
    ]
    return [one for one in found if one != ProjectTerms(project=one.project)]


def known_service(store: Store, service_id: ServiceId) -> Service:
    """Return the service.

    Raises:
        NotFound: no service has this name.
    """
    service = store.record(SERVICES, service_id)
    if service is None:
        raise NotFound(f"no service {service_id!r}", hint=Hint(HintCode.LIST_SERVICES))
    return service


def _authorize(store: Store, caller: Caller, service_id: ServiceId) -> None:
    """Check that the caller may change the service.

    Raises:
        NotFound: it does not exist.
        NotPermitted: it belongs to another user.
    """
    service = known_service(store, service_id)
    if not may_access_job(caller, Action.CHANGE_OWN, owner=service.user, project=service.project):
        whose = f" of {service.user}" if may_see_all_of(caller, service) else ""
        raise NotPermitted(
            f"service {service.id}{whose} belongs to another user",
            hint="ask its owner, an admin of its project or an operator",
        )
