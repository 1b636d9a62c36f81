"""Declares routes (path, action, bodies), and performs the checks before each handler: authentication, action, size, audit.

    routes = Routes()

    @routes.get("/v1/jobs/{job_id}", Action.SEE, reply=JobDetail)
    async def show_job(request: Request, job_id: JobId) -> Response: ...

Every route must declare an action: otherwise building the app fails (`check_every_route_is_authorized`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Query
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from phalanx.api.auth.audited_call import CURRENT_CALL, AuditedCall, audit_call_of
from phalanx.api.auth.authenticator import require_action, require_csrf
from phalanx.api.auth.session_cookie import CSRF_HEADER, session_secret
from phalanx.api.http.errors import error_body, error_response
from phalanx.api.runtime import ApiRuntime, caller_of, runtime_of
from phalanx.core.access.caller import Caller
from phalanx.core.access.rules import SCOPE_OF_ACTION, AccessScope
from phalanx.core.errors import NotPermitted, PhalanxError, TooLarge
from phalanx.core.units import format_bytes
from phalanx.core.work.users import Action
from phalanx.ports.identity import RETURN_PATH
from phalanx.wire.api.execs import ExecFailed

Handler = Callable[..., Awaitable[Response]]
H = TypeVar("H", bound=Handler)
WebSocketHandler = Callable[[WebSocket], Awaitable[None]]

QUERY_NUMBER_MAX: Final = 1 << 53  # largest number in a query: exact in JSON, and within the store's integers
_READING: Final = frozenset({"GET", "HEAD"})
GOING_AWAY, POLICY_VIOLATION = 1001, 1008  # close codes (RFC 6455, 7.4.1)
LAST_FRAMES_S: Final = 1.0  # for the last frames of a WebSocket to be sent
QUERY_DIGITS_MAX: Final = 15  # of a number sent as text: such numbers are below WHOLE_MAX
NonNegative = Annotated[int, Query(ge=0, le=QUERY_NUMBER_MAX)]
OptionalNonNegative = Annotated[int | None, Query(ge=0, le=QUERY_NUMBER_MAX)]


class MediaType(enum.Enum):
    """Bodies that are not a record."""

    NOTHING = "nothing"
    BYTES = "application/octet-stream"
    TAR = "application/x-tar"
    PACKED = "application/msgpack"
    TEXT = "text/plain"
    EVENTS = "text/event-stream"
    ANY_JSON = "application/json"
    HTML = "text/html"  # for people with a browser: not part of the described API
    ASSET = "*/*"  # a file that a page loads; likewise


Body = type[Any] | MediaType


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDeclaration:
    """The declaration of a route.

    Attributes:
        open_to_all: answered without a token: health, the CA's public certificate, and the sign-in of browsers.
        raw_request: the handler takes only the request; FastAPI's parameter parsing is skipped (hot routes).
        body_limit: name of the field of `Limits` that limits the body.
        scope: whose objects it acts on, if that differs from the default of its action (core.access.rules).
        other_replies: further kinds of replies.
        transient: its changes do not last (a dry run, the load of a moment), so it leaves no line in the audit trail.
        error_page: returns the response to a request that is refused, for pages; the error reply of the API otherwise.
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
    error_page: Callable[[Request, PhalanxError], Response] | None = None


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
        """Whether a call leaves a line in the audit trail. Reports of supervisors are recorded in the history instead."""
        changes = bool((self.methods or set()) - _READING)
        return (
            changes
            and not self.declared.open_to_all
            and not self.declared.transient
            and self.declared.action is not Action.SUPERVISE
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with all checks before it."""
        return self.checked(self.endpoint if self.declared.raw_request else super().get_route_handler())

    def checked(self, handle: Callable[[Request], Any]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Put all checks before a handler of the route."""
        declared, lasting = self.declared, self.audited

        async def gated(request: Request) -> Response:
            runtime = runtime_of(request)
            headers = request.headers
            if not declared.open_to_all:
                _authenticate(request, declared.action, self.path if lasting else None)
            limit: int = getattr(runtime.services.limits, declared.body_limit)
            length = headers.get("content-length")
            if length is not None and (not length.isdecimal() or len(length) > QUERY_DIGITS_MAX or int(length) > limit):
                raise body_too_large(request, limit)
            if lasting:
                return await _audited(request, runtime, caller_of(request), self.path, handle)
            response: Response = await handle(request)
            return response

        page = declared.error_page
        if page is None:
            return gated

        async def gated_page(request: Request) -> Response:
            try:
                return await gated(request)
            except PhalanxError as error:
                return page(request, error)

        return gated_page


class AuthorizedWebSocketRoute(WebSocketRoute):
    """A WebSocket that authorizes its caller before its handler runs. Its opening leaves a line in the audit trail.

    A refusal before `accept` is an HTTP response, as of any route; a later one is an error frame (wire.api.execs.ExecFailed).
    """

    methods: Final = frozenset({"WEBSOCKET"})
    audited: Final = True

    def __init__(self, path: str, endpoint: WebSocketHandler, *, declared: RouteDeclaration) -> None:
        self.declared = declared
        self._handle = endpoint
        super().__init__(path, self._serve, name=getattr(endpoint, "__name__", path))

    @property
    def scope(self) -> AccessScope:
        """Whose objects it acts on."""
        return self.declared.scope or SCOPE_OF_ACTION[self.declared.action]

    async def _serve(self, websocket: WebSocket) -> None:
        runtime, task = runtime_of(websocket), asyncio.current_task()
        assert task is not None, "a server runs each connection in a task"
        runtime.websockets.add(task)
        try:
            caller = _authenticate(websocket, self.declared.action, self.path)
            await _audited(websocket, runtime, caller, self.path, self._handle)
            await websocket.close()
        except PhalanxError as error:
            await _close_with(websocket, error, head_stops=runtime.hub.closing)
        except WebSocketDisconnect:
            pass
        finally:
            runtime.websockets.discard(task)


async def _close_with(websocket: WebSocket, error: PhalanxError, *, head_stops: bool) -> None:
    """Send an error and close. A caller that reads nothing does not get it."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):  # RuntimeError: it is closed already
        async with asyncio.timeout(LAST_FRAMES_S):
            if websocket.application_state is WebSocketState.CONNECTING:
                await websocket.send_denial_response(error_response(error))
                return
            await websocket.send_text(msgspec.json.encode(ExecFailed(error=error_body(error))).decode())
            await websocket.close(GOING_AWAY if head_stops else POLICY_VIOLATION)


def _authenticate(connection: HTTPConnection, action: Action, audited_path: str | None) -> Caller:
    """Return the caller, who may take the action; it is also the connection's state. A refusal is recorded if the path is given.

    Raises:
        NotSignedIn, NotPermitted: the caller may not.
    """
    runtime = runtime_of(connection)
    caller = identify_caller(connection)
    connection.state.caller, connection.state.action = caller, action
    try:
        require_action(caller, action)
    except NotPermitted as error:
        if audited_path is not None:
            runtime.record_refusal(audit_call_of(connection, caller, audited_path), error)
        raise
    return caller


def identify_caller(connection: HTTPConnection) -> Caller:
    """Return the caller that the Authorization header identifies, or without one the session of the browser.

    A session counts for HTTP requests only, and a change must repeat its CSRF value in a header.

    Raises:
        NotSignedIn: neither is valid.
        NotPermitted: a change does not come from a page of this head.
    """
    authenticator = runtime_of(connection).authenticator
    authorization = connection.headers.get("authorization")
    if authorization is not None or connection.scope["type"] != "http":
        return authenticator.authenticate(authorization)
    secret = session_secret(connection)
    if secret is None:
        return authenticator.authenticate(None)
    caller, session = authenticator.authenticate_session(secret)
    if connection.scope["method"] not in _READING:
        require_csrf(session, connection.headers.get(CSRF_HEADER, ""))
    connection.state.browser_session = session
    return caller


C = TypeVar("C", bound=HTTPConnection)
R = TypeVar("R")


async def _audited(
    connection: C, runtime: ApiRuntime, caller: Caller, path: str, handle: Callable[[C], Awaitable[R]]
) -> R:
    """Serve a changing call. Its audit line is durable before the answer is sent: recorded with the change, or else afterwards."""
    serving = AuditedCall(call=audit_call_of(connection, caller, path))
    token = CURRENT_CALL.set(serving)
    try:
        response = await handle(connection)
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

    declared: list[AuthorizedRoute | AuthorizedWebSocketRoute] = field(default_factory=list)

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
        """Declare a route that removes; it answers 204 unless it declares a reply."""
        return self.add("DELETE", path, RouteDeclaration(action=action, status=200 if "reply" in more else 204, **more))

    def websocket(self, path: str, action: Action) -> Callable[[WebSocketHandler], WebSocketHandler]:
        """Declare a WebSocket."""

        def make(handler: WebSocketHandler) -> WebSocketHandler:
            self.declared.append(AuthorizedWebSocketRoute(path, handler, declared=RouteDeclaration(action=action)))
            return handler

        return make


ASSET_PATH: Final = "/web/{version}/{name:path}"
OPEN_ROUTES: Final = frozenset(
    {
        *("/v1/health", "/v1/ca", "/", "/sign-in", "/sign-out", ASSET_PATH),
        *("/sign-in/provider", RETURN_PATH, "/sign-in/finish"),
        *("/login/{port}/{challenge}/{state}", "/v1/login/device", "/v1/login/device/token", "/v1/login/token"),
        *("/device", "/device/{code}"),
    }
)


def check_every_route_is_authorized(app: FastAPI) -> None:
    """Check that each route of the app declares an action, and that only health, the public certificate and the sign-in are open.

    Raises:
        TypeError: a route violates this; the app must not be served.
    """
    for route in app.router.routes:
        if not isinstance(route, AuthorizedRoute | AuthorizedWebSocketRoute) or not isinstance(
            route.declared.action, Action
        ):
            raise TypeError(f"route {_path(route)} declares no action: declare it with api.routes.Routes")
        if route.declared.open_to_all and route.path not in OPEN_ROUTES:
            raise TypeError(f"route {route.path} is open to all; only {', '.join(OPEN_ROUTES)} may be")


def _path(route: BaseRoute) -> str:
    return str(getattr(route, "path", route))
