"""The outermost layer: whose page may speak to us, and that nothing leaves without our shape. Plain ASGI, a few dictionary look-ups a request.

Host and Origin are checked because a browser on the user's machine reaches loopback too: a page that rebinds its DNS name to
127.0.0.1 carries its own name in Host, and any page's script carries its Origin.
"""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.api.errors import error_response, failure_response
from phalanx.core.errors import NotPermitted

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
            await error_response(refusal)(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if begun:
                raise  # the caller sees a broken reply, which it is
            await failure_response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> NotPermitted | None:
        host = origin = b""
        hosts = 0
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
                hosts += 1
            elif name == b"origin":
                origin = value
        if hosts == 1 and (host, origin) in self._known:
            return None
        if hosts != 1 or name_of(host) not in self._hosts:
            return NotPermitted(f"host {host.decode('latin-1')!r} is not this head",
                                hint="use the URL that `phalanx up` printed")  # fmt: skip
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


def name_of(host: bytes) -> str:
    """The name in a Host header, lower case, without its port; an IPv6 address keeps its brackets."""
    text = host.decode("latin-1").strip().lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdecimal() and (not name.count(":") or name.endswith("]")) else text
