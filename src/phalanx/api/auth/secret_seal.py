"""Encrypts the values of jobs' secrets with AES-256-GCM. The keys lie outside the database; a backup alone opens nothing.

The id of a secret (scope, name and owner) is the associated data: a value that is moved to another record does not open.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import replace
from typing import Final, Protocol

from phalanx.core.errors import Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.secret import Secret

_NONCE_BYTES: Final = 12  # NIST SP 800-38D recommends 96 bits
_KEY_ID_CHARS: Final = 16


class SecretKeys(Protocol):
    """The head's keys for secrets. The first encrypts; all decrypt."""

    def read(self) -> tuple[bytes, ...]:
        """Return the keys; empty before the first is made.

        Raises:
            Conflict: they cannot be read, or this head must be given keys.
        """
        ...

    def add(self) -> None:
        """Make a new first key, durably.

        Raises:
            Conflict: the keys were given to this head, which may not change them.
        """
        ...

    def drop_old(self) -> None:
        """Drop all keys but the first, if this head made them."""
        ...

    @property
    def given(self) -> str:
        """The file from which this head was given its keys; empty if it made them."""
        ...


class SecretSeal:
    """Seals and opens values. Thread-safe."""

    def __init__(self, keys: SecretKeys) -> None:
        self._keys = keys

    def seal(self, secret: Secret, value: str) -> Secret:
        """Return the secret with this value, encrypted with the first key; one is made if there is no key yet.

        Raises:
            Conflict: the keys cannot be read.
        """
        from cryptography.hazmat.primitives.ciphers.aead import (
            AESGCM,  # 60 ms that a head without secrets does not need
        )

        if not self._keys.read():
            self._keys.add()
        key, nonce = self._keys.read()[0], secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + AESGCM(key).encrypt(nonce, value.encode(), secret.id.encode())
        return replace(secret, sealed=base64.b64encode(sealed).decode(), key=key_id(key))

    def open(self, secret: Secret) -> str:
        """Return the value.

        Raises:
            Conflict: no key of this head opens it.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = next((one for one in self._keys.read() if key_id(one) == secret.key), None)
        try:
            if key is not None:
                sealed = base64.b64decode(secret.sealed, validate=True)
                data = AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], secret.id.encode())
                return data.decode()
        except (InvalidTag, binascii.Error, ValueError):
            pass
        why = f"key {secret.key} is not among the head's keys" if key is None else "its record was changed"
        raise Conflict(
            f"secret {secret.name} of {secret.scope} {secret.owner} cannot be decrypted: {why}",
            hint=Hint(HintCode.RESET_SECRET, secret=secret.name),
        )

    def begin_rotation(self) -> None:
        """Make a new first key, unless the keys were given to this head."""
        if not self._keys.given:
            self._keys.add()

    def end_rotation(self) -> None:
        """Drop the old keys, if this head made them."""
        self._keys.drop_old()

    @property
    def current(self) -> str:
        """The id of the first key; empty without one."""
        keys = self._keys.read()
        return key_id(keys[0]) if keys else ""

    @property
    def given(self) -> str:
        """The file from which this head was given its keys; empty if it makes them."""
        return self._keys.given


def key_id(key: bytes) -> str:
    """Return the id of a key: the beginning of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:_KEY_ID_CHARS]
