"""Tokens of supervisors: derived from the head's secret, so that a head that lost nothing but its memory still knows them."""

from __future__ import annotations

import hashlib
import hmac

from phalanx.core.ids import NodeId

_PREFIX = "phxn"


def node_token(secret: bytes, node_id: NodeId) -> str:
    """The token of one node's supervisor: 256 bits bound to the node's name."""
    return f"{_PREFIX}.{node_id}.{_mac(secret, node_id)}"


def node_of(secret: bytes, token: str) -> NodeId | None:
    """The node a token speaks for, or None. Compares in constant time."""
    prefix, _, rest = token.partition(".")
    name, _, mac = rest.rpartition(".")
    # As bytes: compare_digest refuses text outside ASCII, and a header may hold any.
    given, wanted = mac.encode(errors="replace"), _mac(secret, NodeId(name)).encode()
    if prefix != _PREFIX or not name or not hmac.compare_digest(given, wanted):
        return None
    return NodeId(name)


def _mac(secret: bytes, node_id: NodeId) -> str:
    return hmac.new(secret, b"phalanx node " + node_id.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
