"""Tokens of supervisors and of servers that join: derived from the head's secret, so that a head that lost nothing but its memory
still knows them.
"""

from __future__ import annotations

import hashlib
import hmac

from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.seat import Seat, read_seat

_PREFIX = "phxn"
_JOIN_PREFIX = "phxj"


def node_token(secret: bytes, node_id: NodeId) -> str:
    """The token of one node's supervisor: 256 bits bound to the node's name."""
    return f"{_PREFIX}.{node_id}.{_mac(secret, node_id)}"


def node_of(secret: bytes, token: str) -> NodeId | None:
    """The node (or the seat of one attempt on it) that a token speaks for, or None. Compares in constant time."""
    prefix, _, rest = token.partition(".")
    name, _, mac = rest.rpartition(".")
    seat = read_seat(name)
    if seat is None:
        good = _mac(secret, NodeId(name))
    else:
        good = seat_token(attempt_key(secret, seat.job_id, seat.epoch), seat).rpartition(".")[2]
    # As bytes: compare_digest refuses text outside ASCII, and a header may hold any.
    given, wanted = mac.encode(errors="replace"), good.encode()
    if prefix != _PREFIX or not name or not hmac.compare_digest(given, wanted):
        return None
    return NodeId(name)


def attempt_key(secret: bytes, job_id: JobId, epoch: Epoch) -> str:
    """What the supervisors of one attempt make their own tokens from: an engine hands it to all of them alike."""
    text = f"phalanx attempt {job_id}.{epoch}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def seat_token(key: str, seat: Seat) -> str:
    """The token of the supervisor on a seat, made where it sits from its `attempt_key`."""
    mac = hmac.new(key.encode(), seat.name.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
    return f"{_PREFIX}.{seat.name}.{mac}"


def join_token(secret: bytes, expires_s: float, salt: str = "") -> str:
    """A token that brings servers in until `expires_s` (Unix seconds), or until the head has another salt; it opens nothing else."""
    until = str(int(expires_s))
    return f"{_JOIN_PREFIX}.{until}.{_join_mac(secret, until, salt)}"


def join_expiry(secret: bytes, token: str, salt: str = "") -> float | None:
    """Until when a join token of this head is good, in Unix seconds; None for any other word. Compares in constant time."""
    prefix, _, rest = token.partition(".")
    until, _, mac = rest.partition(".")
    wanted = _join_mac(secret, until, salt).encode()
    if prefix != _JOIN_PREFIX or not until.isdecimal() or not hmac.compare_digest(mac.encode(errors="replace"), wanted):
        return None
    return float(until)


def looks_like_join(token: str) -> bool:
    """Whether it was a join token once, of this head or of another: what is wrong with it can then be said."""
    return token.startswith(f"{_JOIN_PREFIX}.")


def _join_mac(secret: bytes, until: str, salt: str) -> str:
    text = f"phalanx join {until}" + (f" {salt}" if salt else "")
    return hmac.new(secret, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _mac(secret: bytes, node_id: NodeId) -> str:
    return hmac.new(secret, b"phalanx node " + node_id.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
