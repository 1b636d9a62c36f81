"""The order that an engine gives to the supervisors of one attempt, in one environment variable with the same value on all nodes.

It holds the key from which each supervisor derives its own token, so it is never passed by argv, a comment or a script.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId

SEAT_VARIABLE: Final = "PHALANX_SEAT"
SEAT_RANK_VARIABLE: Final = "PHALANX_SEAT_RANK"  # the node rank of a supervisor whose node the engine does not choose
SEAT_HEAD_UNREACHABLE: Final = 69  # a supervisor's exit code: it cannot reach the head from its node
SEAT_CERTIFICATE_REJECTED: Final = 76  # a supervisor's exit code: it rejects the head's certificate

SEAT_IMAGE_UNFIT: Final = 78  # the exit code of `app.supervisor_start`: the pod's image cannot run the supervisor


class SeatNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part: the address where others reach its ranks, and the number of its devices."""

    address: str
    devices: int


class SeatAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt.

    Attributes:
        key: its `attempt_key`.
        ca_pem: the certificate of the head's CA; empty for plain HTTP on loopback.
        exit_commands: shell lines by stop reason (a `wire.rank.RankStopReason` in lower case). The first node's supervisor runs its line before it
            exits, because an exit code cannot record a cancel or a time limit in the engine's accounting.
    """

    job_id: JobId
    epoch: Epoch
    key: str
    engine: str
    head_url: str
    ca_pem: str
    nodes: dict[NodeId, SeatNode]
    exit_commands: dict[str, str] = {}


def encode_assignment(order: SeatAssignment) -> str:
    """Encode the order for the variable."""
    return msgspec.json.encode(order).decode()


def decode_assignment(text: str) -> SeatAssignment:
    """Decode the variable.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is not an order.
    """
    return msgspec.json.decode(text, type=SeatAssignment)
