"""Restricts what a process may do that sends to a URL of a user: connect to public addresses, and nothing else.

A user's URL could otherwise reach services that only the head can: those of its own machine, of the cluster's network, or a cloud's metadata.
CPython's audit events show each address after its name was resolved, so that neither names nor redirects lead around the check.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

_FORBIDDEN: Final = frozenset(
    [
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "socket.bind",
        "socket.sendmsg",
        "socket.sendto",
        "subprocess.Popen",
    ]
)
"""Events that a message over HTTP does not need."""
_WEB_PORTS: Final = frozenset({80, 443})
_PORT_MIN: Final = 1024  # of others: those below are of mail and other services to which HTTP is no message
_CODE: Final = tuple({sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class PrivateAddress(PermissionError):
    """The process may not do this for the URL of a user."""


def restrict_process() -> Sequence[str]:
    """Restrict this process until it ends; returns a list of what was refused, which grows."""
    refused: list[str] = []

    def refuse(why: str) -> NoReturn:
        refused.append(why)
        raise PrivateAddress(why)

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            address = args[1]
            if not isinstance(address, tuple) or not is_public(str(address[0])):
                refuse("it leads to an address that is not public")
            if address[1] not in _WEB_PORTS and address[1] < _PORT_MIN:
                refuse(f"it leads to port {address[1]}; 80, 443 and those from {_PORT_MIN} are allowed")
        elif event in _FORBIDDEN and not _probing:
            refuse(f"{event} is not allowed for a user's URL")
        elif event == "open" and isinstance(args[0], str | bytes) and not os.fsdecode(args[0]).startswith(_CODE):
            raise PrivateAddress(
                "a file of the head is not read for a user's URL"
            )  # not noted: libraries look for settings

    sys.addaudithook(check)
    return refused


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public Internet, and not one of this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast and not _is_own(found)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is an address of this machine: a socket can be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    _probing.append(True)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    finally:
        _probing.pop()
    return True


_probing: Final[list[bool]] = []
"""Not empty while the check itself binds a socket."""
