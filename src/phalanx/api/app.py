"""Puts the API together. The composition root calls `build_app` with its parts and serves what comes back."""

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
    if head.among is not None:
        app.add_middleware(LeadersWord, among=head.among)  # outermost: what it lets out is an answer of who leads
    app.openapi = partial(describe, app, head.version)  # type: ignore[method-assign]  # FastAPI's own way to describe otherwise
    check_every_route_is_gated(app)
    return app
