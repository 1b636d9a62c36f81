"""Base of all API calls of the client: one request with its path and body, and the lazily loaded records of its reply."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar
from urllib.parse import quote, urlencode

from phalanx.client.connection.transport import Transport
from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode

T = TypeVar("T")


class _Page(Protocol):
    @property
    def next(self) -> str: ...


P = TypeVar("P", bound=_Page)
_ID: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # of a user, project, queue, token or reservation


class LazyModule:
    """A module of records that is imported on first use: msgspec and the records of core add 40 ms to the start of a command."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self._module), name)


class ApiCalls:
    """API calls for one kind of object; `Client` combines all of them."""

    transport: Transport

    def _get(self, path: str, kind: type[T]) -> T:
        return decode_record(self.transport.json("GET", path), kind)

    def _pages(self, path: str, kind: type[P]) -> Iterator[P]:
        """Return all pages of a list whose reply has the key to continue behind in `next`."""
        after = ""
        while True:
            more = query_string({"after": after or None})
            page = self._get(path + (more.replace("?", "&", 1) if "?" in path else more), kind)
            yield page
            if not page.next:
                return
            after = page.next

    def _post(self, path: str, body: Mapping[str, object] | None, *, idempotent: bool = False) -> bytes:
        return self.transport.json("POST", path, encode_body(body) if body is not None else b"", idempotent=idempotent)

    def _put(self, path: str, body: Mapping[str, object], *, timeout_s: float | None = None) -> bytes:
        return self.transport.json("PUT", path, encode_body(body), timeout_s=timeout_s)


def decode_record(payload: bytes, kind: type[T]) -> T:
    """Decode the JSON of a reply.

    Raises:
        BadRequest: another program sent it, or a head of another release.
    """
    import msgspec

    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the reply does not come from a head of this release: {error}", hint=Hint(HintCode.USE_PRINTED_URL)
        ) from error


def encode_body(body: Mapping[str, object]) -> bytes:
    """Encode a body as JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


def query_string(parameters: Mapping[str, object], more: Sequence[tuple[str, str]] = ()) -> str:
    """Return the query string: `more`, then the parameters that are not None. Empty if there are none."""
    pairs = [*more, *((name, str(value)) for name, value in parameters.items() if value is not None)]
    return "?" + urlencode(pairs) if pairs else ""


def grouping(by: str) -> dict[str, object]:
    """Return the parameters of a report's grouping: a word, or `label:NAME`."""
    kind, colon, name = by.partition(":")
    return {"by": "job", "label": name} if colon and kind == "label" else {"by": by}


def path_segment(text: str) -> str:
    """Quote a name as one segment of a path.

    Raises:
        BadRequest: the name is empty, "." or "..".
    """
    if not text or text in (".", ".."):
        raise BadRequest(f"{text!r} is not a valid name")
    return quote(text, safe="")


def id_path_segment(kind: str, text: str) -> str:
    """Quote the id of a user, project, queue, token or reservation as one segment of a path.

    Raises:
        BadRequest: the id is malformed.
    """
    if not _ID.fullmatch(text):
        raise BadRequest(
            f"{text[:80]!r} is not a valid name of a {kind}", hint="use 1 to 64 letters, digits and . _ @ -"
        )
    return path_segment(text)
