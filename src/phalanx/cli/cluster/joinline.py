"""The line that brings the next server in, as the head here says it: printed by `up` and by `join --print`, renewed by `join --new-token`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from phalanx.core.errors import Conflict, NotFound, NotPermitted
from phalanx.wire.join import JoinLine

if TYPE_CHECKING:
    from phalanx.client import Client

PATH: Final = "/v1/join"


def line_of(head: Client) -> str | None:
    """What to paste on the next server; None where this head takes none in, or this user may not know.

    Raises:
        PhalanxError: the head does not answer.
    """
    try:
        return _words(head.transport.json("GET", PATH))
    except (NotFound, NotPermitted):  # a head of the release before, or a token that may not know
        return None


def print_line(head: Client, *, renew: bool) -> None:
    """Print the line alone on standard output; with `renew` all that were printed before are good no more.

    Raises:
        PhalanxError: the head takes none in, or this user may not know.
    """
    words = _words(head.transport.json("POST", f"{PATH}/renew") if renew else head.transport.json("GET", PATH))
    if words is None:
        raise Conflict(
            "this head listens on loopback alone: no other server can join it",
            hint="phalanx down, then phalanx up --listen ADDRESS",
        )
    print(words)


def _words(reply: bytes) -> str | None:
    line = msgspec.json.decode(reply, type=JoinLine)
    if not line.address:
        return None
    return f"phalanx join {line.address} --token {line.token} --fingerprint {line.fingerprint}"
