"""What an engine hands to the supervisors of one attempt, by one environment variable that all its nodes get alike.

It holds the key from which each makes its own token, so it goes by environment and never by argv, a comment or a script.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId

SEAT_VARIABLE: Final = "PHALANX_SEAT"
SEAT_CUT_OFF: Final = 69  # a supervisor's exit code: it does not reach the head from its node
SEAT_DISTRUSTS: Final = 76  # it does, and does not believe its certificate


class SeatPart(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part: by which address others reach its ranks, and how many devices it was given."""

    address: str
    devices: int


class SeatOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    Attributes:
        key: its `attempt_key`.
        ca_pem: the certificate of the head's CA, empty for plain HTTP on loopback.
        parting: a line for the shell by the reason for which the ranks were asked to end (a `wire.rank.StopReason` in lower case). The
            supervisor of the first node runs it before it leaves: an exit code cannot tell the engine's books of a cancel or a time limit.
    """

    job_id: JobId
    epoch: Epoch
    key: str
    engine: str
    head_url: str
    ca_pem: str
    parts: dict[NodeId, SeatPart]
    parting: dict[str, str] = {}


def encode_order(order: SeatOrder) -> str:
    """As text for the variable."""
    return msgspec.json.encode(order).decode()


def decode_order(text: str) -> SeatOrder:
    """The reverse.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(text, type=SeatOrder)
