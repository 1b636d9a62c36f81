"""What an engine hands to the supervisors of one attempt, by one environment variable that all its nodes get alike.

It holds the key from which each makes its own token, so it goes by environment and never by argv, a comment or a script.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId

SEAT_VARIABLE: Final = "PHALANX_SEAT"


class SeatPart(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part: by which address others reach its ranks, and how many devices it was given."""

    address: str
    devices: int


class SeatOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. `key` is its `attempt_key`; `ca_pem` the certificate of the head's CA, empty for plain HTTP on loopback."""

    job_id: JobId
    epoch: Epoch
    key: str
    engine: str
    head_url: str
    ca_pem: str
    parts: dict[NodeId, SeatPart]


def encode_order(order: SeatOrder) -> str:
    """As text for the variable."""
    return msgspec.json.encode(order).decode()


def decode_order(text: str) -> SeatOrder:
    """The reverse.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(text, type=SeatOrder)
