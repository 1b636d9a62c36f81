"""Security middleware: checks Host, Origin, size and scope of each request and WebSocket handshake, and adds security headers to each response. Plain ASGI.

Host and Origin are checked because a browser on the user's machine can reach loopback. A page that rebinds its DNS name to 127.0.0.1
sends its own name in Host, and a script of any page sends the page's Origin. Requests without Origin (images, links, forms of old
browsers) name the kind of their source in Sec-Fetch-Site. None of these requests can carry a token: it is read from a header only. The
cookie of a browser's session is sent with requests of the head's own pages only (SameSite), and opens a change only together with a header
that no other site can set. So the content type of a body need not be checked. Two pages may be opened from elsewhere: that to which the
sign-in provider leads browsers back, and that which asks whether to open a web program of a job. They have no effect.
"""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.http.errors import RequestHeadTooLarge, error_response, internal_error_response
from phalanx.api.http.timeouts import REQUEST_HEAD_BYTES_MAX
from phalanx.core.errors import BadRequest, NotPermitted, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.ports.identity import RETURN_PATH

# same-origin: the head's own pages. none: a person typed the address. Absent: no browser, or one too old (its Origin is checked).
_OWN_SITES: Final = frozenset({b"", b"same-origin", b"none"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_REQUEST_LINE_BYTES: Final = len("  HTTP/1.1\r\n\r\n")  # with the empty line that ends the head
_HEADER_BYTES: Final = len(": \r\n")
_STARTS: Final = frozenset({"http.response.start", "websocket.http.response.start"})
_HTTP_SCHEMES: Final = {"ws": "http", "wss": "https"}
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)
PROGRAMS_PATH: Final = "/j/"
Headers = tuple[tuple[bytes, bytes], ...]
_log: Final = logging.getLogger("phalanx.api")


class SecurityMiddleware:
    """ASGI middleware around the app.

    Args:
        app: the wrapped app.
        hosts_allowed: names (without port) that a Host header may carry. Any port is accepted, as it may be forwarded.
        names_below: names directly below this one are accepted too; "" for none.
        entry: people may follow links of other sites to pages whose path begins so; these pages have no effect then (`is_foreign`).
        headers: added to responses that lack them.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts_allowed: frozenset[str],
        *,
        names_below: str = "",
        entry: str = PROGRAMS_PATH,
        headers: Headers = SECURITY_HEADERS,
    ) -> None:
        self._app, self._names_below, self._entry, self._headers = app, names_below.lower(), entry, headers
        self._hosts = frozenset(host.lower() for host in hosts_allowed)
        self._accepted: set[tuple[str, bytes, bytes]] = set()  # scheme, Host and Origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket; other scopes than these and `lifespan` are refused."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            _log.warning("refused a connection of type %r: only HTTP requests are served", scope["type"])
            return
        method = scope.get("method", "WEBSOCKET")
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, with_security_headers(send, self._headers))
            return
        started = disconnected = False

        async def send_secured(message: Message) -> None:
            nonlocal started, disconnected
            if not started:
                _add_security_headers(message, self._headers)
            try:
                await send(message)
            except Exception as error:
                # PlainCycle raises RuntimeError for an invalid response, and never because of the caller.
                disconnected = scope["type"] != "http" or not isinstance(error, RuntimeError)
                raise
            started = True

        try:
            await self._app(scope, receive, send_secured)
        except Exception as error:
            if (
                disconnected
            ):  # the caller sent invalid data after its request: not a failure of the head, so no traceback
                _log.info("%s %r: the caller broke the connection: %s", method, scope["path"], error)
                return
            _log.exception("%s %r failed", method, scope["path"])  # a path may contain line breaks
            if started:
                raise  # the server then cuts the response off
            await internal_error_response()(scope, receive, with_security_headers(send, self._headers))

    def _is_allowed(self, name: str) -> bool:
        return name in self._hosts or (self._names_below != "" and name.partition(".")[2] == self._names_below)

    def _may_be_opened_from_elsewhere(self, scope: Scope) -> bool:
        if scope.get("method") != "GET":
            return False
        followed = {(b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")} <= set(scope["headers"])
        return scope["path"] == RETURN_PATH or (followed and scope["path"].startswith(self._entry))

    def _refusal(self, scope: Scope) -> PhalanxError | None:
        host = origin = site = b""
        hosts = tokens = 0
        scheme = str(_HTTP_SCHEMES.get(scope["scheme"], scope["scheme"]))
        head_bytes = (
            _REQUEST_LINE_BYTES
            + len(scope.get("method", "GET"))
            + len(scope["raw_path"])
            + 1
            + len(scope["query_string"])
        )
        for name, value in scope["headers"]:
            head_bytes += len(name) + len(value) + _HEADER_BYTES
            if name == b"host":
                host = value
                hosts += 1
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"authorization":
                tokens += 1
        if head_bytes > REQUEST_HEAD_BYTES_MAX:
            return RequestHeadTooLarge(
                "the request line and headers are over 64 KiB", hint="send fewer or shorter headers"
            )
        if site not in _OWN_SITES and not self._may_be_opened_from_elsewhere(scope):
            return NotPermitted("pages of other sites may not call this head")
        if tokens > 1:
            return BadRequest(f"the request has {tokens} Authorization headers", hint="send one")
        key = (scheme, host, origin)
        if hosts == 1 and key in self._accepted:
            return None
        if hosts != 1 or not self._is_allowed(host_name(host)):
            return NotPermitted(
                f"host {host.decode('latin-1')!r} is not this head", hint=Hint(HintCode.USE_PRINTED_URL)
            )
        if origin and not same_origin(origin.decode("latin-1"), f"{scheme}://{host.decode('latin-1')}"):
            return NotPermitted(f"pages of {origin.decode('latin-1')!r} may not call this head")
        if (
            len(self._accepted) < 1000
        ):  # a few names and ports in regular use; bounded, since callers choose the spelling
            self._accepted.add(key)
        return None


def is_foreign(connection: HTTPConnection) -> bool:
    """Whether a page of another site, or of another port of this host, made a browser send this."""
    return connection.headers.get("sec-fetch-site", "").encode("latin-1") not in _OWN_SITES


def _add_security_headers(message: Message, added: Headers) -> None:
    if message["type"] in _STARTS:
        headers = list(message.get("headers", ()))
        present = {name for name, _ in headers}
        message["headers"] = [*headers, *(pair for pair in added if pair[0] not in present)]


def with_security_headers(send: Send, added: Headers = SECURITY_HEADERS) -> Send:
    """Return a `send` that adds the security headers to a response made by this middleware."""

    async def send_secured(message: Message) -> None:
        _add_security_headers(message, added)
        await send(message)

    return send_secured


def same_origin(one: str, other: str) -> bool:
    """Whether two URLs have the same scheme, host and port; a missing port is the scheme's default."""
    origins = []
    for url in (one, other):
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return False
        if parts.scheme not in _DEFAULT_PORTS or "@" in parts.netloc:
            return False
        origins.append((parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme]))
    return origins[0] == origins[1]


def host_name(host: bytes) -> str:
    """Return the name in a Host header, in lower case and without its port; an IPv6 address keeps its brackets."""
    text = host.decode("latin-1").strip().lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdecimal() and (not name.count(":") or name.endswith("]")) else text
