"""Which head the command line speaks to. Everything else about that is `phalanx.client`."""

from __future__ import annotations

import os
from typing import Final

from phalanx.client import Client
from phalanx.core.errors import PhalanxError

_HERE: Final = ("http://127.", "http://localhost", "http://[::1]", "https://127.", "https://localhost", "https://[::1]")


def connect() -> Client:
    """A client of this user's head; asks nothing yet."""
    return Client()


def sees_our_files(client: Client) -> bool:
    """Whether the head, and with it the nodes that share its file system, is on this machine. A port forwarded from elsewhere looks
    the same: `--copy` is for that.
    """
    return not os.environ.get("PHALANX_URL") or client.transport.url().startswith(_HERE)


def healthy(url: str) -> str:
    """The id of the head that answers at `url` now; "" if none does."""
    with Client(url, "none", patience_s=0.0) as client:  # health takes no token
        try:
            return client.health().head_id
        except PhalanxError:
            return ""
