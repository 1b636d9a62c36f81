"""How a server becomes a node: what it sends to `POST /v1/join`, and what it is given.

A server that joins knows the head's address, the CA's fingerprint and a token. It fetches the CA's certificate from `GET /v1/ca` over
a connection that it does not trust, compares the fingerprint, and sends the token only over one that this CA vouches for.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

import msgspec

from phalanx.core.errors import BadFile
from phalanx.core.ids import NodeId

FINGERPRINT_PREFIX: Final = "sha256:"
# After which a node or driver whose Ray head is gone ends itself: a new head, without Redis, does not know it.
RAY_RECONNECT_S: Final = 10
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's wish. `address`: where other nodes reach it; `devices`: how many GPUs it has, or pretends to with `virtual`."""

    node_id: NodeId
    hostname: str = ""
    address: str = ""
    devices: int = 0
    virtual: bool = False


class RayJoin(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to become a node of the head's Ray cluster. The key and the certificate are the server's own, signed for its address.

    `reconnect_s`: how long a Ray node waits for a Ray head that is gone.
    """

    address: str
    token: str
    key_pem: str
    certificate_pem: str
    ray_version: str
    python_version: str
    reconnect_s: int = RAY_RECONNECT_S


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """`token` is the node's own; `up`: its supervisor has said hello. `ray` is there where Ray brings that; else the server does itself.

    `heads`: where all heads are that share a store; empty where there is one.
    """

    node_id: NodeId
    token: str
    head_id: str
    engine: str
    up: bool = False
    ray: RayJoin | None = None
    heads: list[str] = []


class JoinLine(msgspec.Struct, frozen=True, kw_only=True):
    """What the next server is told: empty `address` where the head listens on loopback alone."""

    address: str
    token: str
    fingerprint: str
    expires_s: float


def split_address(text: str) -> tuple[str, str | None]:
    """(host, port) of HOST or HOST:PORT, neither looked into: None where no port is named. An IPv6 host has brackets when a port follows."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return text.strip().strip("[]"), None
    return host.strip("[]"), port


def joined_address(host: str, port: int) -> str:
    """HOST:PORT, as `split_address` takes it apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fingerprint(certificate_pem: str) -> str:
    """SHA-256 over the DER form of the first certificate in a PEM text, as `sha256:<64 hex digits>`.

    Raises:
        BadFile: there is no certificate in it.
    """
    found = _CERTIFICATE.search(certificate_pem)
    try:
        der = base64.b64decode("".join((found[1] if found else "").split()), validate=True)
    except ValueError:
        der = b""
    if not der:
        raise BadFile("no certificate in PEM form", hint="GET /v1/ca gives the head's")
    return FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest()
