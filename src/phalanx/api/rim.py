"""The outermost layer: whose page may speak to us, and that nothing leaves without our shape. Plain ASGI, a few dictionary look-ups a request.

Host and Origin are checked because a browser on the user's machine reaches loopback too: a page that rebinds its DNS name to
127.0.0.1 carries its own name in Host, and any page's script carries its Origin. What has no Origin (an image, a link, a form of an old
browser) tells where it comes from in Sec-Fetch-Site. None of them could carry a token: there are no cookies, and nothing is read from
the URL; so the content type of a body need not be looked at.
"""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.errors import error_response, failure_response
from phalanx.core.errors import NotPermitted

# same-origin: our own pages; none: a person typed the address. Absent: no browser, or one too old to say (its Origin is looked at).
_OWN_SITES: Final = frozenset({b"", b"same-origin", b"none"})
_SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)
_log: Final = logging.getLogger("phalanx.api")


class Rim:
    """Wraps the app."""

    def __init__(self, app: ASGIApp, hosts_allowed: frozenset[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts_allowed)
        self._known: set[tuple[bytes, bytes]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, dressed(send))
            return
        begun = broken = False

        async def sending(message: Message) -> None:
            nonlocal begun, broken
            if not begun:
                begun = True
                _dress(message)
            try:
                await send(message)
            except Exception:
                broken = True
                raise

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if broken:  # what the caller sent beyond its request spoilt its own connection: no fault of ours, and no page of log
                _log.info("%s %r: its caller spoilt the connection: %s", scope["method"], scope["path"], error)
                return
            _log.exception("%s %r failed", scope["method"], scope["path"])  # a path may hold line breaks
            if begun:
                raise  # the caller sees a broken reply, which it is
            await failure_response()(scope, receive, dressed(send))

    def _refusal(self, scope: Scope) -> NotPermitted | None:
        host = origin = site = b""
        hosts = 0
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
                hosts += 1
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if site not in _OWN_SITES:
            return NotPermitted("a page of another site may not speak to this head")
        if hosts == 1 and (host, origin) in self._known:
            return None
        if hosts != 1 or name_of(host) not in self._hosts:
            return NotPermitted(
                f"host {host.decode('latin-1')!r} is not this head", hint="use the URL that `phalanx up` printed"
            )
        if origin and not self._allows(origin):
            return NotPermitted(f"pages of {origin.decode('latin-1')!r} may not speak to this head")
        if len(self._known) < 1000:  # spellings of a few names and ports; the bound is for who makes them up
            self._known.add((host, origin))
        return None

    def _allows(self, origin: bytes) -> bool:
        try:
            parts = urlsplit(origin.decode("ascii"))
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and name_of(parts.netloc.encode()) in self._hosts


def _dress(message: Message) -> None:
    """Add what a browser that looks at a reply must know: it is no page, it is nobody else's, and it is not to be kept."""
    if message["type"] == "http.response.start":
        headers = list(message.get("headers", ()))
        there = {name for name, _ in headers}
        message["headers"] = [*headers, *(pair for pair in _SECURITY if pair[0] not in there)]


def dressed(send: Send) -> Send:
    """The same for a reply made here."""

    async def sending(message: Message) -> None:
        _dress(message)
        await send(message)

    return sending


def name_of(host: bytes) -> str:
    """The name in a Host header, lower case, without its port; an IPv6 address keeps its brackets."""
    text = host.decode("latin-1").strip().lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdecimal() and (not name.count(":") or name.endswith("]")) else text
