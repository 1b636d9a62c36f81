"""Creates the client that a command uses."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

from phalanx.cli.errors import warn
from phalanx.core.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.connection.transport import Outage

PATIENCE_S: Final = 10.0  # retries of a head that restarts, at an interactive prompt
# Retries for `run` and `logs -f`: as long as jobs survive without a head (its long leases)
FOLLOW_PATIENCE_S: Final = 600.0
ANSWER_S: Final = 5.0  # timeout of a short call
PROVIDER_ANSWER_S: Final = 30.0  # timeout of a call in which the head asks the sign-in provider
PROBE_S: Final = 1.0  # timeout of a health check


def connect(
    retry_limit_s: float | None = None, answer_timeout_s: float | None = None, *, quiet: bool = False
) -> Client:
    """Return a client of this user's head; nothing is sent yet. `retry_limit_s`: how long a head that was reached before is retried.

    `quiet`: do not print that it is being retried.

    Raises:
        Unreachable: no head is known here, or the one of this folder has died. Checked before the token.
        BadRequest: a URL is malformed, or plain HTTP to another machine.
    """
    from phalanx.client import Client  # http.client takes 30 ms, not needed for `--help`
    from phalanx.wire.head_url import check_encrypted

    client = Client(
        retry_limit_s=PATIENCE_S if retry_limit_s is None else retry_limit_s,
        answer_timeout_s=ANSWER_S if answer_timeout_s is None else answer_timeout_s,
        on_outage=(lambda _: None) if quiet else report_outage,
    )
    for url in client.transport.known_urls():
        if not check_encrypted(url):
            _warn_plain_text(url)
    return client


def report_outage(outage: Outage | None) -> None:
    """Print that the head is being retried, or that it answers again."""
    from phalanx.core.units import format_duration

    if outage is None:
        warn("the head answers again")
    else:
        warn(
            f"{outage.message}; trying again for {format_duration(outage.left_s)} (Ctrl-C ends this command; jobs go on)"
        )


@functools.cache
def _warn_plain_text(url: str) -> None:
    warn(f"warning: {url} is not encrypted; anyone on the network can read the token")


def shares_file_system(client: Client) -> bool:
    """Return whether the head, and with it the nodes that share its file system, is on this machine.

    A forwarded port looks the same; use `--copy` there.
    """
    from phalanx.client.connection.clusters import chosen_cluster
    from phalanx.wire.head_url import is_loopback, split_url

    here = not os.environ.get("PHALANX_URL") and chosen_cluster() is None
    return here or is_loopback(split_url(client.transport.url())[1])


def probe_head_id(url: str) -> str:
    """Return the id of the head that answers at `url` within a second; "" if none does."""
    from phalanx.client import Client

    with Client(url, "none", retry_limit_s=0.0, answer_timeout_s=PROBE_S) as client:  # the health check needs no token
        try:
            return client.health().head_id
        except PhalanxError:
            return ""
