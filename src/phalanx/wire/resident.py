"""What an engine gives to a supervisor that stays on its node between attempts and that the engine cannot reach later, in one environment variable."""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import NodeId

RESIDENT_VARIABLE: Final = "PHALANX_RESIDENT"
GRACE_VARIABLE: Final = "PHALANX_RESIDENT_GRACE_S"
ADDRESS_VARIABLE: Final = "PHALANX_RESIDENT_ADDRESS"


class ResidentAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        token: of the node, for the head.
        engine: its name.
        ca_pem: the certificate of the head's CA; empty for plain HTTP on loopback.
        devices: how many GPUs it has.
        head_gone_s: it ends when the head has not answered for so long, in seconds.
        cpus, memory_bytes: what the engine assigned of the machine; 0: all that the node finds.
        signals_reach_ranks: the engine ends the node by a signal to all of its processes at once, the ranks among them.
    """

    node_id: NodeId
    token: str
    engine: str
    head_url: str
    ca_pem: str
    devices: int
    head_gone_s: float
    cpus: int = 0
    memory_bytes: int = 0
    signals_reach_ranks: bool = False


def encode_resident(assignment: ResidentAssignment) -> str:
    """Encode it for the variable."""
    return msgspec.json.encode(assignment).decode()


def decode_resident(text: str) -> ResidentAssignment:
    """Decode the variable.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is no assignment.
    """
    return msgspec.json.decode(text, type=ResidentAssignment)
