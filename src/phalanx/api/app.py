"""Builds the API application. The composition root calls `build_app` with the head's services and serves the result."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI

from phalanx.api import (
    access,
    audit,
    blobs,
    execs,
    files,
    head_routes,
    heads,
    jobs,
    join,
    kept,
    kept_outputs,
    logs,
    metrics,
    node_routes,
    nodes,
    profile,
    queues,
    reservations,
    rules,
    steps,
    story,
    submit,
    why,
)
from phalanx.api.errors import add_error_handlers
from phalanx.api.openapi import describe
from phalanx.api.parts import HeadParts
from phalanx.api.rim import Rim
from phalanx.api.routes import check_every_route_is_gated
from phalanx.api.runtime import Runtime, runtime_in
from phalanx.api.standing import LeadersWord

__all__ = ["build_app", "runtime_in"]

# In the order in which routes are matched; the most used come first.
_RESOURCES = (
    submit,
    node_routes,
    kept,
    kept_outputs,
    why,
    jobs,
    logs,
    steps,
    story,
    nodes,
    reservations,
    profile,
    rules,
    head_routes,
    heads,
    join,
    files,
    execs,
    blobs,
    access,
    audit,
    queues,
    metrics,
)


def build_app(head: HeadParts) -> FastAPI:
    """Build the API over a head's services.

    The app's `state.runtime` holds its runtime state; `runtime.close()` ends streams and polls, so that the server can stop at once.

    Raises:
        TypeError: a route declares no action.
    """
    app = FastAPI(
        title="Phalanx", version=head.version, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.runtime = Runtime(head)
    for resource in _RESOURCES:
        app.router.routes.extend(resource.routes.declared)
    app.router.on_startup.append(app.state.runtime.begin)
    add_error_handlers(app)
    app.add_middleware(Rim, hosts_allowed=head.hosts_allowed)
    if head.among is not None:
        app.add_middleware(LeadersWord, among=head.among)  # outermost, so that it guards every response
    app.openapi = partial(describe, app, head.version)  # type: ignore[method-assign]  # replaces FastAPI's own method
    check_every_route_is_gated(app)
    return app
