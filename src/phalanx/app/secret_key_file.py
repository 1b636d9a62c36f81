"""The file with the keys that encrypt secrets: in the head's state folder, or given to it. One key a line; the first encrypts, all decrypt."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from dataclasses import dataclass
from typing import Final

from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import Conflict

KEY_FILE: Final = "secrets.key"
CREDENTIAL: Final = "phalanx-secrets-key"
"""Name of the credential that a service manager may pass (systemd.exec(5), LoadCredential)."""
CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"
_KEY_BYTES: Final = 32
_FILE_BYTES_MAX: Final = 1 << 16
_READABLE_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_MAKE: Final = "openssl rand -base64 32 makes a key"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeyFile:
    """The keys of one head.

    Attributes:
        home: its state folder, for keys of its own.
        given: path of the file that it was given; empty for its own.
        shares_store: whether other heads read the same database: they could not read keys of its own.
    """

    home: StateFolder
    given: str = ""
    shares_store: bool = False

    def read(self) -> tuple[bytes, ...]:
        """Return the keys; empty before the first is made.

        Raises:
            Conflict: the file cannot be read, or the heads of a shared database have not been given one.
        """
        if not self.given and self.shares_store:
            raise Conflict(
                "several heads may share this database, so secrets need a key file that all of them have",
                hint=f"start each head with phalanx up --secrets-key FILE; {_MAKE}",
            )
        path = self.given or self.home.path_of(KEY_FILE)
        try:
            with open(path, encoding="ascii") as file:
                self._check_mode(path, file.fileno())
                text = file.read(_FILE_BYTES_MAX)
        except FileNotFoundError:
            if self.given:
                raise Conflict(f"key file {path} does not exist", hint=_MAKE) from None
            return ()
        except (OSError, ValueError) as error:
            raise Conflict(f"key file {path} cannot be read: {type(error).__name__}") from error
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        keys = tuple(_parse_key(line, f"{path} line {number}") for number, line in enumerate(lines, 1))
        if self.given and not keys:
            raise Conflict(f"key file {path} has no key", hint=_MAKE)
        return keys

    def add(self) -> None:
        """Make a new first key, durably.

        Raises:
            Conflict: the keys were given to this head.
        """
        if self.given:
            raise Conflict(f"key file {self.given} was given to this head, which does not change it")
        self._write((secrets.token_bytes(_KEY_BYTES), *self.read()))

    def drop_old(self) -> None:
        """Drop all keys but the first, if this head made them."""
        keys = self.read()
        if not self.given and len(keys) > 1:
            self._write(keys[:1])

    def _write(self, keys: tuple[bytes, ...]) -> None:
        self.home.write_private(KEY_FILE, "".join(f"{base64.b64encode(key).decode()}\n" for key in keys))

    def _check_mode(self, path: str, descriptor: int) -> None:
        """Check that no other account can read the file; a service manager guards the folder of its credentials itself.

        Raises:
            Conflict: one can.
        """
        folder = os.environ.get(CREDENTIALS_VARIABLE, "")
        if os.fstat(descriptor).st_mode & _READABLE_BY_OTHERS and os.path.dirname(path) != folder.rstrip("/"):
            raise Conflict(f"key file {path} can be read by other accounts", hint=f"chmod 600 {path}")


def given_key_file(option: str) -> str:
    """Return the path of the given key file: that of the option, else the service manager's credential; empty without one."""
    if option:
        return os.path.abspath(option)
    folder = os.environ.get(CREDENTIALS_VARIABLE, "")
    path = os.path.join(folder, CREDENTIAL)
    return path if folder and os.path.exists(path) else ""


def _parse_key(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text, altchars=b"-_" if set(text) & set("-_") else None, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise Conflict(f"key file {where} is not a key of {_KEY_BYTES} bytes in base64", hint=_MAKE)
    return key
