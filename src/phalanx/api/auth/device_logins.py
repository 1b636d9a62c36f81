"""Logins of command lines on machines without a browser: a short code that a signed-in person confirms at this head (RFC 8628 in spirit).

In memory: a restart of the head ends them. The command line holds a handle of 256 bits, of which here is only the SHA-256; the code is what the
person reads. It is short, so wrong ones are counted by user, waiting logins are bounded by address and in all, and each counts once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.access.caller import Caller
from phalanx.core.errors import NotFound, NotPermitted, NotSignedIn, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import UserId
from phalanx.ports.clock import Clock

LIFETIME_S: Final = 600.0
INTERVAL_S: Final = 2.0  # between questions of a command line
ALPHABET: Final = (
    "BCDFGHJKLMNPQRSTVWXZ"  # no vowels, no digits: no words, and nothing to confuse. Source: RFC 8628, 6.1
)
CODE_LETTERS: Final = 8  # 20**8 codes: with 1,000 waiting, 10 guesses hit one with 4 in 10 million
WAITING_MAX: Final = 1000
WAITING_PER_ADDRESS: Final = 20
WRONG_CODES_MAX: Final = 10  # of one user in LIFETIME_S
_NOTE_MAX: Final = 200  # characters
_AGAIN: Final = Hint(HintCode.LOGIN_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLogin:
    """One login that waits.

    Attributes:
        code: as people read it.
        note: what the command line says of itself and its machine; not verified.
        address: from which it asked.
        ends_s: in seconds of CLOCK_BOOTTIME.
        token_sha256: of the token whose holder allowed it; "" until then.
        refused: whether somebody refused it.
    """

    code: str
    note: str
    address: str
    ends_s: float
    token_sha256: str = ""
    refused: bool = False


class DeviceLogins:
    """All waiting logins. Use it on the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, WaitingLogin] = {}  # by the SHA-256 of the handle, oldest first
        self._wrong: Counter[UserId] = Counter()
        self._wrong_since_s = 0.0

    def start(self, note: str, address: str) -> tuple[str, str]:
        """Return the handle and the code of a new login.

        Raises:
            TryLater: too many wait already, from this address or in all.
        """
        self._drop_ended()
        here = sum(one.address == address for one in self._waiting.values())
        if here >= WAITING_PER_ADDRESS or len(self._waiting) >= WAITING_MAX:
            raise TryLater(
                "too many logins wait for their codes to be confirmed", hint="wait 10 minutes, or confirm one"
            )
        handle = secrets.token_urlsafe(32)
        taken = {one.code for one in self._waiting.values()}
        while (code := _new_code()) in taken:
            pass
        shown = "".join(letter if letter.isprintable() else "?" for letter in note[:_NOTE_MAX])
        self._waiting[_sha256(handle)] = WaitingLogin(
            code=code, note=shown, address=address, ends_s=self._clock.boottime_s() + LIFETIME_S
        )
        return handle, code

    def find(self, code: str, user: UserId) -> WaitingLogin:
        """Return the login with this code, typed in by a user in any case and with or without the dash.

        Raises:
            NotFound: no login waits with it.
            TryLater: the user typed in too many wrong ones.
        """
        return self._waiting[self._key_of(code, user)]

    def decide(self, code: str, caller: Caller, *, allow: bool) -> WaitingLogin:
        """Allow or refuse a login, for good.

        Raises:
            NotFound, TryLater: as `find`.
        """
        key = self._key_of(code, caller.user)
        token = caller.sha256 if allow else ""
        self._waiting[key] = replace(self._waiting[key], token_sha256=token, refused=not allow)
        return self._waiting[key]

    def take(self, handle: str) -> str:
        """Return the SHA-256 of the token whose holder allowed this login, which is used up by that; "" while it waits.

        Raises:
            NotSignedIn: this head did not start it, or it was used or took too long.
            NotPermitted: somebody refused it.
        """
        self._drop_ended()
        key = _sha256(handle)
        found = self._waiting.get(key)
        if found is None:
            raise NotSignedIn("this login was used already, has expired, or was not started at this head", hint=_AGAIN)
        if found.refused:
            del self._waiting[key]
            raise NotPermitted("the login was refused at the page of the head")
        if found.token_sha256:
            del self._waiting[key]
        return found.token_sha256

    def _key_of(self, code: str, user: UserId) -> str:
        self._drop_ended()
        if self._wrong[user] >= WRONG_CODES_MAX:
            raise TryLater("you typed in too many wrong codes", hint="wait 10 minutes")
        typed = "".join(letter for letter in code.upper() if letter in ALPHABET)
        for key, one in self._waiting.items():
            decided = one.refused or one.token_sha256
            if not decided and secrets.compare_digest(one.code.replace("-", ""), typed):
                return key
        self._wrong[user] += 1
        raise NotFound(
            "no command line waits with this code", hint="it is valid for 10 minutes and once: look for a typing error"
        )

    def _drop_ended(self) -> None:
        now_s = self._clock.boottime_s()
        self._waiting = {key: one for key, one in self._waiting.items() if now_s < one.ends_s}
        if now_s - self._wrong_since_s >= LIFETIME_S:
            self._wrong, self._wrong_since_s = Counter(), now_s


def _new_code() -> str:
    letters = "".join(secrets.choice(ALPHABET) for _ in range(CODE_LETTERS))
    return f"{letters[:4]}-{letters[4:]}"


def _sha256(handle: str) -> str:
    return hashlib.sha256(handle.encode("utf-8", "surrogateescape")).hexdigest()
