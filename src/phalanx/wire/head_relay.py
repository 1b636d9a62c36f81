"""The opening of a connection between a head and its relay (docs/relay.md): both prove that they know one key, then it is idle, then it carries.

The head connects, and both ends exchange:

    head to relay: GREETING, the head's instance (16 bytes), a nonce (32 bytes)
    relay to head: a nonce (32 bytes), the relay's proof (32 bytes)
    head to relay: the head's proof (32 bytes)
    relay to head: ATTACHED, or OCCUPIED while another instance is attached

A proof is HMAC-SHA256 (RFC 2104) with the key over the name of the role, the instance and both nonces. It differs by role, so that neither
end can return the other's. Then the relay sends PING now and then, and the head returns it. CARRY means that a client's connection follows;
the head returns CARRY, and from then on both directions are bytes of the client's TLS connection with the head.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Final

from phalanx.core.errors import BadRequest

GREETING: Final = b"PHXRELAY1\n"  # its first byte differs from that of a TLS connection (RFC 8446, 5.1: 22)
INSTANCE_BYTES: Final = 16
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
ATTACHED: Final = b"+"
OCCUPIED: Final = b"-"
PING: Final = b"."
CARRY: Final = b"!"
OPENING_S: Final = 10.0  # for all messages of the opening
PING_EVERY_S: Final = 10.0
PONG_S: Final = 10.0  # for the head to return a PING
KEY_FILE: Final = "relay.key"  # in a state folder
CONNECTIONS_MAX: Final = 4096  # of a relay, unless it is given another number
CONNECTIONS_OF_A_SOURCE: Final = 512
_KEY: Final = re.compile(r"phxr\.([0-9a-f]{64})")


def new_key() -> str:
    """Return the text of a new key of 256 bits."""
    return f"phxr.{secrets.token_hex(32)}"


def parse_key(text: str, where: str) -> bytes:
    """Parse the content of a key file.

    Raises:
        BadRequest: it is not a key.
    """
    found = _KEY.fullmatch(text.strip())
    if found is None:
        raise BadRequest(f"{where} does not have the key of a relay", hint="copy the file that phalanx relay created")
    return bytes.fromhex(found[1])


def relay_proof(key: bytes, instance: bytes, head_nonce: bytes, relay_nonce: bytes) -> bytes:
    """Return the proof of the relay."""
    return hmac.digest(key, b"relay" + instance + head_nonce + relay_nonce, "sha256")


def head_proof(key: bytes, instance: bytes, head_nonce: bytes, relay_nonce: bytes) -> bytes:
    """Return the proof of the head."""
    return hmac.digest(key, b"head" + instance + head_nonce + relay_nonce, "sha256")


def is_equal(proof: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(proof, expected)
