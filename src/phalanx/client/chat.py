"""Asks a model for an answer over OpenAI's route for chats, and yields it as it arrives: through a gateway, or from one replica."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from phalanx.core.errors import (
    BadRequest,
    Conflict,
    NotFound,
    NotPermitted,
    NotSignedIn,
    PhalanxError,
    TooLarge,
    TryLater,
    Unreachable,
)
from phalanx.wire.head_url import joined_address, split_url

PATH: Final = "/v1/chat/completions"
CONNECT_S: Final = 5.0
SILENT_S: Final = 600.0  # an engine that reads a long prompt sends nothing; a gateway sends comments
LINE_MAX: Final = 4 << 20
_BODY_MAX: Final = 1 << 20  # of an error
_ERRORS: Final[Mapping[int, type[PhalanxError]]] = {
    HTTPStatus.UNAUTHORIZED: NotSignedIn,
    HTTPStatus.FORBIDDEN: NotPermitted,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLarge,
    HTTPStatus.TOO_MANY_REQUESTS: TryLater,
    HTTPStatus.BAD_GATEWAY: TryLater,
    HTTPStatus.SERVICE_UNAVAILABLE: TryLater,
    HTTPStatus.GATEWAY_TIMEOUT: TryLater,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPiece:
    """A piece of an answer: text, or a thought before it; or what the request waits for."""

    text: str = ""
    thought: str = ""
    waits: str = ""


@dataclass(slots=True, kw_only=True)
class ChatTimes:
    """What an answer took, in seconds since the request was sent. Tokens as the engine counted them; None if it did not.

    Attributes:
        first_s: until its first token; None before.
        last_s: until its newest one.
        pieces: how many came, which is the number of tokens with most engines.
        prompt_tokens, cached_tokens: of the prompt, and those that the engine had in its cache.
        finish: why it ended: "stop", "length"; empty if it broke off.
    """

    first_s: float | None = None
    last_s: float = 0.0
    pieces: int = 0
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per second; None for fewer than two."""
        count = self.pieces if self.tokens is None else self.tokens
        if self.first_s is None or count < 2 or self.last_s <= self.first_s:
            return None
        return (count - 1) / (self.last_s - self.first_s)


@dataclass(slots=True, kw_only=True)
class ChatServer:
    """Where chats are asked. `url` without path; `headers`: with the key of a gateway, and none for a replica."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, body: Mapping[str, object], times: ChatTimes) -> Generator[ChatPiece]:
        """Yield the pieces of an answer; closing the iterator ends the request at the server too.

        Args:
            body: of the request, with the messages. A stream is asked for.
            times: filled in.

        Raises:
            Unreachable: nothing answers at the URL, or the connection broke.
            PhalanxError: the server refused the request, or reported an error in the middle of the answer.
        """
        secure, host, port = split_url(self.url)
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        where = joined_address(host, port)
        kind: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        context = {"context": ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE"))} if secure else {}
        connection = kind(host, port, timeout=CONNECT_S, **context)
        begun_s = time.monotonic()
        try:
            connection.connect()
            connection.sock.settimeout(SILENT_S)
            connection.request("POST", PATH, payload, {"Content-Type": "application/json", **self.headers})
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise _refusal(answer.status, answer.read(_BODY_MAX), answer.getheader("Retry-After"))
            yield from _pieces(answer, times, begun_s)
        except (OSError, http.client.HTTPException) as error:
            begun = "the answer broke off" if times.pieces else f"no answer from {where}"
            raise Unreachable(f"{begun}: {str(error) or type(error).__name__}", hint="ask again") from None
        finally:
            with contextlib.suppress(OSError):
                connection.close()


def _pieces(answer: http.client.HTTPResponse, times: ChatTimes, begun_s: float) -> Iterator[ChatPiece]:
    """Yield the pieces of a stream of events.

    Raises:
        Unreachable: it ended before its last event.
        PhalanxError: an event reports an error.
    """
    while line := answer.readline(LINE_MAX):
        text = line.decode("utf-8", "replace").strip()
        if text.startswith(":"):
            yield ChatPiece(waits=text[1:].strip())
        if not text.startswith("data:"):
            continue
        value = text.removeprefix("data:").strip()
        if value == "[DONE]":
            return
        piece = read_event(value, times)
        if piece is not None:
            times.last_s = time.monotonic() - begun_s
            times.first_s = times.last_s if times.first_s is None else times.first_s
            times.pieces += 1
            yield piece
    if not times.finish:
        raise Unreachable("the answer broke off", hint="ask again")


def read_event(text: str, times: ChatTimes) -> ChatPiece | None:
    """Return the piece in an event; None for one without text. Counts and the reason of the end go into `times`.

    Raises:
        PhalanxError: it reports an error.
        Conflict: it is not an event of a chat.
    """
    try:
        event = json.loads(text)
        if "error" in event:
            raise _error(event["error"], HTTPStatus.BAD_GATEWAY)
        usage = event.get("usage")
        if usage:
            times.tokens, times.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        times.finish = choice.get("finish_reason") or times.finish
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if not isinstance(content, str) or not isinstance(thought, str):
            raise TypeError(type(content))
    except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise Conflict(
            f"the server's answer is not one of a chat: {text[:80]!r}", hint="does it serve OpenAI's API?"
        ) from error
    return ChatPiece(text=content, thought=thought) if content or thought else None


def _refusal(status: int, body: bytes, retry_after: str | None) -> PhalanxError:
    try:
        given = json.loads(body)
        # vLLM, the gateway and OpenAI: {"error": {"message": ...}}; others: {"message": ...} or {"detail": ...}
        error = given.get("error") or given.get("message") or given.get("detail") or given
    except (ValueError, AttributeError):
        error = body[:200].decode("utf-8", "replace").strip()
    return _error(error, status, retry_after)


def _error(error: object, status: int, retry_after: str | None = None) -> PhalanxError:
    message = str(error.get("message") or error) if isinstance(error, Mapping) else str(error or f"status {status}")
    kind = _ERRORS.get(status, BadRequest if status < HTTPStatus.INTERNAL_SERVER_ERROR else Conflict)
    hint = f"try again in {retry_after} s" if retry_after and retry_after.isdecimal() else ""
    return kind(message[:500], hint=hint)


def messages(system: str, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the messages of a chat: its system prompt if any, then pairs of role and text."""
    first = [("system", system)] if system else []
    return [{"role": role, "content": text} for role, text in (*first, *turns)]
