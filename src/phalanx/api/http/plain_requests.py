"""Reads the head of a plain HTTP/1.1 request at once: one regular expression in place of h11's states, for the requests of supervisors and clients.

h11 decides what a request means. `read_plain_head` accepts a part of what h11 accepts, with the same result, and returns None for all other
bytes, which then go to h11: tests/property/test_plain_requests.py compares both on drawn bytes. It never judges a request as invalid.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

HEAD_BYTES_MAX: Final = 1 << 13  # a longer head goes to h11
_LENGTH_DIGITS_MAX: Final = 15
# Methods and characters are those of RFC 9110 (5.6.2, 9.1) and RFC 9112 (3, 5); a line that begins with a space (obs-fold) does not match.
_HEAD: Final = re.compile(
    rb"(GET|POST|PUT|PATCH|DELETE) (/[\x21-\x7e]*) HTTP/1\.1\r\n"
    rb"((?:[-!#$%&'*+.^_`|~0-9a-zA-Z]+:[\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n"
)
_FOR_H11: Final = frozenset({b"transfer-encoding", b"upgrade", b"expect"})  # they change how the connection goes on


class PlainHead(NamedTuple):
    """The head of a request. `size`: its bytes; `length`: those of its body; `headers`: with lower-case names, in order."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    size: int
    length: int


def read_plain_head(data: bytes) -> PlainHead | None:
    """Read the head with which these bytes begin; None if it is incomplete, or if h11 must read it."""
    found = _HEAD.match(data, 0, HEAD_BYTES_MAX)
    if found is None:
        return None
    headers: list[tuple[bytes, bytes]] = []
    hosts = 0
    length = None
    for line in found[3].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
                return None
            length = int(value)
        elif name in _FOR_H11 or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        headers.append((name, value))
    if hosts != 1:
        return None
    return PlainHead(found[1], found[2], headers, found.end(), length or 0)
