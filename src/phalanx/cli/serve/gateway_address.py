"""The address of this user's gateway on this machine, for commands that use it: a file in the state folder."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from phalanx.client.connection.discovery import state_folder

_FILE: Final = "gateway-url"
_URL_MAX: Final = 300


def remember_gateway(url: str) -> None:
    """Store the address of a gateway that listens now."""
    with contextlib.suppress(OSError):  # it serves without
        path = os.path.join(state_folder(), _FILE)
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(url)
        os.replace(file.name, path)


def forget_gateway(url: str) -> None:
    """Remove the address, unless another gateway has stored its own."""
    if known_gateway() == url:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(state_folder(), _FILE))


def known_gateway() -> str:
    """Return the stored address; "" for none. The gateway may have died since."""
    try:
        with open(os.path.join(state_folder(), _FILE), encoding="utf-8") as file:
            return file.read(_URL_MAX).strip()
    except (OSError, UnicodeDecodeError):
        return ""
