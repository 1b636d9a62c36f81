"""Reading bodies within their limits, and writing replies."""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from phalanx.api.errors import JSON, SlowBody
from phalanx.api.routes import too_large
from phalanx.api.runtime import judge_again, runtime_of
from phalanx.core.errors import BadRequest
from phalanx.core.jsonline import int64
from phalanx.core.units import format_duration

T = TypeVar("T")
_LONG_INT: Final = re.compile(rb"\d{19}")  # 2**63 has so many digits


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Its caller is judged again once it is here: ask `caller_of` behind it, not before.

    Raises:
        TooLarge: over `limit`, as soon as that is seen.
        SlowBody: not whole within `Limits.body_s`.
        NotSignedIn, NotPermitted: the caller lost the right while it came.
    """
    parts: list[bytes] = []
    size = 0
    body_s = runtime_of(request).parts.limits.body_s
    try:
        async with asyncio.timeout(body_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large(request, limit)
                parts.append(part)
    except TimeoutError as error:
        raise SlowBody(
            f"{request.method} {request.url.path}: {size} bytes of its body came in {format_duration(body_s)}, and not all",
            hint="send it faster, or less at once",
        ) from error
    except ClientDisconnect as error:
        raise BadRequest(f"{request.method} {request.url.path}: the caller left before its body was here") from error
    judge_again(request)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decoded(body: bytes, kind: type[T]) -> T:
    """The record in a body.

    Raises:
        BadRequest: it is no JSON, or not that record, or it has an integer of more than 64 bits, which nothing here counts.
    """
    try:
        record = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"body: {error}", hint="GET /v1/openapi.json describes it") from error
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, RecursionError) as error:
        raise BadRequest(f"body: not JSON in UTF-8: {error}", hint="send a JSON object") from error
    if _LONG_INT.search(body):  # which may stand in a text
        try:
            json.loads(body, parse_int=int64)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"body: {error}", hint="GET /v1/openapi.json describes it") from error
    return record


async def read_record(request: Request, kind: type[T], limit: int) -> T:
    """The record that a request carries; an empty body stands for one without fields.

    Raises:
        BadRequest, TooLarge: as above.
    """
    return decoded(await read_body(request, limit) or b"{}", kind)


def reply(record: Any, status: int = 200) -> Response:
    """A record as JSON."""
    return Response(msgspec.json.encode(record), status, media_type=JSON)


def nothing() -> Response:
    """Done, and nothing to say."""
    return Response(status_code=204)
