"""Reads the body of a request for a model."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from phalanx.gateway.refusals import Refused
from phalanx.gateway.routing import expected_tokens
from phalanx.gateway.slow_clients import BODY_S

BODY_MAX: Final = 16 << 20


class CompletionRequest(msgspec.Struct):
    """What routing needs of a body; everything else is passed as it is."""

    model: str
    stream: bool = False
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    priority: int | None = None
    safety_identifier: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")

    @property
    def prompt_json(self) -> msgspec.Raw:
        """The JSON of the prompt."""
        return self.messages or self.prompt or self.input

    @property
    def answer_limit(self) -> int | None:
        """The most tokens of one answer; None if the request does not limit it."""
        return self.max_tokens or self.max_completion_tokens or self.max_output_tokens

    @property
    def tokens(self) -> int:
        """An estimate of all tokens that it will use."""
        return expected_tokens(len(self.prompt_json), 0.0, self.answer_limit) * max(1, self.n or 1)


_decoder: Final = msgspec.json.Decoder(CompletionRequest)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. `request.read` would keep it until the next request of the connection, or until it ends.

    Raises:
        Refused: it is too large, too slow, or cannot be read.
    """
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                size += len(part)
                if size > BODY_MAX:
                    raise Refused(413, f"a request has at most {BODY_MAX >> 20} MiB", "too_large")
                parts.append(part)
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise Refused(400, f"the body cannot be read: {type(error).__name__}", "invalid_body") from None
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s", "timeout") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_request(body: bytes) -> CompletionRequest:
    """Return what routing needs of a body.

    Raises:
        Refused: it is no request of this API.
    """
    try:
        return _decoder.decode(body)
    except RecursionError:
        raise Refused(400, "the body is nested too deeply", "invalid_body") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not a request of this API: {str(error)[:200]}", "invalid_body") from None
