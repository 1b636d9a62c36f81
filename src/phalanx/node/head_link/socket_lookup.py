"""Asks the kernel which socket of this machine has a pair of TCP addresses: one message, whatever the number of sockets.

Source: sock_diag(7), <linux/inet_diag.h>: `struct inet_diag_req_v2` and `struct inet_diag_msg`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import Final

NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY, _REQUEST, _ERROR = 20, 1, 2  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR
_HEADER: Final = struct.Struct("=IHHII")
_ALL_STATES: Final = 0xFFFFFFFF
_NO_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # on any interface
_UID_AT: Final = _HEADER.size + 4 + 48 + 12  # after the family's bytes, the addresses, and three counters
_ANSWER_S: Final = 1.0
_ANSWER_MAX: Final = 8192
Address = tuple[str, int]


def find_socket(local: Address, remote: Address | None) -> tuple[int, int] | None:
    """Return owner (uid) and inode of the socket with these ends, else of the one that listens at `local`; None if there is neither.

    The inode is 0 as long as no process has accepted the connection.

    Args:
        local: an IP address and port of this machine.
        remote: of the other end; None for the listener.

    Raises:
        OSError: the kernel does not answer such questions.
    """
    here, there = _packed(local[0]), b"" if remote is None else _packed(remote[0])
    family = socket.AF_INET if len(here) == 4 else socket.AF_INET6
    ports = struct.pack(">HH", local[1], 0 if remote is None else remote[1])
    ends = ports + here.ljust(16, b"\0") + there.ljust(16, b"\0")
    ask = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ALL_STATES) + ends + _NO_COOKIE
    with contextlib.closing(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)) as wire:
        wire.settimeout(_ANSWER_S)
        wire.send(_HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST, 1, 0) + ask)
        answer = wire.recv(_ANSWER_MAX)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        error = OSError(number, os.strerror(number))
        if isinstance(error, FileNotFoundError):
            return None
        raise error
    if kind != _BY_FAMILY or len(answer) < _UID_AT + 8:
        raise OSError(f"the kernel answered a question about a socket with {kind}")
    uid, inode = struct.unpack_from("=II", answer, _UID_AT)
    return uid, inode


def _packed(host: str) -> bytes:
    """An address without its zone; of the older family also where a socket of the newer one has it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).packed
