"""Server-sent events as an iterator that reconnects. It sends the id of the last event, so that no event is lost or repeated."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from math import inf
from typing import Any, Final, NamedTuple

from phalanx.client.connection.transport import Retry, Transport
from phalanx.core.errors import BY_CODE, PhalanxError
from phalanx.core.hints import parse_hint

SILENCE_S: Final = 35.0  # three heartbeats of the head; after that the connection counts as dead
_LEAST_S: Final = 0.001  # a socket timeout of 0 means non-blocking


class Event(NamedTuple):
    """One event. `kind`: log, state, story (a line of the history) or end; `fields`: the wire.api record of that kind; `cursor`: resumes after this event."""

    kind: str
    fields: dict[str, Any]
    cursor: str


def follow_stream(transport: Transport, path: str, *, cursor: str = "", until_s: float = inf) -> Iterator[Event]:
    """Yield events until `end`, or until the transport's clock reaches `until_s`. Reconnect and resume after a broken connection.

    Raises:
        PhalanxError: the head refused the request, or was unreachable longer than the transport retries.
    """
    retry = Retry(transport)
    seen: dict[tuple[int, str], int] = {}
    while until_s > transport.now():
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": cursor} if cursor else {})}
        try:
            reply, wire = transport.stream(path, headers, timeout_s=_silence_s(transport, until_s))
            try:
                for event in parse_events(reply):
                    retry.reset()
                    if event is not None:
                        cursor = event.cursor or cursor
                        fresh = _fresh(event, seen)
                        if fresh is not None:
                            yield fresh
                        if event.kind == "end":
                            return
                    if transport.now() >= until_s:
                        return
                    wire.settimeout(_silence_s(transport, until_s))
            finally:
                reply.close()
        except PhalanxError as error:
            if not error.retry_helps:
                raise
            retry.wait_or_raise(error, retryable=True)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError):
                if transport.now() >= until_s:
                    return
                transport.try_next_head(transport.url())  # no heartbeat on an open stream
            retry.wait_or_raise(error, retryable=True)
        else:
            retry.wait_or_raise(ConnectionResetError("the stream ended"), retryable=True)  # the head shut down cleanly


def _silence_s(transport: Transport, until_s: float) -> float:
    return min(SILENCE_S, max(_LEAST_S, until_s - transport.now()))


def parse_events(reply: http.client.HTTPResponse) -> Iterator[Event | None]:
    """Yield the events of a reply as they arrive, and None for each heartbeat. An incomplete event at the end is dropped.

    Raises:
        PhalanxError: the stream contains an `error` event.
        OSError, HTTPException: the connection broke.
    """
    kind, mark, lines = "message", "", []
    while line := reply.readline():
        if not line.endswith(b"\n"):
            return
        name, _, value = line.decode("utf-8").rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "id":
            mark = value
        elif name == "data":
            lines.append(value)
        elif not name and value:
            yield None
        elif not name and lines and line in (b"\n", b"\r\n"):
            fields = json.loads("\n".join(lines))
            if kind == "error":
                body = fields["error"]
                hint = parse_hint(body.get("hint", ""), body.get("hint_code"), body.get("hint_args"))
                raise BY_CODE.get(body["code"], PhalanxError)(body["message"], hint=hint)
            yield Event(kind, fields, mark)
            kind, mark, lines = "message", "", []


def _fresh(event: Event, seen: dict[tuple[int, str], int]) -> Event | None:
    """Return the event without the text that was received before; None if nothing is new.

    A batch is sent again if the connection broke before its cursor arrived.
    """
    if event.kind != "log":
        return event
    fields = event.fields
    stream = (fields["epoch"], fields["stream"])
    had = seen.get(stream, 0)
    if fields["end"] <= had:
        return None
    seen[stream] = fields["end"]
    if fields["offset"] >= had:
        return event
    text = fields["text"].encode()[had - fields["offset"] :].decode("utf-8", "replace")
    return Event("log", {**fields, "offset": had, "text": text}, event.cursor)
