"""Tokens of people who sign in: for a command line, and the one to which their sessions of browsers at the provider belong."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.ids import TokenId, UserId
from phalanx.core.work.users import Action, Token

TOKEN_LIFETIME_S: Final = 90 * 86400.0  # of a token made without an expiry
SECRET_BYTES: Final = 32
NOTE_MAX: Final = 200  # characters


def login_token(
    services: HeadServices,
    user: UserId,
    note: str,
    *,
    ends_s: float | None = None,
    scope: frozenset[Action] = frozenset(),
    made_by: TokenId | None = None,
) -> tuple[str, Token]:
    """Return a new secret and its token, not recorded yet. It ends at `ends_s` at the latest, and within the operator's maximum."""
    now_s = services.clock.now_s()
    most_s = services.token_lifetime_max_s
    until_s = now_s + (TOKEN_LIFETIME_S if most_s is None else min(TOKEN_LIFETIME_S, most_s))
    secret = secrets.token_urlsafe(SECRET_BYTES)
    token = Token(
        id=TokenId(secrets.token_hex(6)),
        user=user,
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        created_s=now_s,
        expires_s=until_s if ends_s is None else min(until_s, ends_s),
        scope=scope,
        note=note[:NOTE_MAX],
        made_by=made_by,
    )
    return secret, token


def browser_token_id(user_id: UserId) -> TokenId:
    """Return the id of the token to which the user's sessions at the provider belong. Ids of other tokens are 12 digits without a word."""
    return TokenId(f"browser-{hashlib.sha256(user_id.encode()).hexdigest()[:12]}")
