"""Sockets of a relay and its head: notice a lost peer, and receive messages of known length."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_PROBE_AFTER_S: Final = 15
_PROBE_EVERY_S: Final = 5
_PROBES: Final = 3
_UNACKNOWLEDGED_MS: Final = 30_000


def notice_lost_peer(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other end vanished: after 30 s, with or without bytes on the way (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes and not one more: what follows belongs to the next reader.

    Raises:
        ConnectionError: the other end disconnected before.
        OSError: the connection failed.
    """
    loop, parts, missing = asyncio.get_running_loop(), [], size
    while missing:
        part = await loop.sock_recv(connection, missing)
        if not part:
            raise ConnectionError("the other end disconnected")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
