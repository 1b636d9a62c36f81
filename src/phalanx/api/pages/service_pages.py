"""The pages of services: each answers what the API answers the same caller, as HTML."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.services import known_service
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.views.services import load_view, service_detail, service_views
from phalanx.core.access.caller import may_access_job
from phalanx.core.ids import ServiceId
from phalanx.core.state.records import SERVICES
from phalanx.core.work.users import Action
from phalanx.web import service_pages
from phalanx.web.html import Html

SERVICES_SHOWN: Final = 200  # on one page

routes = RouteTable()


@routes.get("/services", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_services(request: Request, after: str = "") -> Response:
    """Show services that are not stopped, by name, from the first one after `after`."""
    services, caller, viewer = runtime_of(request).services, caller_of(request), viewer_of(request)

    def read() -> Html:
        alive = (one for one in services.store.records(SERVICES) if not one.stopped_by and one.id > after)
        found = sorted(alive, key=lambda one: one.id)
        shown = service_views(services, caller, found[:SERVICES_SHOWN])
        loads = {one.name: load_view(services, one.name) for one in shown}
        return service_pages.services_page(shown, loads, len(found) - len(shown), viewer)

    return page_response(request, await run_in_thread(read))


@routes.get("/services/{service_id}", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_service_page(request: Request, service_id: ServiceId) -> Response:
    """Show one service."""
    services, caller, viewer = runtime_of(request).services, caller_of(request), viewer_of(request)

    def read() -> Html:
        service = known_service(services.store, service_id)
        may_change = may_access_job(caller, Action.CHANGE_OWN, owner=service.user, project=service.project)
        detail = service_detail(services, caller, service)
        return service_pages.service_page(detail, viewer, may_change=may_change)

    return page_response(request, await run_in_thread(read))
