"""Which head the command line speaks to. Everything else about that is `phalanx.client`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeVar

from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client

T = TypeVar("T")
_HERE: Final = ("http://127.", "http://localhost", "http://[::1]", "https://127.", "https://localhost", "https://[::1]")


def connect() -> Client:
    """A client of this user's head; nothing is sent yet.

    Raises:
        Unreachable: no head is known here, or the one that was has died. Told before anything is said about tokens.
    """
    from phalanx.client import Client  # 30 ms of http.client that `--help` need not pay

    client = Client()
    client.transport.url()
    return client


def sees_our_files(client: Client) -> bool:
    """Whether the head, and with it the nodes that share its file system, is on this machine. A port forwarded from elsewhere looks
    the same: `--copy` is for that.
    """
    return not os.environ.get("PHALANX_URL") or client.transport.url().startswith(_HERE)


def healthy(url: str) -> str:
    """The id of the head that answers at `url` now; "" if none does."""
    from phalanx.client import Client

    with Client(url, "none", patience_s=0.0) as client:  # health takes no token
        try:
            return client.health().head_id
        except PhalanxError:
            return ""


class Head:
    """A head by URL and token, asked by route; for the demo, whose head is its own."""

    def __init__(self, url: str, token: str, local: bool) -> None:
        del local
        from phalanx.client import Client

        self.client = Client(url, token)

    def get(self, kind: type[T], path: str, /, **query: object) -> T:
        """The record at a route."""
        from urllib.parse import urlencode

        import msgspec

        asked = {name: value for name, value in query.items() if value is not None and value != ""}
        payload = self.client.transport.json("GET", path + ("?" + urlencode(asked) if asked else ""))
        return msgspec.json.decode(payload, type=kind)

    def post(self, kind: type[T], path: str, body: object) -> T:
        """The record that a route answers with."""
        import msgspec

        return msgspec.json.decode(self.client.transport.json("POST", path, msgspec.json.encode(body)), type=kind)
