"""The file with the key that a relay and its head share; the relay creates it, and a person copies it to the head."""

from __future__ import annotations

import os
import stat
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.wire.head_relay import parse_key

_FILE_BYTES_MAX: Final = 200
_READABLE_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_relay_key(path: str) -> bytes:
    """Return the key in a file.

    Raises:
        BadRequest: the file has no key.
        BadFile: it cannot be read, or other accounts can read it.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & _READABLE_BY_OTHERS:
                raise BadFile(f"{path} can be read by other accounts", hint=f"chmod 600 {path}")
            return parse_key(file.read(_FILE_BYTES_MAX), path)
    except OSError as error:
        raise BadFile(
            f"{path}: {error.strerror}", hint="copy the file that phalanx relay created, or name it with --relay-key"
        ) from None
