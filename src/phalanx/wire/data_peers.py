"""Messages by which nodes find each other to share datasets, and the HTTP between them. The head gives addresses and short-lived tokens, no data.

    POST /v1/node/data   DataPeersRequest -> DataPeersReply     to the head
    GET  /v1/data/{dataset}/chunks?after=N   bytes              to a node: its journal from byte N on, records of index and SHA-256
    GET  /v1/data/{dataset}/chunk/{index}    bytes              to a node: one chunk

Nodes speak TLS. A node's certificate is made by the head, and a peer accepts only the one whose SHA-256 the head named. Each request carries a
token that the head made for this node and this user; the key behind it follows from the node's own token, so no node can make tokens for another.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId

TOKEN_LIFETIME_S: Final = 3600.0  # a staging program gets new ones every few seconds
CLOCK_SKEW_S: Final = 300.0  # by which the clocks of head and node may differ


class DataPeersRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A node's server of chunks for the owner of this job: `port` and `fingerprint`; 0 and "" if it needs a certificate first."""

    supervisor_id: SupervisorId
    job_id: JobId
    epoch: Epoch
    port: int = 0
    fingerprint: str = ""


class DataPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A node with a server of chunks. `rank`: its node rank in the job; None for a node outside."""

    node: NodeId
    rank: int | None
    address: str
    port: int
    fingerprint: str
    token: str


class DataPeersReply(msgspec.Struct, frozen=True, kw_only=True):
    """The other nodes, those of the job first. `certificate_pem`, `key_pem`: for the server of a node that has none yet."""

    peers: list[DataPeer]
    certificate_pem: str = ""
    key_pem: str = ""


def data_key(supervisor_token: str, user: str) -> str:
    """The key of a node's server for one user, which the head and the node derive from the token of the node's supervisor."""
    text = b"phalanx data " + user.encode(errors="surrogatepass")
    return hmac.new(supervisor_token.encode(errors="surrogatepass"), text, hashlib.sha256).hexdigest()


def data_token(key: str, expires_s: float) -> str:
    """A token for the server with this key, until a time in Unix seconds."""
    until = str(int(expires_s))
    return f"{until}.{hmac.new(key.encode(), until.encode(), hashlib.sha256).hexdigest()}"


def is_data_token(key: str, token: str, now_s: float) -> bool:
    """Whether a token is for the server with this key, and still valid. Compares in constant time."""
    until = token.partition(".")[0]
    if not (until.isascii() and until.isdecimal() and len(until) < 16):
        return False
    good = data_token(key, int(until))
    return hmac.compare_digest(token.encode(errors="replace"), good.encode()) and now_s < int(until) + CLOCK_SKEW_S
