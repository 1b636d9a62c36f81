"""The protocol between the head and its Ray driver: one JSON object per line, over the driver's stdin and stdout.

The driver has no state that the head needs: a new one finds the actors by their names.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import NodeId, SupervisorId

# Time after which a node or driver that lost its Ray head ends itself: without Redis, a new Ray head does not know it.
RAY_RECONNECT_S: Final = 10
LINE_BYTES_MAX: Final = 1 << 22  # an inventory of 10,000 nodes has about 3 MB


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the Ray cluster. `virtual_devices`: number of virtual devices, None for real ones; `why`: the reason of its death."""

    node_id: NodeId
    ray_id: str
    address: str
    alive: bool
    gpus: float
    virtual_devices: int | None = None
    why: str = ""


class SupervisorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments with which an actor starts a supervisor. `environment` holds the head's URL; `cluster` is part of the folder's name.

    `gpus`: number of GPUs of the Ray node, also of those that others hold.
    """

    node_id: NodeId
    token: str
    environment: dict[str, str]
    ca_pem: str
    virtual_devices: int | None
    address: str
    cluster: str
    gpus: int = 0


class RayJoin(msgspec.Struct, frozen=True, kw_only=True):
    """What a server that joins needs to become a node of our Ray cluster. Key and certificate are issued for the server's address.

    `reconnect_s`: how long its Ray node waits for a lost Ray head.
    """

    address: str
    token: str
    key_pem: str
    certificate_pem: str
    ray_version: str
    python_version: str
    reconnect_s: int = RAY_RECONNECT_S


# ------------------------------------------------------------------------------------------------------- head to driver


class StartSupervisor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a supervisor on this node, or adopt the running one."""

    node: RayNode
    spec: SupervisorSpec


class ReleaseNode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop the node's supervisor with all its processes, and release its GPUs in Ray."""

    node_id: NodeId


DriverCommand = StartSupervisor | ReleaseNode

# ------------------------------------------------------------------------------------------------------- driver to head


class DriverConnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver is connected to Ray."""

    version: str


class NodesListed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The Ray cluster's nodes, sent when they change."""

    nodes: list[RayNode]


class SupervisorDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's supervisor and all its processes ended. A newer one may already run: `supervisor_id` identifies the dead one.

    None from an actor of an earlier release.
    """

    node_id: NodeId
    why: str
    supervisor_id: SupervisorId | None = None


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node's supervisor with all its processes and its actor have ended."""

    node_id: NodeId


class DriverProblem(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A problem for the head's log; with a node, its supervisor could not be started. `fatal`: the driver ends."""

    text: str
    node_id: NodeId | None = None
    fatal: bool = False


DriverEvent = DriverConnected | NodesListed | SupervisorDied | NodeReleased | DriverProblem

_encoder: Final = msgspec.json.Encoder()
_orders: Final = msgspec.json.Decoder(DriverCommand)
_tidings: Final = msgspec.json.Decoder(DriverEvent)


def encode_line(message: DriverCommand | DriverEvent) -> bytes:
    """Encode a message as a line."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> DriverCommand:
    """Decode the order in a line.

    Raises:
        msgspec.MsgspecError: it is invalid.
    """
    order: DriverCommand = _orders.decode(line)
    return order


def decode_event(line: bytes) -> DriverEvent:
    """Decode the driver's message in a line.

    Raises:
        msgspec.MsgspecError: it is invalid.
    """
    tiding: DriverEvent = _tidings.decode(line)
    return tiding
