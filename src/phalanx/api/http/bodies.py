"""Reads request bodies within their limits, and encodes replies."""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from phalanx.api.http.errors import JSON_MEDIA_TYPE, SlowBody
from phalanx.api.http.plain_cycle import BODY_ARRIVED
from phalanx.api.http.routing import body_too_large
from phalanx.api.runtime import reauthorize_caller, runtime_of
from phalanx.core.errors import BadRequest
from phalanx.core.jsonline import int64
from phalanx.core.units import format_duration

T = TypeVar("T")
_LONG_INT: Final = re.compile(rb"\d{19}")  # 2**63 has 19 digits


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole body, then authorize the caller again: call `caller_of` after it, not before.

    Raises:
        TooLarge, SlowBody: as in `read_open_body`.
        NotSignedIn, NotPermitted: the caller lost the permission while the body arrived.
    """
    body = await read_open_body(request, limit)
    reauthorize_caller(request)
    return body


async def read_open_body(request: Request, limit: int) -> bytes:
    """Read the whole body of a request that anyone may send.

    Raises:
        TooLarge: the body is over `limit`; raised as soon as that is known.
        SlowBody: the body was not complete within `Limits.body_s`.
    """
    arrived = request.scope.get(BODY_ARRIVED)
    if arrived is not None and arrived():  # no time limit is needed
        whole: bytes = (await request.receive())["body"]
        if len(whole) > limit:
            raise body_too_large(request, limit)
        return whole
    parts: list[bytes] = []
    size = 0
    body_s = runtime_of(request).services.limits.body_s
    try:
        async with asyncio.timeout(body_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise body_too_large(request, limit)
                parts.append(part)
    except TimeoutError as error:
        raise SlowBody(
            f"{request.method} {request.url.path}: the body was not complete after {format_duration(body_s)} ({size} bytes received)",
            hint="send it faster, or send less at once",
        ) from error
    except ClientDisconnect as error:
        raise BadRequest(
            f"{request.method} {request.url.path}: the connection closed before the whole body arrived"
        ) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the record in a body.

    Raises:
        BadRequest: it is not JSON, not a record of that kind, or has an integer of more than 64 bits.
    """
    try:
        record = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"body: {error}", hint="GET /v1/openapi.json describes it") from error
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, RecursionError) as error:
        raise BadRequest(f"body: not JSON in UTF-8: {error}", hint="send a JSON object") from error
    if _LONG_INT.search(body):  # possibly inside a string, so parse it
        try:
            json.loads(body, parse_int=int64)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"body: {error}", hint="GET /v1/openapi.json describes it") from error
    return record


async def read_record(request: Request, kind: type[T], limit: int) -> T:
    """Read and decode the record that a request carries; an empty body means a record without fields.

    Raises:
        BadRequest, TooLarge: as in `read_body` and `decoded`.
    """
    return decode_body(await read_body(request, limit) or b"{}", kind)


def json_response(record: Any, status: int = 200) -> Response:
    """Return a record as a JSON response."""
    return Response(msgspec.json.encode(record), status, media_type=JSON_MEDIA_TYPE)


def no_content() -> Response:
    """Return an empty response with status 204."""
    return Response(status_code=204)
