"""Tokens of supervisors and of servers that join, derived from the head's secret: a restarted head can verify them without a database."""

from __future__ import annotations

import hashlib
import hmac

from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.work.seats import Seat, parse_seat

_PREFIX = "phxn"
_JOIN_PREFIX = "phxj"
_MACHINE_PREFIX = "phxm"


def node_token(secret: bytes, node_id: NodeId) -> str:
    """The token of a node's supervisor: 256 bits bound to the node's name."""
    return f"{_PREFIX}.{node_id}.{_mac(secret, node_id)}"


def node_of_token(secret: bytes, token: str) -> NodeId | None:
    """The node, or the seat on it, that a token belongs to; None if invalid. Compares in constant time."""
    prefix, _, rest = token.partition(".")
    name, _, mac = rest.rpartition(".")
    seat = parse_seat(name)
    if seat is None:
        good = _mac(secret, NodeId(name))
    else:
        good = seat_token(attempt_key(secret, seat.job_id, seat.epoch), seat).rpartition(".")[2]
    # As bytes: compare_digest raises for non-ASCII text, and a header may contain any.
    given, wanted = mac.encode(errors="replace"), good.encode()
    if prefix != _PREFIX or not name or not hmac.compare_digest(given, wanted):
        return None
    return NodeId(name)


def attempt_key(secret: bytes, job_id: JobId, epoch: Epoch) -> str:
    """The key from which the supervisors of one attempt derive their tokens; the engine passes it to all of them."""
    text = f"phalanx attempt {job_id}.{epoch}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def seat_token(key: str, seat: Seat) -> str:
    """The token of a seat's supervisor, which derives it from its `attempt_key`."""
    mac = hmac.new(key.encode(), seat.name.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
    return f"{_PREFIX}.{seat.name}.{mac}"


def supervisor_token(secret: bytes, name: NodeId) -> str:
    """The token of a supervisor by its name: that of its node, or of its seat."""
    seat = parse_seat(name)
    return node_token(secret, name) if seat is None else seat_token(attempt_key(secret, seat.job_id, seat.epoch), seat)


def join_token(secret: bytes, expires_s: float, salt: str = "") -> str:
    """A token that lets servers join until `expires_s` (Unix seconds) or until the head's salt changes; it permits nothing else."""
    until = str(int(expires_s))
    return f"{_JOIN_PREFIX}.{until}.{_join_mac(secret, until, salt)}"


def join_expiry(secret: bytes, token: str, salt: str = "") -> float | None:
    """Expiry of a join token of this head in Unix seconds; None for any other text. Compares in constant time."""
    prefix, _, rest = token.partition(".")
    until, _, mac = rest.partition(".")
    wanted = _join_mac(secret, until, salt).encode()
    if prefix != _JOIN_PREFIX or not until.isdecimal() or not hmac.compare_digest(mac.encode(errors="replace"), wanted):
        return None
    return float(until)


def machine_join_token(secret: bytes, node_id: NodeId, order: str) -> str:
    """The token by which the machine of a pool's order joins: for that one node, until it is up. `order`: the order's own token."""
    return f"{_MACHINE_PREFIX}.{node_id}.{_machine_mac(secret, node_id, order)}"


def node_of_machine_token(token: str) -> NodeId | None:
    """The node that such a token names; None for any other text. Whether the token is valid follows from the node's order."""
    prefix, _, rest = token.partition(".")
    name, _, mac = rest.rpartition(".")
    return NodeId(name) if prefix == _MACHINE_PREFIX and name and mac else None


def is_machine_token(secret: bytes, token: str, node_id: NodeId, order: str) -> bool:
    """Whether the token is that of the node's order. Compares in constant time."""
    wanted = machine_join_token(secret, node_id, order).encode()
    return hmac.compare_digest(token.encode(errors="replace"), wanted)


def looks_like_join(token: str) -> bool:
    """Whether the text has the form of a join token, of any head; used for better error messages."""
    return token.startswith(f"{_JOIN_PREFIX}.")


def _join_mac(secret: bytes, until: str, salt: str) -> str:
    text = f"phalanx join {until}" + (f" {salt}" if salt else "")
    return hmac.new(secret, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _machine_mac(secret: bytes, node_id: NodeId, order: str) -> str:
    text = f"phalanx machine {node_id} {order}"
    return hmac.new(secret, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _mac(secret: bytes, node_id: NodeId) -> str:
    return hmac.new(secret, b"phalanx node " + node_id.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
