"""The `phalanx join` command for the next server: printed by `up` and `join --print`; `join --new-token` replaces its token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from phalanx.core.errors import Conflict, NotFound, NotPermitted
from phalanx.wire.head_relay import KEY_FILE
from phalanx.wire.join import JoinArguments

if TYPE_CHECKING:
    from phalanx.client import Client

PATH: Final = "/v1/join"


def fetch_join_command(head: Client) -> str | None:
    """Return the command for the next server; None if servers cannot join this head, or the user may not see the join token.

    Raises:
        PhalanxError: the head does not answer.
    """
    try:
        return _command(head.transport.json("GET", PATH))
    except (NotFound, NotPermitted):  # an older head, or a user without the permission
        return None


def relay_problem(head: Client) -> tuple[str, str]:
    """Return the address of the head's relay and why the head has no connection to it; empty if it has one, or needs none, or who asks may not know.

    Raises:
        PhalanxError: the head does not answer.
    """
    try:
        line = msgspec.json.decode(head.transport.json("GET", PATH), type=JoinArguments)
    except (NotFound, NotPermitted):
        return "", ""
    return line.address, line.relay_problem


def relay_fix(address: str) -> str:
    """Return what to do about a relay to which the head has no connection."""
    port = address.rpartition(":")[2]
    return f"on that machine: phalanx relay --listen 0.0.0.0:{port}; its key must be that of this head, the file {KEY_FILE}"


def print_join_command(head: Client, *, renew_token: bool) -> None:
    """Print only the command on standard output; with `renew_token` revoke all earlier join tokens.

    Raises:
        PhalanxError: servers cannot join this head, or the user may not see the join token.
    """
    command = _command(
        head.transport.json("POST", f"{PATH}/renew") if renew_token else head.transport.json("GET", PATH)
    )
    if command is None:
        raise Conflict(
            "this head listens on loopback only: no other server can join it",
            hint="run phalanx down, then phalanx up --listen ADDRESS",
        )
    print(command)


def _command(reply: bytes) -> str | None:
    line = msgspec.json.decode(reply, type=JoinArguments)
    if not line.address:
        return None
    return f"phalanx join {line.address} --token {line.token} --fingerprint {line.fingerprint}"
