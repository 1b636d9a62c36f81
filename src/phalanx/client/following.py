"""Server-sent events as an iterator that comes back by itself: with the id of the last event, so that nothing is missed or doubled."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from math import inf
from typing import Any, Final, NamedTuple

from phalanx.client.transport import Retry, Transport
from phalanx.core.errors import BY_CODE, PhalanxError

SILENCE_S: Final = 35.0  # three heartbeats of the head: past it the connection is dead, whatever TCP believes
_LEAST_S: Final = 0.001  # 0 would mean: do not wait at all


class Event(NamedTuple):
    """One event. `kind`: log, state, story, end; `fields`: the record of wire.api that the kind names; `cursor`: to go on after it."""

    kind: str
    fields: dict[str, Any]
    cursor: str


def follow(transport: Transport, path: str, *, cursor: str = "", until_s: float = inf) -> Iterator[Event]:
    """Events until `end`, or until the transport's clock shows `until_s`. A broken connection is opened again where it broke.

    Raises:
        PhalanxError: the head refused, or stayed away longer than the transport's patience.
    """
    retry = Retry(transport)
    seen: dict[tuple[int, str], int] = {}
    while until_s > transport.now():
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": cursor} if cursor else {})}
        try:
            reply, wire = transport.stream(path, headers, timeout_s=_silence_s(transport, until_s))
            try:
                for event in parse(reply):
                    retry.again_after_success()
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
            retry.after(error, again=True)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError):
                if transport.now() >= until_s:
                    return
                transport.look_elsewhere(transport.url())  # the silence of a stream that was open
            retry.after(error, again=True)
        else:
            retry.after(ConnectionResetError("the stream ended"), again=True)  # the head stopped in good order


def _silence_s(transport: Transport, until_s: float) -> float:
    return min(SILENCE_S, max(_LEAST_S, until_s - transport.now()))


def parse(reply: http.client.HTTPResponse) -> Iterator[Event | None]:
    """The events in a reply, as they come, and None for each sign of life between them. One cut short at the end is none.

    Raises:
        PhalanxError: an `error` event.
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
                raise BY_CODE.get(body["code"], PhalanxError)(body["message"], hint=body.get("hint", ""))
            yield Event(kind, fields, mark)
            kind, mark, lines = "message", "", []


def _fresh(event: Event, seen: dict[tuple[int, str], int]) -> Event | None:
    """The event without text that was had already: a batch whose cursor was lost with the connection comes again."""
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
