"""Sign-ins at the provider that a browser has begun, without memory of them: the state carries a code of the head over the browser's cookie.

A browser that begins a sign-in gets a random value in a cookie. State, nonce and PKCE verifier follow from it by the head's secret, so that the
provider's answer counts in that browser only, for ATTEMPT_LIFETIME_S, and once. No flood of beginnings can push out those of others, and the
head may restart in between.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import NotSignedIn
from phalanx.core.hints import Hint, HintCode
from phalanx.ports.clock import Clock

ATTEMPT_LIFETIME_S: Final = 600.0  # for a person who looks for a second factor
USED_MAX: Final = 10_000  # states that are remembered as used; each cost its sender a sign-in that the head had begun
_RANDOM_BYTES: Final = 32
_STATE_MAX: Final = 200  # characters
_HINT: Final = Hint(HintCode.SIGN_IN_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInAttempt:
    """One attempt of one browser. `cookie`: the value that the browser keeps; `next_path`: where the sign-in leads."""

    cookie: str = field(repr=False)
    state: str = field(repr=False)
    nonce: str = field(repr=False)
    verifier: str = field(repr=False)
    next_path: str


class SignInAttempts:
    """Begins attempts, and recognises them. Use it on the event loop only. `secret`: of the head."""

    def __init__(self, secret: bytes, clock: Clock) -> None:
        self._key = hmac.digest(secret, b"phalanx sign-in attempt", "sha256")
        self._clock = clock
        self._used: dict[str, float] = {}  # digests of used states, oldest first, with the end of their lifetime

    def begin(self, next_path: str) -> SignInAttempt:
        """Return a new attempt."""
        cookie = f"{secrets.token_urlsafe(_RANDOM_BYTES)}.{_text(next_path.encode())}"
        begun = f"{int(self._clock.now_s()):x}.{secrets.token_urlsafe(16)}"
        return self._attempt(cookie, f"{begun}.{self._code('state', begun, cookie)}")

    def take(self, state: str, cookie: str | None) -> SignInAttempt:
        """Return the attempt of a state that the provider sent back with a browser. It is used up.

        Raises:
            NotSignedIn: another browser began it, or none; it is too old; or it was used already.
        """
        begun, _, code = state.rpartition(".")
        if not cookie or len(state) > _STATE_MAX or not state.isascii():
            raise NotSignedIn("this browser has begun no sign-in, or did so too long ago", hint=_HINT)
        if not hmac.compare_digest(code.encode(), self._code("state", begun, cookie).encode()):
            raise NotSignedIn("the answer of the sign-in provider belongs to another sign-in", hint=_HINT)
        now_s, ends_s = self._clock.now_s(), int(begun.partition(".")[0], 16) + ATTEMPT_LIFETIME_S
        if now_s >= ends_s:
            raise NotSignedIn("the sign-in took too long", hint=_HINT)
        used = hashlib.sha256(state.encode()).hexdigest()
        if used in self._used:
            raise NotSignedIn("this answer of the sign-in provider was used already", hint=_HINT)
        self._used = {key: until_s for key, until_s in self._used.items() if now_s < until_s}
        while len(self._used) >= USED_MAX:
            del self._used[next(iter(self._used))]
        self._used[used] = ends_s
        return self._attempt(cookie, state)

    def _attempt(self, cookie: str, state: str) -> SignInAttempt:
        return SignInAttempt(
            cookie=cookie,
            state=state,
            nonce=self._code("nonce", state, cookie),
            verifier=self._code("verifier", state, cookie),
            next_path=base64.urlsafe_b64decode(cookie.partition(".")[2] + "==").decode(),
        )

    def _code(self, purpose: str, begun: str, cookie: str) -> str:
        return _text(hmac.digest(self._key, json.dumps([purpose, begun, cookie]).encode(), "sha256"))


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
