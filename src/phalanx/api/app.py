"""Puts the API together. The composition root calls `build_app` with its parts and serves what comes back."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI

from phalanx.api import (
    access,
    blobs,
    execs,
    files,
    head_routes,
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

__all__ = ["build_app", "runtime_in"]

# The hot ones first: routes are tried in this order.
_NOUNS = (
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
    head_routes,
    join,
    files,
    execs,
    blobs,
    access,
    queues,
    metrics,
)


def build_app(head: HeadParts) -> FastAPI:
    """The API over a head's parts.

    Its `state.runtime` is the running API's own; `runtime.close()` ends streams and polls, so that the server can stop at once.

    Raises:
        TypeError: a route declares no action.
    """
    app = FastAPI(
        title="Phalanx", version=head.version, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.runtime = Runtime(head)
    for noun in _NOUNS:
        app.router.routes.extend(noun.routes.declared)
    app.router.on_startup.append(app.state.runtime.begin)
    add_error_handlers(app)
    app.add_middleware(Rim, hosts_allowed=head.hosts_allowed)
    app.openapi = partial(describe, app, head.version)  # type: ignore[method-assign]  # FastAPI's own way to describe otherwise
    check_every_route_is_gated(app)
    return app
