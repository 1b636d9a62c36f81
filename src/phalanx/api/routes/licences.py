"""Licences: list them with their holders, set the number of seats, remove one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.queues import impossible_views
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.state.events import ImpossibleJob, PutLicence, RemoveLicence
from phalanx.core.state.records import LICENCES
from phalanx.core.work.extras import Licence, check_extra_name
from phalanx.core.work.users import Action
from phalanx.wire.api.licences import LicenceBody, LicenceChanged, LicenceHolderView, LicenceList, LicenceView

routes = RouteTable()


@routes.get("/v1/licences", Action.VIEW, reply=LicenceList)
async def list_licences(request: Request, after: AfterKey = "") -> Response:
    """List all licences with the jobs that hold their seats."""
    services = runtime_of(request).services
    views = await run_in_thread(_views, services)
    page, further = key_page(views, after, lambda view: view.name, services.limits.answer_bytes)
    return json_response(LicenceList(licences=page, next=further))


@routes.put("/v1/licences/{name}", Action.OPERATE, body=LicenceBody, reply=LicenceChanged)
async def put_licence(request: Request, name: str) -> Response:
    """Add a licence, or change its number of seats. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, LicenceBody, runtime.services.limits.body_bytes)
    licence = Licence(id=check_extra_name(name, key="licence"), total=body.seats)
    return _changed(await runtime.request(PutLicence(licence=licence, by=caller_of(request).user)))


@routes.delete("/v1/licences/{name}", Action.OPERATE, reply=LicenceChanged)
async def remove_licence(request: Request, name: str) -> Response:
    """Remove a licence that no job holds."""
    return _changed(await runtime_of(request).request(RemoveLicence(name=name, by=caller_of(request).user)))


def _changed(found: tuple[ImpossibleJob, ...]) -> Response:
    jobs, more = impossible_views(found)
    return json_response(LicenceChanged(impossible=jobs, impossible_more=more))


def _views(services: HeadServices) -> list[LicenceView]:
    holders: dict[str, list[LicenceHolderView]] = {}
    waiting: dict[str, int] = {}
    for job, attempt in services.controller.live_attempts():
        for name, seats in attempt.allocation.licences:
            holders.setdefault(name, []).append(LicenceHolderView(job_id=job.id, user=job.user, seats=seats))
    for job in services.controller.pending_jobs():
        for name, _ in job.spec.role.licences:
            waiting[name] = waiting.get(name, 0) + 1
    return [
        LicenceView(
            name=licence.id,
            seats=licence.total,
            used=sum(one.seats for one in holders.get(licence.id, [])),
            holders=sorted(holders.get(licence.id, []), key=lambda one: (-one.seats, one.job_id)),
            waiting=waiting.get(licence.id, 0),
        )
        for licence in services.store.records(LICENCES)
    ]
