"""Records by which a command line gets a token for a person who signs in."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import TokenId, UserId


class DeviceLoginStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`note`: what the command line says of itself and its machine; the head's page shows it."""

    note: str = ""


class DeviceLogin(msgspec.Struct, frozen=True, kw_only=True):
    """A code that the person types in at the provider, or at the head if the URLs are paths. `handle`: to ask with whether they have; `complete_url` contains the code."""

    handle: str
    user_code: str
    verification_url: str
    complete_url: str
    expires_in_s: float
    interval_s: float


class DeviceLoginBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The handle of a device login. `note`: of the token."""

    handle: str
    note: str = ""


class BrowserLoginBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code that a browser brought, and the verifier whose SHA-256 (base64url) the browser's address had. `note`: of the token."""

    code: str
    verifier: str
    note: str = ""


class LoginReply(msgspec.Struct, frozen=True, kw_only=True):
    """The token. Until the code is typed in, `pending` is true and the rest is empty."""

    pending: bool = False
    secret: str = ""
    user: UserId = UserId("")
    token_id: TokenId = TokenId("")
    expires_s: float | None = None
