"""Who is at the other end of a connection by plain HTTP: it proves nothing of the head, and a port that is free is anybody's.

So it is spoken within this machine alone, and to nobody but root, ourselves, and the account that the head was said to run under.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from typing import Final

HEAD_UID_VARIABLE: Final = "PHALANX_HEAD_UID"
TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")  # docs.kernel.org: networking/proc_net_tcp
_LISTENS: Final = "0A"
_MAPPED: Final = bytes(10) + b"\xff\xff"  # before an IPv4 address in a socket of both kinds


class Stranger(ConnectionError):
    """Whoever took the connection is not the head: nothing is to be said to them."""


def check_other_end(wire: socket.socket, trusted: frozenset[int]) -> None:
    """Look at who took this connection.

    Args:
        wire: connected, by TCP, and nothing was sent yet.
        trusted: numbers of accounts that the head may run under, besides root and ourselves.

    Raises:
        Stranger: it leaves this machine, or another account's process took it.
    """
    there, port = wire.getpeername()[:2]
    address = ipaddress.ip_address(there.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        raise Stranger(f"{there} is another machine, and no head is spoken to there without TLS")
    others = owners(wire) - trusted - {0, os.geteuid()}
    if others:
        raise Stranger(
            f"port {port} is held by the account with number {min(others)}, which is not the head's ({HEAD_UID_VARIABLE} names that)"
        )


def told() -> dict[str, str]:
    """What a head tells its supervisors of that: its own account, and those that an operator named for other heads of this machine."""
    named = os.environ.get(HEAD_UID_VARIABLE, "")
    return {HEAD_UID_VARIABLE: f"{named},{os.geteuid()}" if named else str(os.geteuid())}


def owners(wire: socket.socket) -> set[int]:
    """Numbers of the accounts that may hold the other end of a connection within this machine; none where the system does not tell.

    Before the connection is taken its row has no inode, and its owner may read 0: it is its listener's then. That one was listening when
    its row was read, for the tables give what listens first, and what it has not taken ends with it.
    """
    here, there = wire.getsockname()[:2], wire.getpeername()[:2]
    listening: set[int] = set()
    for path in TABLES:
        for local, remote, state, uid, inode in _rows(path):
            if state == _LISTENS and local in _listening_words(*there):
                listening.add(uid)
            elif local in _words(*there) and remote in _words(*here) and inode:
                return {uid}
    return listening


def _rows(path: str) -> Iterator[tuple[str, str, str, int, int]]:
    try:
        with open(path, encoding="ascii") as file:
            lines = file.readlines()[1:]
    except OSError:
        return
    for line in lines:
        words = line.split()
        yield words[1], words[2], words[3], int(words[7]), int(words[9])


def _listening_words(host: str, port: int) -> tuple[str, ...]:
    """What a row may say that listens there: that address, or all of either kind."""
    return (*_words(host, port), f"{_hex(bytes(4))}:{port:04X}", f"{_hex(bytes(16))}:{port:04X}")


def _words(host: str, port: int) -> tuple[str, ...]:
    """An address as the tables write it: 32 bits at a time, in this machine's order of bytes."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    known = (packed, _MAPPED + packed) if len(packed) == 4 else (packed, packed.removeprefix(_MAPPED))
    return tuple(f"{_hex(one)}:{port:04X}" for one in known)


def _hex(packed: bytes) -> str:
    return "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))
