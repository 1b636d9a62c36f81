"""`phalanx relay`: carries the connections of servers and clients to a head that has no port of its own."""

from __future__ import annotations

import os
import sys

import click

from phalanx.cli.cluster.state_folder import home_folder
from phalanx.wire.head_relay import CONNECTIONS_MAX, CONNECTIONS_OF_A_SOURCE, KEY_FILE


@click.command()
@click.option(
    "--listen",
    required=True,
    metavar="ADDR:PORT",
    help="Address of this machine for servers, clients and the head; 0.0.0.0:7600 is all of IPv4.",
)
@click.option(
    "--key",
    metavar="FILE",
    help="File with the key that the head needs too; created if missing.  [relay.key in the state folder]",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 1_000_000),
    default=CONNECTIONS_MAX,
    show_default=True,
    help="Connections at once, in all.",
)
@click.option(
    "--per-source",
    type=click.IntRange(1, 1_000_000),
    default=CONNECTIONS_OF_A_SOURCE,
    show_default=True,
    help="Connections at once from one address.",
)
def relay(listen: str, key: str | None, connections: int, per_source: int) -> None:
    """Carry connections to a head without a public address; on the head: phalanx up --relay HOST:PORT.

    It stays in the foreground, holds no token, and reads none: TLS ends at the head.
    """
    path = os.path.abspath(key or os.path.join(home_folder(), KEY_FILE))
    words = ["--listen", listen, "--key", path, "--connections", str(connections), "--per-source", str(per_source)]
    command = [sys.executable, "-P", "-m", "phalanx.app.relay.server", *words]
    os.execv(sys.executable, command)  # noqa: S606  # no shell is wanted
