"""Request and reply of `POST /v1/join`, by which a server becomes a node.

A joining server knows the head's address, the CA's fingerprint and a token. It fetches the CA's certificate from `GET /v1/ca` over
an untrusted connection, compares the fingerprint, and sends the token only over a connection that this CA authenticates.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import NodeId

# Time after which a node or driver that lost its Ray head ends itself: without Redis, a new Ray head does not know it.
RAY_RECONNECT_S: Final = 10


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request. `address`: where other nodes reach the server; `devices`: number of its GPUs, or with `virtual` of virtual devices."""

    node_id: NodeId
    hostname: str = ""
    address: str = ""
    devices: int = 0
    virtual: bool = False


class RayJoin(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials for a node of the head's Ray cluster. Key and certificate are issued for the server's address.

    `reconnect_s`: how long a Ray node waits for a lost Ray head.
    """

    address: str
    token: str
    key_pem: str
    certificate_pem: str
    ray_version: str
    python_version: str
    reconnect_s: int = RAY_RECONNECT_S


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply. `token` is the node's own; `up`: its supervisor is registered. `ray`: set if Ray starts the supervisor, else the server does.

    `heads`: URLs of all heads that share a store; empty for a single head.
    """

    node_id: NodeId
    token: str
    head_id: str
    engine: str
    up: bool = False
    ray: RayJoin | None = None
    heads: list[str] = []


class JoinArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `phalanx join` for the next server; `address` is empty if the head listens on loopback only."""

    address: str
    token: str
    fingerprint: str
    expires_s: float
