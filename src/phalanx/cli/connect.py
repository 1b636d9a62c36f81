"""Which head the command line speaks to. Everything else about that is `phalanx.client`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client

_HERE: Final = ("http://127.", "http://localhost", "http://[::1]", "https://127.", "https://localhost", "https://[::1]")


PATIENCE_S: Final = 10.0  # for a head that restarts; a person at a prompt waits no longer without a word
FOLLOW_PATIENCE_S: Final = 600.0  # of `run` and `logs -f`: as long as jobs outlive their head (its long leases)


ANSWER_S: Final = 5.0  # of one short call
PROBE_S: Final = 1.0  # of the question whether a head is there at all


def connect(patience_s: float | None = None, answer_s: float | None = None) -> Client:
    """A client of this user's head; nothing is sent yet. It waits `patience_s` for a head that was there and went.

    Raises:
        Unreachable: no head is known here, or the one that was has died. Told before anything is said about tokens.
    """
    from phalanx.client import Client  # 30 ms of http.client that `--help` need not pay

    client = Client(
        patience_s=PATIENCE_S if patience_s is None else patience_s,
        answer_s=ANSWER_S if answer_s is None else answer_s,
    )
    client.transport.url()
    return client


def sees_our_files(client: Client) -> bool:
    """Whether the head, and with it the nodes that share its file system, is on this machine. A port forwarded from elsewhere looks
    the same: `--copy` is for that.
    """
    return not os.environ.get("PHALANX_URL") or client.transport.url().startswith(_HERE)


def healthy(url: str) -> str:
    """The id of the head that answers at `url` within a second; "" if none does."""
    from phalanx.client import Client

    with Client(url, "none", patience_s=0.0, answer_s=PROBE_S) as client:  # health takes no token
        try:
            return client.health().head_id
        except PhalanxError:
            return ""
