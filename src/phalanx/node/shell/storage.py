"""Checks whether this node sees the head's folders, by nonce files that the head wrote into them; runs before each registration."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from phalanx.node.shell.link import Connection, HelloWanted, Rejected
from phalanx.wire.kept import NONCE_FILE, StorageReply

_ASK_S: Final = 5.0
_NONCE_BYTES_MAX: Final = 256


def sees_head_files(connection: Connection) -> bool | None:
    """Whether checkpoints and outputs are visible here under the head's paths; None if the head cannot tell (an earlier release).

    Raises:
        HeadAway: no answer.
    """
    try:
        body = connection.call("GET", "/v1/node/storage", timeout_s=_ASK_S)
        reply = msgspec.json.decode(body, type=StorageReply)
    except (Rejected, HelloWanted, msgspec.MsgspecError):
        return None
    return all(_read(root) == reply.nonce for root in (reply.checkpoint_root, reply.output_root))


def _read(root: str) -> str:
    try:
        with open(os.path.join(root, NONCE_FILE), encoding="ascii") as file:
            return file.read(_NONCE_BYTES_MAX)
    except (OSError, UnicodeDecodeError):
        return ""
