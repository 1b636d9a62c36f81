"""Calls of a cloud by its table, each once: the key of the head's account, and what errors mean.

Keys are in the environment where the head starts, or in the file `CLOUD.key` of its folder `providers`, one a line.
Crusoe's signature: docs.crusoecloud.com/api, "Authentication", version 1.0, read 2026-11.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CallUnanswered, OfferRefused
from phalanx.providers.clouds.rest_calls import CloudReply, RestCalls, one_line
from phalanx.providers.http.cloud_table import CloudTable, look_up

_WRONG_KEY = frozenset({401})
_NOT_ALLOWED = 403


class SmallCloudError(OSError):
    """The cloud refused a call; nothing was done. `status`: of HTTP, 0 for an operation's."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status = code, status


@dataclass(slots=True)
class SignedCalls:
    """Calls of one cloud. Thread-safe. `folder`: where a file with the key may be."""

    table: CloudTable
    folder: str
    service: RestCalls = field(init=False)

    def __post_init__(self) -> None:
        """Open the service."""
        self.service = RestCalls(url=self.table.url)

    def send(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: object = None
    ) -> CloudReply:
        """Call the cloud once, and return its answer if it is no error.

        Raises:
            OfferRefused: no capacity or quota.
            CallUnanswered: no answer, or one that asks to come again.
            SmallCloudError: any other error; nothing was done.
            BadRequest: there is no key, or the cloud does not accept it.
        """
        headers = self._headers(method, path, query or {}, read_keys(self.table, self.folder, os.environ))
        reply = self.service.send(method, path, query=query, body=body, headers=headers)
        if reply.status < 300:
            return reply
        code = str(look_up(reply.body, self.table.errors.code) or f"HTTP {reply.status}")
        message = one_line(str(look_up(reply.body, self.table.errors.message) or reply.text))
        if reply.status in _WRONG_KEY:
            raise BadRequest(
                f"cloud {self.table.name} does not accept the credentials: {code}: {message}",
                hint=f"set another {self.table.keys[0]} where the head starts",
            )
        raise self.error_of(code, message, reply.status)

    def error_of(self, code: str, message: str, status: int) -> OSError:
        """Return what an error means."""
        known, text = self.table.errors, one_line(message)
        if code in known.no_capacity or any(words in text.lower() for words in known.no_capacity_words):
            return OfferRefused(f"{code}: {text}")
        if code in known.again or status in {408, 429} or status >= 500:
            return CallUnanswered(f"{code}: {text}")
        return SmallCloudError(code, text, status)

    def _headers(self, method: str, path: str, query: Mapping[str, str], keys: tuple[str, ...]) -> dict[str, str]:
        match self.table.auth:
            case "basic":
                return {"Authorization": "Basic " + base64.b64encode(f"{keys[0]}:".encode()).decode()}
            case "crusoe":
                at = datetime.now(UTC).replace(microsecond=0).isoformat()
                whole = urlsplit(self.table.url).path + path
                words = urlencode(sorted(query.items()), quote_via=quote)
                signed = sign_crusoe(keys[1], f"{whole}\n{words}\n{method}\n{at}\n")
                return {"X-Crusoe-Timestamp": at, "Authorization": f"Bearer 1.0:{keys[0]}:{signed}"}
            case _:
                return {"Authorization": f"Bearer {keys[0]}"}


def sign_crusoe(secret: str, text: str) -> str:
    """Return the signature of a request by the secret key, which is base64 of a URL without padding, as the signature is."""
    key = base64.urlsafe_b64decode(secret + "=" * (-len(secret) % 4))
    found = hmac.new(key, text.encode("ascii"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(found).decode().rstrip("=")


def read_keys(table: CloudTable, folder: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of a cloud: of the environment, else of its file.

    Raises:
        BadRequest: there are none, or others may read the file.
    """
    found = tuple(environment.get(name, "") for name in table.keys)
    if all(found):
        return found
    path = os.path.join(folder, f"{table.name}.key")
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = tuple(file.read().split())
    except OSError as error:
        raise BadRequest(
            f"no {table.name} credentials: the environment of the head's account has no {table.keys[0]}",
            hint=f"set {' and '.join(table.keys)} where the head starts, or write {path}",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadRequest(f"others may read {path}", hint=f"chmod go= {path}")
    if len(lines) != len(table.keys):
        raise BadRequest(f"{path} has {len(lines)} lines, not {len(table.keys)}: {' and '.join(table.keys)}")
    return lines


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an item of an answer as an object; empty if it is another value."""
    return value if isinstance(value, Mapping) else {}
