"""Builds the API application. The composition root calls `build_app` with the head's services and serves the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp

from phalanx.api.http.direct_routes import HeadApi
from phalanx.api.http.errors import add_error_handlers
from phalanx.api.http.follower import LeaderOnlyMiddleware
from phalanx.api.http.openapi import openapi_document
from phalanx.api.http.routing import check_every_route_is_authorized
from phalanx.api.http.security import SecurityMiddleware
from phalanx.api.nodes import (
    checkpoint_routes,
    data_peers,
    join,
    output_routes,
    supervisor_routes,
)
from phalanx.api.pages import audit as audit_pages
from phalanx.api.pages import device as device_pages
from phalanx.api.pages import login as login_pages
from phalanx.api.pages import pages, planning, programs, provider_sign_in, service_pages, settings, sign_in, use
from phalanx.api.programs.program_app import ProgramApp, ProgramMiddleware
from phalanx.api.routes import (
    blobs,
    channels,
    events,
    exec_routes,
    files,
    gateways,
    head,
    heads,
    history,
    job_keys,
    jobs,
    licences,
    logs,
    metrics,
    node_tests,
    nodes,
    plan,
    pools,
    profile,
    queues,
    reservations,
    retention,
    rules,
    services,
    steps,
    submit,
    what_if,
    why,
)
from phalanx.api.routes.access import audit, login, people, secrets, sign_in_settings
from phalanx.api.routes.money import cost, energy, prices, usage, waste
from phalanx.api.runtime import ApiRuntime, runtime_of_app
from phalanx.api.services import HeadServices

__all__ = ["build_app", "runtime_of_app"]

# In the order in which routes are matched; the most used come first.
_RESOURCES = (
    submit,
    supervisor_routes,
    checkpoint_routes,
    output_routes,
    data_peers,
    why,
    job_keys,
    jobs,
    services,
    gateways,
    logs,
    steps,
    history,
    events,
    node_tests,
    nodes,
    reservations,
    retention,
    pools,
    licences,
    secrets,
    profile,
    plan,
    what_if,
    rules,
    head,
    heads,
    join,
    files,
    exec_routes,
    blobs,
    channels,
    people,
    audit,
    usage,
    waste,
    energy,
    cost,
    prices,
    queues,
    metrics,
    pages,
    audit_pages,
    planning,
    service_pages,
    settings,
    use,
    programs,
    provider_sign_in,
    sign_in,
    sign_in_settings,
    login,
    login_pages,
    device_pages,
)


def build_app(head: HeadServices) -> FastAPI:
    """Build the API over a head's services.

    The app's `state.runtime` holds its runtime state; `runtime.close()` ends streams and polls, so that the server can stop at once.

    Raises:
        TypeError: a route declares no action.
    """
    app = HeadApi(
        title="Phalanx", version=head.version, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.runtime = ApiRuntime(head)
    for resource in _RESOURCES:
        app.router.routes.extend(resource.routes.declared)
    app.router.on_startup.append(app.state.runtime.start)
    add_error_handlers(app)
    layers: list[Callable[[ASGIApp], ASGIApp]] = [
        partial(SecurityMiddleware, hosts_allowed=head.hosts_allowed)
    ]  # innermost first
    if head.programs is not None:
        programs_app = ProgramApp(app.state.runtime, head.programs, head.hosts_allowed)
        layers.append(partial(ProgramMiddleware, programs=programs_app))
    if head.leader_status is not None:  # outermost, so that it guards every response
        layers.append(partial(LeaderOnlyMiddleware, status=head.leader_status))
    for layer in layers:
        app.add_middleware(layer)
    app.openapi = partial(openapi_document, app, head.version)  # type: ignore[method-assign]  # replaces FastAPI's own method
    check_every_route_is_authorized(app)
    app.serve_directly(layers)
    return app
