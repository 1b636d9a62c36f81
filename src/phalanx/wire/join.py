"""Request and reply of `POST /v1/join`, by which a server becomes a node.

A joining server knows the head's address, the CA's fingerprint and a token. It fetches the CA's certificate from `GET /v1/ca` over
an untrusted connection, compares the fingerprint, and sends the token only over a connection that this CA authenticates.
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
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


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


class JoinArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `phalanx join` for the next server; `address` is empty if the head listens on loopback only."""

    address: str
    token: str
    fingerprint: str
    expires_s: float


def split_address(text: str) -> tuple[str, str | None]:
    """Split HOST or HOST:PORT without validating either; port None without one. An IPv6 host needs brackets when a port follows."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return text.strip().strip("[]"), None
    return host.strip("[]"), port


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fingerprint(certificate_pem: str) -> str:
    """Return the SHA-256 of the first certificate of a PEM text, over its DER form, as `sha256:<64 hex digits>`.

    Raises:
        BadFile: the text has no certificate.
    """
    found = _CERTIFICATE.search(certificate_pem)
    try:
        der = base64.b64decode("".join((found[1] if found else "").split()), validate=True)
    except ValueError:
        der = b""
    if not der:
        raise BadFile("no PEM certificate found", hint="GET /v1/ca returns the head's certificate")
    return FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest()
