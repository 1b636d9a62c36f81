"""Picks a free port for a gang's rendezvous."""

from __future__ import annotations

import functools
import random
import socket
from typing import Final

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.variables.rendezvous import side_port
from phalanx.node.probes.link_probe import PORT_FIRST, PORT_LAST

_PORT_TRIES: Final = 200


def free_port() -> int:
    """A port without a listener now, on itself and on its side port. If another process takes it before rank 0 does, the gang retries, uncharged."""
    for _ in range(_PORT_TRIES):
        port = random.randint(PORT_FIRST, PORT_LAST)
        if port_is_free(port) and port_is_free(side_port(port)):
            return port
    raise PreparationFailed(f"no free port between {PORT_FIRST} and {PORT_LAST} for the rendezvous", charge=False)


def port_is_free(port: int) -> bool:
    """Whether it can be bound on all addresses of both families, as torch's store does: by one socket of both, where there is IPv6."""
    family, address = (socket.AF_INET6, "::") if has_ipv6() else (socket.AF_INET, "0.0.0.0")
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((address, port))
    except OSError:
        return False
    return True


@functools.cache
def has_ipv6() -> bool:
    """Whether this kernel allows binding the IPv6 wildcard. Asked once: every job needs the answer several times."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
