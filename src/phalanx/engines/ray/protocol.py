"""What the head and its Ray driver say to each other: one JSON object a line, over the driver's stdin and stdout.

The driver keeps no state that the head needs: a new one finds the actors again by their names.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import NodeId, SupervisorId

LINE_BYTES_MAX: Final = 1 << 22  # an inventory of 10,000 nodes is some 3 MB


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the Ray cluster. `virtual`: devices it pretends to have, None for one that has what NVML finds; `why`: of its death."""

    node_id: NodeId
    ray_id: str
    address: str
    alive: bool
    gpus: float
    virtual: int | None = None
    why: str = ""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor needs to bring a supervisor up. `environment` says where the head is; `cluster` names the folder it keeps."""

    node_id: NodeId
    token: str
    environment: dict[str, str]
    ca_pem: str
    virtual: int | None
    address: str
    cluster: str


# ------------------------------------------------------------------------------------------------------- head to driver


class Carry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a supervisor to this node, or see that one lives there."""

    node: RayNode
    what: Carried


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the node's supervisor and all under it, and give its GPUs back to Ray."""

    node_id: NodeId


Order = Carry | Release

# ------------------------------------------------------------------------------------------------------- driver to head


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver speaks with Ray."""

    version: str


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The Ray cluster's nodes, told when they change."""

    nodes: list[RayNode]


class Died(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's supervisor ended and nothing of it is left. It may be told when another has long been there: `supervisor_id` says which it was.

    None from an actor of a release before this one.
    """

    node_id: NodeId
    why: str
    supervisor_id: SupervisorId | None = None


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing of the node's supervisor is left, and its actor is gone."""

    node_id: NodeId


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For the head's log; with a node, that node could not be carried. `fatal`: the driver ends."""

    text: str
    node_id: NodeId | None = None
    fatal: bool = False


Tiding = Connected | Seen | Died | Released | Trouble

_encoder: Final = msgspec.json.Encoder()
_orders: Final = msgspec.json.Decoder(Order)
_tidings: Final = msgspec.json.Decoder(Tiding)


def line_of(message: Order | Tiding) -> bytes:
    """The message as a line."""
    return _encoder.encode(message) + b"\n"


def order_of(line: bytes) -> Order:
    """The order in a line.

    Raises:
        msgspec.MsgspecError: there is none.
    """
    order: Order = _orders.decode(line)
    return order


def tiding_of(line: bytes) -> Tiding:
    """The tiding in a line.

    Raises:
        msgspec.MsgspecError: there is none.
    """
    tiding: Tiding = _tidings.decode(line)
    return tiding
