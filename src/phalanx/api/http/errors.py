"""Error responses, all in the shape of `wire.api.errors.ErrorReply`."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.core.errors import (
    BadRequest,
    Conflict,
    NotFound,
    NotLeading,
    NotPermitted,
    NotSignedIn,
    PhalanxError,
    TooLarge,
    TryLater,
)
from phalanx.core.hints import Hint, HintCode, hint_keys
from phalanx.wire.api.errors import ErrorBody, ErrorReply

JSON_MEDIA_TYPE: Final = "application/json"
_OF_STATUS: Final[dict[int, type[PhalanxError]]] = {
    401: NotSignedIn,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    503: TryLater,
}


class SlowBody(TryLater):
    """The body took too long to arrive; nothing was done. Its code is `try_later`, its HTTP status 408."""

    http_status = 408


class RequestHeadTooLarge(TooLarge):
    """The request line and headers exceed their limit. Its code is `body_too_large`, its HTTP status 431."""

    http_status = 431


def error_body(error: PhalanxError) -> ErrorBody:
    """Return the record of an error."""
    leader = error.leader if isinstance(error, NotLeading) else UNSET
    return ErrorBody(
        code=error.code, message=error.message, **hint_keys(error.hint), retry=error.retry_helps, leader=leader
    )


def error_response(
    error: PhalanxError, *, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the response for an error. It closes the connection if the body of the request was not read."""
    extra = dict(headers or {})
    if isinstance(error, NotSignedIn):
        extra["www-authenticate"] = "Bearer"
    if isinstance(error, (TooLarge, SlowBody)):
        extra["connection"] = "close"
    if isinstance(error, TryLater):
        extra.setdefault("retry-after", "1")
    return Response(
        msgspec.json.encode(ErrorReply(error=error_body(error))), status or error.http_status, extra, JSON_MEDIA_TYPE
    )


def internal_error_response() -> Response:
    """Return the response for an internal error, without its cause, which is in the head's log."""
    body = ErrorBody(
        code="error",
        message="the request failed inside the head",
        **hint_keys(Hint(HintCode.READ_HEAD_LOG)),
        retry=False,
    )
    return Response(msgspec.json.encode(ErrorReply(error=body)), 500, media_type=JSON_MEDIA_TYPE)


def add_error_handlers(app: FastAPI) -> None:
    """Make the app answer every error in the shape of `ErrorReply`."""
    app.add_exception_handler(PhalanxError, _phalanx)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)


async def _phalanx(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PhalanxError)
    return error_response(error)


async def _validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("query", "path", "header"))
    return error_response(BadRequest(f"{place}: {first['msg']}", hint="GET /v1/openapi.json describes every route"))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = _methods_of(request)
        refusal: PhalanxError = BadRequest(f"{what}: method not allowed", hint=f"allowed methods: {allowed}")
        return error_response(refusal, status=405, headers={"allow": allowed})
    if error.status_code == 404:
        refusal = NotFound(f"{what}: no such route", hint="GET /v1/openapi.json lists all routes")
    else:
        refusal = _OF_STATUS.get(error.status_code, BadRequest)(f"{what}: {error.detail}")
    return error_response(refusal, status=error.status_code, headers=dict(error.headers or {}))


def _methods_of(request: Request) -> str:
    """Return all methods that the routes of this path accept."""
    routes = [route for route in request.app.router.routes if isinstance(route, Route)]
    methods = (route.methods or set() for route in routes if route.path_regex.match(request.url.path))
    return ", ".join(sorted(set[str]().union(*methods)))
