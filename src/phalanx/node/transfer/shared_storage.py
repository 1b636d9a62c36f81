"""Checks whether this node sees the head's folders, by nonce files that the head wrote into them; runs before each registration."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from phalanx.node.head_link.head_connection import HeadConnection, RegistrationRequired, RequestRejected
from phalanx.wire.stored_files import NONCE_FILE, StorageReply

_ASK_S: Final = 5.0
_NONCE_BYTES_MAX: Final = 256


def check_head_files(connection: HeadConnection) -> bool | None:
    """Whether checkpoints and outputs are visible here under the head's paths; None if the head cannot tell (an earlier release).

    Raises:
        HeadUnavailable: no answer.
    """
    try:
        body = connection.call("GET", "/v1/node/storage", timeout_s=_ASK_S)
        reply = msgspec.json.decode(body, type=StorageReply)
    except (RequestRejected, RegistrationRequired, msgspec.MsgspecError):
        return None
    return all(_read(root) == reply.nonce for root in (reply.checkpoint_root, reply.output_root))


def _read(root: str) -> str:
    try:
        with open(os.path.join(root, NONCE_FILE), encoding="ascii") as file:
            return file.read(_NONCE_BYTES_MAX)
    except (OSError, UnicodeDecodeError):
        return ""
