"""Reserves a port for a replica of a service on this machine.

A port is free until its server binds it, which takes seconds, and all virtual nodes of a machine share its ports. So supervisors also hold
an abstract Unix socket named by the port: it lives in the same network namespace as the port, and the kernel drops it with its process.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Final

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.prepare.rendezvous_port import port_is_free
from phalanx.node.probes.link_probe import PORT_FIRST, PORT_LAST

_TRIES: Final = 200


class ReservedPort:
    """A port that no other replica on this machine gets until it is closed."""

    def __init__(self, number: int, claim: socket.socket) -> None:
        self.number = number
        self._claim = claim

    def close(self) -> None:
        """Release it."""
        self._claim.close()


def reserve_port(preferred: int) -> ReservedPort:
    """Reserve the preferred port if it is free, else a random free one of the ports of ranks. 0 prefers none.

    Raises:
        PreparationFailed: no free port was found.
    """
    for number in _candidates(preferred):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0phalanx-service-port-{number}")
        except OSError:  # another replica has it
            claim.close()
            continue
        if port_is_free(number):
            return ReservedPort(number, claim)
        claim.close()
    raise PreparationFailed(f"no free port between {PORT_FIRST} and {PORT_LAST} for the service", charge=False)


def _candidates(preferred: int) -> Iterator[int]:
    if preferred:
        yield preferred
    for _ in range(_TRIES):
        yield random.randint(PORT_FIRST, PORT_LAST)
