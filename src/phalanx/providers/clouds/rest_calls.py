"""Calls of a cloud's REST interface: JSON over HTTPS, each sent once on a connection of its own, by the standard library.

A call without an answer is never repeated here: whether it was carried out is unknown, and only the head knows with which token to repeat it.
Redirects are not followed, so that a credential goes only to the address that it is meant for.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CallUnanswered

TIMEOUT_S: Final = 30.0  # of the connection, and of each receive
ANSWER_BYTES_MAX: Final = 64 << 20  # the list of all machine sizes of a region of Azure has some 10 MB
WAIT_MAX_S: Final = 300.0  # a longer Retry-After is not believed
CLOCKS_AGREE_S: Final = 2.0  # `Date` is up to a second old, and an answer takes a while
_LOOPBACK: Final = re.compile(r"localhost|127(?:\.\d{1,3}){3}|\[?::1\]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudReply:
    """An answer of any status. `headers`: names in lower case; `body`: the JSON object, empty if the answer has no object; `text`: as it came."""

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    text: str


def plain_opener(*, proxies: bool = True) -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirects, and gives answers of any status. `proxies`: it uses those of the environment."""
    made = urllib.request.OpenerDirector()
    proxy = urllib.request.ProxyHandler(None if proxies else {})
    for handler in (proxy, urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        made.add_handler(handler)
    return made


@dataclass(slots=True, kw_only=True)
class RestCalls:
    """Calls of one service of a cloud. Thread-safe.

    Attributes:
        url: of the service, without a slash at the end.
        metadata: it is the metadata service of this machine: no TLS, and no proxy on the way.
        quiet_until_s: the service asked for no call before (monotonic).
        ahead_s: the time of the newest answer, less the monotonic clock then; None before the first answer.
    """

    url: str
    metadata: bool = False
    quiet_until_s: float = 0.0
    ahead_s: float | None = None
    _opener: urllib.request.OpenerDirector = field(default_factory=plain_opener)

    def __post_init__(self) -> None:
        """Check the address.

        Raises:
            BadRequest: it is not https, nor http on loopback.
        """
        if self.metadata:
            self._opener = plain_opener(proxies=False)
        else:
            self.url = check_url(self.url)

    def now_s(self) -> float:
        """Return the time by the clock of the service, as far as its answers tell it (`answer_time_s`); in Unix seconds."""
        return time.time() if self.ahead_s is None else time.monotonic() + self.ahead_s

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> CloudReply:
        """Send one call, and return its answer of any status.

        Args:
            method: of HTTP.
            path: on this service, or a whole URL of the service, as in links to the next page.
            query: parameters, which are encoded.
            body: bytes as they are, anything else as JSON; None for no body.
            headers: of the request.

        Raises:
            CallUnanswered: there is no complete answer, or the service asked for a pause that is not over.
        """
        wait_s = self.quiet_until_s - time.monotonic()
        if wait_s > 0.0:
            raise CallUnanswered(f"the cloud asked for a pause; {wait_s:.0f} s of it are left")
        url = path if path.startswith(self.url + "/") else self.url + path
        if query:
            url += ("&" if "?" in url else "?") + urlencode(query, quote_via=quote)
        content, sent = None, {"Accept": "application/json", "User-Agent": "phalanx", **(headers or {})}
        if isinstance(body, bytes):
            content = body
        elif body is not None:
            content = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        elif method in {"POST", "PUT"}:
            content = b""
        request = urllib.request.Request(url, content, sent, method=method)  # noqa: S310  # `check_url` saw the scheme
        reply = send_request(self._opener, request)
        self.ahead_s = answer_time_s(reply.headers) - time.monotonic()
        if reply.status in {http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE}:
            self.quiet_until_s = time.monotonic() + retry_after_s(reply.headers)
        return reply


def send_request(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> CloudReply:
    """Send one request.

    Raises:
        CallUnanswered: there is no complete answer, or one that is too long.
    """
    try:
        with opener.open(request, timeout=TIMEOUT_S) as found:
            content: bytes = found.read(ANSWER_BYTES_MAX + 1)
            status, headers = int(found.status), {name.lower(): value for name, value in found.headers.items()}
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise CallUnanswered(f"no answer: {one_line(str(reason)) or type(error).__name__}") from error
    if len(content) > ANSWER_BYTES_MAX:
        raise CallUnanswered(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
    text = content.decode(errors="replace")
    try:
        body = json.loads(text) if text.strip() else {}
    except ValueError:
        if status < http.client.MULTIPLE_CHOICES:  # a proxy on the way, or half an answer
            raise CallUnanswered(f"the answer is not JSON: {text[:80]!r}") from None
        body = {}
    return CloudReply(
        status=status, headers=headers, body=body if isinstance(body, dict) else {"value": body}, text=text
    )


def fetch_text(url: str) -> str:
    """Return the text at an address that a cloud has named, with the right to read it in the address.

    Raises:
        OSError: it is no HTTPS address, or gives no text.
    """
    try:
        check_url(url.partition("?")[0])
    except BadRequest as error:
        raise OSError(str(error)) from error
    request = urllib.request.Request(url, headers={"User-Agent": "phalanx"})  # noqa: S310  # `check_url` saw the scheme
    try:
        with plain_opener().open(request, timeout=TIMEOUT_S) as found:
            content: bytes = found.read(ANSWER_BYTES_MAX)
            status = int(found.status)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OSError(f"no answer: {one_line(str(getattr(error, 'reason', error)))}") from error
    if status != http.client.OK:
        raise OSError(f"HTTP {status}")
    return content.decode(errors="replace")


def answer_time_s(headers: Mapping[str, str]) -> float:
    """Return when a service sent an answer, in Unix seconds: by this machine's clock if it agrees with the service's, else by that one.

    A bill is written by the clock of the cloud, and the clock of this machine may be set at any time. The header `Date` has whole seconds.
    """
    now_s = time.time()
    try:
        sent_s = parsedate_to_datetime(headers.get("date", "")).timestamp() + 0.5
    except (ValueError, TypeError, OverflowError):
        return now_s
    return now_s if abs(now_s - sent_s) <= CLOCKS_AGREE_S else sent_s


def check_url(url: str) -> str:
    """Return the URL of a service, without a slash at its end.

    Raises:
        BadRequest: it is not https, nor http on loopback: credentials would be sent in clear text.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise BadRequest(f"{url[:80]!r} is not a URL") from error
    if not host or parts.query or parts.scheme not in {"http", "https"}:
        raise BadRequest(f"{url[:80]!r} is not the URL of a service")
    if parts.scheme == "http" and not _LOOPBACK.fullmatch(host):
        raise BadRequest(f"{url[:80]} would send credentials in clear text", hint="use https")
    return url.rstrip("/")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return for how many seconds a service asks for no call, from 0 to 300."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return min(float(text), WAIT_MAX_S)
    try:
        return min(max(0.0, parsedate_to_datetime(text).timestamp() - time.time()), WAIT_MAX_S)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def one_line(text: str) -> str:
    """Return a text of a cloud as one short line."""
    return " ".join(text.split())[:300]
