"""What all verbs of the client are made of: one request, its body and path, and the records of its reply, loaded when first needed."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

from phalanx.client.transport import Transport
from phalanx.core.errors import BadRequest

T = TypeVar("T")

_ID: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # of a user, project, queue, token or reservation


class Records:
    """A module of records, loaded when one of them is first needed: msgspec and core's records cost 40 ms of a command's start."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self._module), name)


class Verbs:
    """Verbs of one noun; `Client` has those of all."""

    transport: Transport

    def _get(self, path: str, kind: type[T]) -> T:
        return record(self.transport.json("GET", path), kind)

    def _post(self, path: str, body: Mapping[str, object] | None, *, again: bool = False) -> bytes:
        return self.transport.json("POST", path, encode(body) if body is not None else b"", again=again)

    def _put(self, path: str, body: Mapping[str, object]) -> bytes:
        return self.transport.json("PUT", path, encode(body))


def record(payload: bytes, kind: type[T]) -> T:
    """Decode a reply."""
    import msgspec

    return msgspec.json.decode(payload, type=kind)


def encode(body: Mapping[str, object]) -> bytes:
    """Write a body as JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


def query(asked: Mapping[str, object], more: Sequence[tuple[str, str]] = ()) -> str:
    """What follows the path: `more`, then what was asked and is not None. Empty where nothing was."""
    pairs = [*more, *((name, str(value)) for name, value in asked.items() if value is not None)]
    return "?" + urlencode(pairs) if pairs else ""


def segment(text: str) -> str:
    """A name as one segment of a path.

    Raises:
        BadRequest: it is empty or would be read as more than a name.
    """
    if not text or text in (".", ".."):
        raise BadRequest(f"{text!r} is no name")
    return quote(text, safe="")


def id_segment(kind: str, text: str) -> str:
    """The id of a user, project, queue or token as one segment of a path.

    Raises:
        BadRequest: no such thing can have this name.
    """
    if not _ID.fullmatch(text):
        raise BadRequest(f"{text[:80]!r} is no name of a {kind}", hint="1 to 64 letters, digits and . _ @ -")
    return segment(text)
