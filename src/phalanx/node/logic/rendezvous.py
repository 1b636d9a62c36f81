"""Did rank 0 die because somebody else held the rendezvous port? Judged from what it printed; the gang then tries another, uncharged."""

from __future__ import annotations

import re
from typing import Final

BIND_WINDOW_S: Final = 30.0  # the store is bound in the first seconds; later the words are about some other port
TAIL_BYTES: Final = (
    1 << 16
)  # a traceback through torch's C++ frames is some 10 KiB, of which several ranks may print one
_SIGNS: Final = (b"eaddrinuse", b"address already in use")
_FIVE_DIGITS: Final = re.compile(rb"(?<!\d)\d{5}(?!\d)")


def port_was_taken(tail: bytes, port: int) -> bool:
    """Whether the end of rank 0's output says that the rendezvous port was in use.

    Frameworks word it differently: torch says "bind to [::]:29500 (errno: 98 - Address already in use)", Python's own error names no
    port. So the words decide, unless their line names five-digit numbers, as our ports are, and ours is not among them.
    """
    for line in tail.lower().splitlines():
        if any(sign in line for sign in _SIGNS):
            numbers = _FIVE_DIGITS.findall(line)
            if not numbers or str(port).encode() in numbers:
                return True
    return False
