"""What opens a web program of a job in a browser: a ticket from the head's own pages, used once, and a cookie at a host name of the program's own.

Both belong to a session of the dashboard and to one program, and end with the session. They carry no right: each request is authorised again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.core.errors import NotSignedIn
from phalanx.ports.clock import Clock

TICKET_LIFETIME_S: Final = 60.0
TICKETS_PER_SESSION: Final = 10  # unused ones; the oldest is dropped
_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    session_key: str
    prefix: str
    path: str
    ends_s: float


class ProgramAccess:
    """All unused tickets, in memory. Use it on the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(_BYTES)
        self._tickets: dict[str, _Ticket] = {}  # by the SHA-256 of the ticket, oldest first

    def make_ticket(self, session: BrowserSession, prefix: str, path: str) -> str:
        """Return a ticket that opens `path` of the program with this prefix, for this session, within TICKET_LIFETIME_S."""
        now_s = self._clock.boottime_s()
        self._tickets = {key: one for key, one in self._tickets.items() if now_s < one.ends_s}
        own = [key for key, one in self._tickets.items() if one.session_key == session.key]
        for key in own[: max(0, len(own) + 1 - TICKETS_PER_SESSION)]:
            del self._tickets[key]
        ticket = secrets.token_urlsafe(_BYTES)
        self._tickets[_sha256(ticket)] = _Ticket(
            session_key=session.key, prefix=prefix, path=path, ends_s=now_s + TICKET_LIFETIME_S
        )
        return ticket

    def take_ticket(self, ticket: str, prefix: str) -> tuple[str, str]:
        """Return the key of the ticket's session, and its path. The ticket is used up.

        Raises:
            NotSignedIn: it is unknown, used already, too old, or for another program.
        """
        found = self._tickets.pop(_sha256(ticket), None)
        if found is None or found.prefix != prefix or self._clock.boottime_s() >= found.ends_s:
            raise NotSignedIn("this link was used already or has expired")
        return found.session_key, found.path

    def cookie_value(self, session_key: str, prefix: str) -> str:
        """Return the value of the cookie by which a browser's session opens the program with this prefix."""
        return f"{session_key}.{self._seal(session_key, prefix)}"

    def session_key_of(self, value: str, prefix: str) -> str:
        """Return the key of the session of a cookie.

        Raises:
            NotSignedIn: the cookie is of another program or head, or invalid.
        """
        session_key, _, seal = value.partition(".")
        if not hmac.compare_digest(seal.encode(), self._seal(session_key, prefix).encode()):
            raise NotSignedIn("the cookie of this page is not valid")
        return session_key

    def _seal(self, session_key: str, prefix: str) -> str:
        return hmac.new(self._secret, f"{session_key} {prefix}".encode(), hashlib.sha256).hexdigest()


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
