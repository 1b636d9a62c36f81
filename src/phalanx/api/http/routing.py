"""Declares routes (path, action, bodies), and performs the checks before each handler: authentication, action, size, audit.

    routes = Routes()

    @routes.get("/v1/jobs/{job_id}", Action.SEE, reply=JobDetail)
    async def show_job(request: Request, job_id: JobId) -> Response: ...

Every route must declare an action: otherwise building the app fails (`check_every_route_is_authorized`).
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

from fastapi import FastAPI, Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from phalanx.api.auth.audited_call import CURRENT_CALL, AuditedCall, audit_call_of
from phalanx.api.auth.authenticator import require_action
from phalanx.api.runtime import ApiRuntime, caller_of, runtime_of
from phalanx.core.access.caller import Caller
from phalanx.core.access.rules import SCOPE_OF_ACTION, AccessScope
from phalanx.core.errors import NotPermitted, TooLarge
from phalanx.core.units import format_bytes
from phalanx.core.work.users import Action

Handler = Callable[..., Awaitable[Response]]
H = TypeVar("H", bound=Handler)

QUERY_NUMBER_MAX: Final = 1 << 53  # largest number in a query: exact in JSON, and within the store's integers
_READING: Final = frozenset({"GET", "HEAD"})
QUERY_DIGITS_MAX: Final = 15  # of a number sent as text: such numbers are below WHOLE_MAX
NonNegative = Annotated[int, Query(ge=0, le=QUERY_NUMBER_MAX)]
OptionalNonNegative = Annotated[int | None, Query(ge=0, le=QUERY_NUMBER_MAX)]


class MediaType(enum.Enum):
    """Bodies that are not a record."""

    NOTHING = "nothing"
    BYTES = "application/octet-stream"
    TAR = "application/x-tar"
    TEXT = "text/plain"
    EVENTS = "text/event-stream"
    ANY_JSON = "application/json"


Body = type[Any] | MediaType


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDeclaration:
    """The declaration of a route.

    Attributes:
        open_to_all: answered without a token: health, and the CA's public certificate.
        raw_request: the handler takes only the request; FastAPI's parameter parsing is skipped (hot routes).
        body_limit: name of the field of `Limits` that limits the body.
        scope: whose objects it acts on, if that differs from the default of its action (core.access.rules).
        other_replies: further kinds of replies.
        transient: its changes do not last (a dry run, keystrokes), so it leaves no line in the audit trail.
    """

    action: Action
    body: Body = MediaType.NOTHING
    reply: Body = MediaType.NOTHING
    status: int = 200
    open_to_all: bool = False
    raw_request: bool = False
    body_limit: str = "body_bytes"
    other_replies: tuple[Body, ...] = ()
    transient: bool = False
    scope: AccessScope | None = None


class AuthorizedRoute(APIRoute):
    """A route that authorizes its caller before its handler runs."""

    def __init__(self, path: str, endpoint: Handler, *, declared: RouteDeclaration, **options: Any) -> None:
        self.declared = declared
        super().__init__(path, endpoint, response_model=None, status_code=declared.status, **options)

    @property
    def scope(self) -> AccessScope:
        """Whose objects it acts on."""
        return self.declared.scope or SCOPE_OF_ACTION[self.declared.action]

    @property
    def audited(self) -> bool:
        """Whether a call leaves a line in the audit trail. Reports of supervisors are recorded in the story instead."""
        changes = bool((self.methods or set()) - _READING)
        return changes and not self.declared.transient and self.declared.action is not Action.SUPERVISE

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with all checks before it."""
        declared, lasting = self.declared, self.audited
        handle: Callable[[Request], Any] = self.endpoint if declared.raw_request else super().get_route_handler()

        async def gated(request: Request) -> Response:
            runtime = runtime_of(request)
            headers = request.headers
            if not declared.open_to_all:
                caller = request.state.caller = runtime.authenticator.authenticate(headers.get("authorization"))
                request.state.action = declared.action
                try:
                    require_action(caller, declared.action)
                except NotPermitted as error:
                    if lasting:
                        runtime.record_refusal(audit_call_of(request, caller, self.path), error)
                    raise
            limit: int = getattr(runtime.services.limits, declared.body_limit)
            length = headers.get("content-length")
            if length is not None and (not length.isdecimal() or len(length) > QUERY_DIGITS_MAX or int(length) > limit):
                raise body_too_large(request, limit)
            if lasting:
                return await _audited(request, runtime, caller_of(request), self.path, handle)
            response: Response = await handle(request)
            return response

        return gated


async def _audited(
    request: Request, runtime: ApiRuntime, caller: Caller, path: str, handle: Callable[[Request], Any]
) -> Response:
    """Serve a changing call. Its audit line is durable before the answer is sent: recorded with the change, or else afterwards."""
    serving = AuditedCall(call=audit_call_of(request, caller, path))
    token = CURRENT_CALL.set(serving)
    try:
        response: Response = await handle(request)
        if not serving.recorded:
            await runtime.record_call()
    except NotPermitted as error:
        if not serving.recorded:
            runtime.record_refusal(serving.call, error)
        raise
    finally:
        CURRENT_CALL.reset(token)
    return response


def body_too_large(request: Request, limit: int) -> TooLarge:
    """Return the error for a body over its limit."""
    return TooLarge(
        f"{request.method} {request.url.path}: the body is over {format_bytes(limit)}", hint="send less at once"
    )


@dataclass(slots=True)
class RouteTable:
    """The routes of one resource, in matching order."""

    declared: list[AuthorizedRoute] = field(default_factory=list)

    def add(self, method: str, path: str, declared: RouteDeclaration) -> Callable[[H], H]:
        """Return a decorator that declares a handler as a route."""

        def make(handler: H) -> H:
            summary = (handler.__doc__ or "").strip().split("\n")[0]
            route = AuthorizedRoute(
                path,
                handler,
                declared=declared,
                methods=[method],
                name=f"{handler.__name__}",
                summary=summary,
                operation_id=handler.__name__,
                tags=[path.split("/")[2] if path.count("/") > 1 else "head"],
            )
            self.declared.append(route)
            return handler

        return make

    def get(self, path: str, action: Action, *, reply: Body, **more: Any) -> Callable[[H], H]:
        """Declare a route that reads."""
        return self.add("GET", path, RouteDeclaration(action=action, reply=reply, **more))

    def post(self, path: str, action: Action, *, body: Body, reply: Body, **more: Any) -> Callable[[H], H]:
        """Declare a route that acts."""
        return self.add("POST", path, RouteDeclaration(action=action, body=body, reply=reply, **more))

    def put(self, path: str, action: Action, *, body: Body, reply: Body, **more: Any) -> Callable[[H], H]:
        """Declare a route that creates or replaces."""
        return self.add("PUT", path, RouteDeclaration(action=action, body=body, reply=reply, **more))

    def patch(self, path: str, action: Action, *, body: Body, reply: Body, **more: Any) -> Callable[[H], H]:
        """Declare a route that changes."""
        return self.add("PATCH", path, RouteDeclaration(action=action, body=body, reply=reply, **more))

    def delete(self, path: str, action: Action, **more: Any) -> Callable[[H], H]:
        """Declare a route that removes."""
        return self.add("DELETE", path, RouteDeclaration(action=action, status=204, **more))


OPEN_ROUTES: Final = frozenset({"/v1/health", "/v1/ca"})


def check_every_route_is_authorized(app: FastAPI) -> None:
    """Check that each route of the app declares an action, and that only health and the public certificate are open.

    Raises:
        TypeError: a route violates this; the app must not be served.
    """
    for route in app.router.routes:
        if not isinstance(route, AuthorizedRoute) or not isinstance(route.declared.action, Action):
            raise TypeError(f"route {_path(route)} declares no action: declare it with api.routes.Routes")
        if route.declared.open_to_all and route.path not in OPEN_ROUTES:
            raise TypeError(f"route {route.path} is open to all; only {', '.join(OPEN_ROUTES)} may be")


def _path(route: BaseRoute) -> str:
    return str(getattr(route, "path", route))
