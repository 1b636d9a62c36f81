"""Creates the client that a command uses."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

from phalanx.cli.faults import warn
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client

PATIENCE_S: Final = 10.0  # retries of a head that restarts, at an interactive prompt
# Retries for `run` and `logs -f`: as long as jobs survive without a head (its long leases)
FOLLOW_PATIENCE_S: Final = 600.0
ANSWER_S: Final = 5.0  # timeout of a short call
PROBE_S: Final = 1.0  # timeout of a health check


def connect(patience_s: float | None = None, answer_s: float | None = None) -> Client:
    """Return a client of this user's head; nothing is sent yet. `patience_s`: how long a head that was reached before is retried.

    Raises:
        Unreachable: no head is known here, or the one of this folder has died. Checked before the token.
        BadRequest: a URL is malformed, or plain HTTP to another machine.
    """
    from phalanx.client import Client  # http.client takes 30 ms, not needed for `--help`
    from phalanx.client.discovery import check_encrypted

    client = Client(
        patience_s=PATIENCE_S if patience_s is None else patience_s,
        answer_s=ANSWER_S if answer_s is None else answer_s,
    )
    for url in client.transport.known_urls():
        if not check_encrypted(url):
            _warn_plain_text(url)
    return client


@functools.cache
def _warn_plain_text(url: str) -> None:
    warn(f"warning: {url} is not encrypted; anyone on the network can read the token")


def sees_our_files(client: Client) -> bool:
    """Return whether the head, and with it the nodes that share its file system, is on this machine.

    A forwarded port looks the same; use `--copy` there.
    """
    from phalanx.client.discovery import is_loopback, split_url

    return not os.environ.get("PHALANX_URL") or is_loopback(split_url(client.transport.url())[1])


def healthy(url: str) -> str:
    """Return the id of the head that answers at `url` within a second; "" if none does."""
    from phalanx.client import Client

    with Client(url, "none", patience_s=0.0, answer_s=PROBE_S) as client:  # the health check needs no token
        try:
            return client.health().head_id
        except PhalanxError:
            return ""
