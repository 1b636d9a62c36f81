"""Checks the peer of a plain HTTP connection: it does not prove that it is the head, and any account can listen on a free port.

So plain HTTP is used within this machine only, and only with root, our own account, and the account that the head runs under.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from typing import Final

from phalanx.node.head_link.socket_lookup import find_socket

HEAD_UID_VARIABLE: Final = "PHALANX_HEAD_UID"
TCP_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")  # docs.kernel.org: networking/proc_net_tcp
_LISTENS: Final = "0A"
_MAPPED: Final = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address in a dual-stack socket


class UntrustedPeer(ConnectionError):
    """The peer is not the head: send it nothing."""


def check_peer_account(wire: socket.socket, trusted: frozenset[int]) -> None:
    """Check which account accepted this connection.

    Args:
        wire: a TCP connection on which nothing was sent yet.
        trusted: uids that the head may run under, besides root and ours.

    Raises:
        UntrustedPeer: the peer is on another machine, or a process of another account.
    """
    there, port = wire.getpeername()[:2]
    address = ipaddress.ip_address(there.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        raise UntrustedPeer(f"{there} is another machine; a head there must use TLS")
    others = peer_uids(wire) - trusted - {0, os.geteuid()}
    if others:
        raise UntrustedPeer(
            f"port {port} belongs to uid {min(others)}, which is not the head's; set {HEAD_UID_VARIABLE} if it is"
        )


def head_uid_environment() -> dict[str, str]:
    """The variables that a head gives its supervisors: its own uid, and those that the operator configured for other heads here."""
    named = os.environ.get(HEAD_UID_VARIABLE, "")
    return {HEAD_UID_VARIABLE: f"{named},{os.geteuid()}" if named else str(os.geteuid())}


def peer_uids(wire: socket.socket) -> set[int]:
    """The uids that may own the other end of a connection within this machine; none if the system does not report them.

    Before the connection is accepted it has no inode, and its owner may read 0: then the listener's owner counts. That process was
    listening when it was read: listeners come first, and a connection that it did not accept ends with it.
    """
    here, there = wire.getsockname()[:2], wire.getpeername()[:2]
    try:
        listener, other = find_socket(there, None), find_socket(there, here)
    except OSError:  # a kernel without sock_diag, or a sandbox that forbids it
        return _listed_uids(here, there)
    found = other if other is not None and other[1] else listener
    return _listed_uids(here, there) if found is None else {found[0]}


def _listed_uids(here: tuple[str, int], there: tuple[str, int]) -> set[int]:
    """The same from the tables of all connections: their cost grows with those of the whole machine."""
    listening: set[int] = set()
    listeners, ours, theirs = _listening_words(*there), _words(*here), _words(*there)
    for path in TCP_TABLES:
        for local, remote, state, uid, inode in _rows(path):
            if state == _LISTENS and local in listeners:
                listening.add(uid)
            elif local in theirs and remote in ours and inode:
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
    """The rows of a listener on that address, or on all addresses of either family."""
    return (*_words(host, port), f"{_hex(bytes(4))}:{port:04X}", f"{_hex(bytes(16))}:{port:04X}")


def _words(host: str, port: int) -> tuple[str, ...]:
    """An address as the tables write it: 32 bits at a time, in the machine's byte order."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    known = (packed, _MAPPED + packed) if len(packed) == 4 else (packed, packed.removeprefix(_MAPPED))
    return tuple(f"{_hex(one)}:{port:04X}" for one in known)


def _hex(packed: bytes) -> str:
    return "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))
