"""Encrypts what the head must keep but the database must not show: refresh tokens of the sign-in provider.

The key follows from the head's secret, which is not in the database of a single head. A backup alone opens nothing.
"""

from __future__ import annotations

import base64
import hmac
import json

from phalanx.core.ids import UserId


class TokenSeal:
    """Seals texts. `secret`: of the head. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._key = base64.urlsafe_b64encode(hmac.digest(secret, b"phalanx refresh tokens", "sha256"))

    def seal(self, user_id: UserId, token: str) -> str:
        """Return the token sealed for a user; "" stays ""."""
        from cryptography.fernet import Fernet  # 60 ms that a head without a provider does not need

        return Fernet(self._key).encrypt(json.dumps([user_id, token]).encode()).decode() if token else ""

    def open(self, user_id: UserId, sealed: str) -> str:
        """Return the token; "" if it was sealed for another user or with another secret."""
        from cryptography.fernet import Fernet, InvalidToken

        try:
            owner, token = json.loads(Fernet(self._key).decrypt(sealed.encode()))
        except (InvalidToken, ValueError):
            return ""
        return str(token) if owner == user_id else ""
