"""Serves the routes without parts of their path that vary, if the query is plain, past FastAPI's layers: the same checks and handlers.

Supervisors and clients send nearly all of their requests to these routes; FastAPI's and Starlette's layers and its parsing of parameters took
a quarter of the event loop's processor time of a short job. FastAPI serves what is not found here, with its own messages: other paths, an
unknown or repeated name in the query, a value that is not written plainly or out of its bounds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, get_type_hints

from fastapi import FastAPI
from fastapi.params import Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.http.errors import error_response
from phalanx.api.http.routing import AuthorizedRoute
from phalanx.core.errors import PhalanxError

Handler = Callable[[Request], Awaitable[Response]]
_FOUND: Final = "phalanx.direct"  # key of a scope
_ARGUMENTS: Final = "phalanx.arguments"
# How a value is written plainly, so that pydantic reads it as the same one; percent signs and plus signs are not plain.
_PLAIN: Final[Mapping[type, tuple[re.Pattern[str], Callable[[str], Any]]]] = {
    int: (re.compile(r"[0-9]{1,15}"), int),
    float: (re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?"), float),
    str: (re.compile(r"[A-Za-z0-9_.~-]+"), str),
    bool: (re.compile(r"true|false"), "true".__eq__),
}


class DirectRoutes:
    """The table of these routes, and the app that serves what `find` has found. It belongs inside the same middleware as FastAPI's app."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._table: dict[tuple[str, str], tuple[Handler, dict[str, QueryParameter]]] = {}
        for route in routes:
            if isinstance(route, AuthorizedRoute) and "{" not in route.path:
                parameters = query_parameters(route.endpoint)
                if parameters is not None:
                    handler = route.checked(partial(_call, route.endpoint) if parameters else route.endpoint)
                    for method in route.methods or ():
                        self._table.setdefault((method, route.path), (handler, parameters))

    def find(self, scope: Scope) -> bool:
        """Whether the request is served here; its scope then says how."""
        found = self._table.get((scope["method"], scope["path"]))
        if found is None:
            return False
        handler, parameters = found
        query = scope["query_string"]
        if query and parameters:
            arguments = plain_arguments(query, parameters)
            if arguments is None:
                return False
            scope[_ARGUMENTS] = arguments
        scope[_FOUND] = handler
        scope["path_params"] = {}
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await scope[_FOUND](Request(scope, receive, send))
            await response(scope, receive, send_noted)
        except PhalanxError as error:  # a response may also refuse, before its first message
            if started:
                raise
            await error_response(error)(scope, receive, send)


class HeadApi(FastAPI):
    """FastAPI's app, and beside it the direct routes."""

    _direct: DirectRoutes
    _secured: ASGIApp

    def serve_directly(self, layers: Iterable[Callable[[ASGIApp], ASGIApp]]) -> None:
        """Begin to serve routes directly. `layers`: the middleware, the innermost first."""
        self._direct = DirectRoutes(self.router.routes)
        self._secured = self._direct
        for layer in layers:
            self._secured = layer(self._secured)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self._direct.find(scope):
            scope["app"] = self
            await self._secured(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class QueryParameter:
    """One parameter of a query: its plain form, and its bounds."""

    def __init__(self, kind: type, bounds: Iterable[Any]) -> None:
        self._form, self._value = _PLAIN[kind]
        self._least = max((one.ge for one in bounds if hasattr(one, "ge")), default=None)
        self._most = min((one.le for one in bounds if hasattr(one, "le")), default=None)

    def read(self, text: str) -> Any:
        """Return the value; None if the text is not plain, or the value out of bounds."""
        if self._form.fullmatch(text) is None:
            return None
        value = self._value(text)
        if (self._least is not None and value < self._least) or (self._most is not None and value > self._most):
            return None
        return value


def query_parameters(endpoint: Callable[..., Any]) -> dict[str, QueryParameter] | None:
    """Return the parameters of a handler besides the request, all of them optional; None if FastAPI must find their values."""
    parameters = list(inspect.signature(endpoint).parameters.values())
    if not inspect.iscoroutinefunction(endpoint) or not parameters or parameters[0].name != "request":
        return None
    hints = get_type_hints(endpoint, include_extras=True)
    found: dict[str, QueryParameter] = {}
    for parameter in parameters[1:]:
        kind, bounds = _kind_of(hints[parameter.name])
        if kind not in _PLAIN or bounds is None or not isinstance(parameter.default, kind | int):
            return None
        found[parameter.name] = QueryParameter(kind, bounds)
    return found


def _kind_of(hint: Any) -> tuple[Any, list[Any] | None]:
    """Return the type of a parameter and its bounds; None instead of these if it has other terms."""
    kind, bounds = hint, list[Any]()
    for term in getattr(hint, "__metadata__", ()):
        kind = hint.__origin__
        if type(term) is not Query or term.alias is not None:
            return kind, None
        bounds += term.metadata
    known = all(hasattr(bound, "ge") or hasattr(bound, "le") for bound in bounds)
    return kind, bounds if known else None


def plain_arguments(query: bytes, parameters: Mapping[str, QueryParameter]) -> dict[str, Any] | None:
    """Return the values in a query by name; None if FastAPI must read it."""
    found: dict[str, Any] = {}
    for part in query.decode("latin-1").split("&"):
        name, _, text = part.partition("=")
        parameter = parameters.get(name)
        value = None if parameter is None or name in found else parameter.read(text)
        if value is None:
            return None
        found[name] = value
    return found


async def _call(endpoint: Callable[..., Awaitable[Response]], request: Request) -> Response:
    return await endpoint(request, **request.scope.get(_ARGUMENTS, {}))
