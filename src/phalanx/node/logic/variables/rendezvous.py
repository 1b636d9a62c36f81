"""Detect from rank 0's output that the rendezvous port was in use; the gang then restarts with another port, uncharged."""

from __future__ import annotations

import re
from typing import Final

BIND_WINDOW_S: Final = 30.0  # the store binds in the first seconds; a later message is about another port
TAIL_BYTES: Final = 1 << 16  # a traceback through torch's C++ frames has about 10 KiB, and several ranks may print one
_SIGNS: Final = (b"eaddrinuse", b"address already in use")
_FIVE_DIGITS: Final = re.compile(rb"(?<!\d)\d{5}(?!\d)")


def side_port(port: int) -> int:
    """The gang's second port on node rank 0, beside the rendezvous: of an MPI launcher's channel, or of JAX's coordinator.

    Below it, because TensorFlow's workers listen above it.
    """
    return port - 1


def port_was_in_use(tail: bytes, port: int) -> bool:
    """Whether the end of rank 0's output shows that the rendezvous port, or the one beside it, was in use.

    torch prints "bind to [::]:29500 (errno: 98 - Address already in use)", Python's own error names no port. A line with such words counts,
    unless it names five-digit numbers (our ports have five digits) without our port.
    """
    for line in tail.lower().splitlines():
        if any(sign in line for sign in _SIGNS):
            numbers = _FIVE_DIGITS.findall(line)
            if not numbers or not {str(port).encode(), str(side_port(port)).encode()}.isdisjoint(numbers):
                return True
    return False
