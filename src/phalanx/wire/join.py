"""Request and reply of `POST /v1/join`, by which a server becomes a node.

A joining server knows the head's address, the CA's fingerprint and a token. It fetches the CA's certificate from `GET /v1/ca` over
an untrusted connection, compares the fingerprint, and sends the token only over a connection that this CA authenticates.
"""

from __future__ import annotations

import msgspec

from phalanx.core.ids import NodeId


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request. `address`: where other nodes reach the server; `devices`: number of its GPUs, or with `virtual` of virtual devices."""

    node_id: NodeId
    hostname: str = ""
    address: str = ""
    devices: int = 0
    virtual: bool = False


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply. `token` is the node's own; `up`: its supervisor is registered.

    `engine`: keeps the server a node; `settings`: what it needs for that, such as credentials.

    `heads`: URLs of all heads that share a store; empty for a single head.
    """

    node_id: NodeId
    token: str
    head_id: str
    engine: str
    up: bool = False
    settings: dict[str, str] = {}
    heads: list[str] = []


class MachineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the machine of a pool's node is still wanted. If not, it switches itself off; `why`: for its log."""

    wanted: bool
    why: str = ""


class MachineLeaving(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud has announced that it will take a machine back. `why`: in its words."""

    why: str


class JoinArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `phalanx join` for the next server; `address` is empty if the head listens on loopback only.

    `relay_problem`: why the head has no connection to the relay at this address; empty if it has one, or needs none.
    """

    address: str
    token: str
    fingerprint: str
    expires_s: float
    relay_problem: str = ""
