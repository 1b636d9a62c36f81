"""Sessions of browsers, and the one-time codes that open them. In memory: a restart of the head signs every browser out.

A session belongs to one token, and has its rights: it ends with the token, and with its user. The browser holds a secret in a cookie; here
are only the SHA-256 of secrets and codes. Each sign-in makes a new secret, so that no one can choose it in advance.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass
from typing import Final

from phalanx.core.access.caller import Caller
from phalanx.core.errors import NotSignedIn
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import UserId
from phalanx.ports.clock import Clock

CODE_LIFETIME_S: Final = 60.0  # of a one-time code: for opening a link that was just printed
SESSION_LIFETIME_S: Final = 12 * 3600.0  # a working day
CODES_PER_USER: Final = 10  # unused ones; the oldest is dropped
SESSIONS_PER_USER: Final = 20  # the oldest is closed
_SECRET_BYTES: Final = 32
_HINT: Final = Hint(HintCode.OPEN_DASHBOARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSession:
    """An open session.

    Attributes:
        key: the SHA-256 of its secret.
        token_sha256: of the token whose rights it has.
        csrf: the value that each change must repeat in a header or form field; no other site can read it.
        ends_s: when it ends, in seconds of CLOCK_BOOTTIME.
    """

    key: str
    user: UserId
    token_sha256: str
    csrf: str
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    user: UserId
    token_sha256: str
    ends_s: float
    challenge: str


class BrowserSessions:
    """All sessions and unused codes. Use it on the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, BrowserSession] = {}  # by the SHA-256 of the secret, oldest first
        self._codes: dict[str, _Code] = {}  # by the SHA-256 of the code, oldest first

    def make_code(self, caller: Caller, challenge: str = "") -> str:
        """Return a code that opens one session of the caller's token, within CODE_LIFETIME_S.

        With the SHA-256 of a verifier (base64url) it opens no session, but gives one token to the holder of the verifier.
        """
        now_s = self._clock.boottime_s()
        self._codes = {key: one for key, one in self._codes.items() if now_s < one.ends_s}
        own = [key for key, one in self._codes.items() if one.user == caller.user]
        for key in own[: max(0, len(own) + 1 - CODES_PER_USER)]:
            del self._codes[key]
        code = secrets.token_urlsafe(_SECRET_BYTES)
        self._codes[_sha256(code)] = _Code(
            user=caller.user, token_sha256=caller.sha256, ends_s=now_s + CODE_LIFETIME_S, challenge=challenge
        )
        return code

    def take_code(self, code: str, challenge: str = "") -> str:
        """Return the SHA-256 of the code's token. The code is used up. `challenge`: of the verifier; "" for a code that opens a session.

        Raises:
            NotSignedIn: it is unknown, used already, too old, or for another verifier.
        """
        found = self._codes.pop(_sha256(code), None)
        if found is None or self._clock.boottime_s() >= found.ends_s or found.challenge != challenge:
            raise NotSignedIn("the sign-in link was used already or has expired", hint=_HINT)
        return found.token_sha256

    def open(self, caller: Caller) -> tuple[str, BrowserSession]:
        """Open a session of the caller's token; return its secret and the session."""
        now_s = self._clock.boottime_s()
        self._sessions = {key: one for key, one in self._sessions.items() if now_s < one.ends_s}
        own = [key for key, one in self._sessions.items() if one.user == caller.user]
        for key in own[: max(0, len(own) + 1 - SESSIONS_PER_USER)]:
            del self._sessions[key]
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        session = BrowserSession(
            key=_sha256(secret),
            user=caller.user,
            token_sha256=caller.sha256,
            csrf=secrets.token_urlsafe(_SECRET_BYTES),
            ends_s=now_s + SESSION_LIFETIME_S,
        )
        self._sessions[session.key] = session
        return secret, session

    def find(self, secret: str) -> BrowserSession:
        """Return the session with that secret.

        Raises:
            NotSignedIn: no such session, or it has ended.
        """
        return self.require_open(_sha256(secret))

    def require_open(self, key: str) -> BrowserSession:
        """Return the session with that key.

        Raises:
            NotSignedIn: no such session, or it has ended.
        """
        session = self._sessions.get(key)
        if session is None or self._clock.boottime_s() >= session.ends_s:
            raise NotSignedIn("the session of this browser has ended", hint=_HINT)
        return session

    def close(self, secret: str) -> None:
        """Close a session, if it exists."""
        self._sessions.pop(_sha256(secret), None)


def code_challenge(verifier: str) -> str:
    """Return the SHA-256 of a verifier in base64url, as PKCE has it."""
    digest = hashlib.sha256(verifier.encode("utf-8", "surrogateescape")).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
